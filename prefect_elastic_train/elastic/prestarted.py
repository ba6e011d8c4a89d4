"""What Ray imports in each process of a local cluster before anybody can have it."""

from prefect_elastic_train.elastic.prestart import get_ready

get_ready()
