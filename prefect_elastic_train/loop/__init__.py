"""What a train loop imports. Nothing of it imports Ray, and a loop that imports it runs under plain Ray Train, too."""

from prefect_elastic_train.elastic.notice import resize_requested
from prefect_elastic_train.loop.context import RunContext, run_context, use_run_context

__all__ = ["RunContext", "resize_requested", "run_context", "use_run_context"]
