"""What a train loop imports. Nothing of it imports Ray, and a loop that imports it runs under plain Ray Train, too."""

from prefect_elastic_train.loop.context import RunContext, run_context, use_run_context
from prefect_elastic_train.loop.notice import resize_requested

__all__ = ["RunContext", "resize_requested", "run_context", "use_run_context"]
