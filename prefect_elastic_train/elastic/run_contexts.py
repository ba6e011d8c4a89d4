"""Tells each worker which training it works for, before its loop begins.

Uses ``ray.train.v2._internal``: the public callbacks run in the controller, and what Ray hands to a loop besides its
own context is the user's config, which is not ours to add to.
"""

from __future__ import annotations

from ray.train.v2._internal.execution.callback import WorkerCallback

from prefect_elastic_train.loop.context import RunContext, enter_run

__all__ = ["RunContextCallback"]


class RunContextCallback(WorkerCallback):  # type: ignore[misc]
    """Takes the context to the workers.

    Args:
        context: Of the attempt.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context

    def after_init_train_context(self) -> None:
        """Make it the worker's."""
        enter_run(self._context)
