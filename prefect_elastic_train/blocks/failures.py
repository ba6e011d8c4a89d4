"""How much may fail before a training does."""

from __future__ import annotations

from prefect_elastic_train.blocks._common import TrainingBlock
from prefect_elastic_train.core.settings import FailureSettings


class FailureBudget(TrainingBlock, FailureSettings):
    """How much may fail before a training does, on each level of recovery.

    Attributes:
        max_failures: Worker-group failures recovered in the cluster, per attempt; -1 unlimited. Default 3.
        max_preemption_failures: Preemptions recovered in the cluster; -1 unlimited. Default -1.
        driver_restarts: New drivers after a lost driver, head or cluster. Default 3.
        driver_restart_delay_seconds: Seconds before the first restart, doubled up to 300. Default 10.
        preemption_grace_seconds: Seconds that survivors go on past a preemption deadline. Default 0.
        relax_collectives_on_preemption: Commit without the preempted ranks. Default False.
        max_attempts_without_progress: Attempts in a row without a new checkpoint. Default 2.
        stall_timeout_seconds: Seconds without a report that fail the worker group; 0 off. Default 0.
        ignored_checkpoint: ``"warn"`` of a restarted loop that ignores its checkpoint, or ``"fail"``. Default "warn".

    Example:
        Allow many driver restarts for a run of several weeks::

            from prefect_elastic_train import FailureBudget

            failures = FailureBudget(max_failures=-1, driver_restarts=50)
            failures.save("BLOCK_NAME")
            failures = FailureBudget.load("BLOCK_NAME")
    """

    _block_type_name = "Failure Budget"
    _block_type_slug = "failure-budget"
    _description = "How much may fail before a training does: workers, preemptions, drivers."
