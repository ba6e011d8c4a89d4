"""What a train loop imports: everything works in any Ray Train loop, and does nothing outside of one."""

from prefect_elastic_train.elastic.notice import resize_requested

__all__ = ["resize_requested"]
