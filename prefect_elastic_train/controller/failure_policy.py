"""The failure policy of a run: whether a failed worker group is restarted, and against which budget it counts.

Uses ``ray.train.v2._internal``, since Ray has no public way to replace a failure policy.
"""

from ray.train import ControllerError, FailureConfig, TrainingFailedError
from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy, FailureDecision
from ray.train.v2._internal.execution.failure_handling.default import _is_preemption_failure

from .controller_state import ControllerState
from .failures import failures_of, permanent_reason, skipped_steps


class RunFailurePolicy(DefaultFailurePolicy):  # type: ignore[misc]
    """Ray Train's failure policy for a run, with these differences.

    - A failure while a node drains counts as a preemption. The node may be lost before its deadline, and the surviving
      ranks see a broken connection first. A loop with an error of its own raises it again after the restart.
    - A storage that refuses permanently and a loop that ignores its checkpoint end the training at once: both would do
      so again. So does a guard that raises.
    - A guard that rolls back lets the next worker group skip a batch.
    - A worker group that restores a recovery point and fails before its first step does not count: after some, the
      checkpoint is restored.
    - A failure stops counting once enough training after it has been committed.
    """

    def __init__(self, failure_config: FailureConfig, state: ControllerState) -> None:
        super().__init__(failure_config)
        self._state = state

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        """Return the decision to start another worker group after a failure or to end the training.

        Records the failure against its budget: that of worker group failures or that of preemptions.
        """
        state = self._state
        state.is_preempted = state.is_draining or _is_preemption_failure(training_failed_error)
        if isinstance(training_failed_error, ControllerError):
            return super().make_decision(training_failed_error)
        failures = failures_of(training_failed_error)
        state.failures = state.failures or failures
        state.skipped_steps |= skipped_steps([*failures.values(), *state.failures.values()])
        if permanent_reason(failures.values()):
            return FailureDecision.RAISE
        if state.keepers.restored_point and not state.loops.has_stepped:
            state.keepers.failures[state.keepers.restored_point] += 1
            return FailureDecision.RETRY
        counting = state.budget.record_failure(state.is_preempted)
        config = self.failure_config
        limit = config.max_preemption_failures if state.is_preempted else config.max_failures
        state.failures_left = max(0, limit - counting - 1) if limit >= 0 else None
        return FailureDecision.RAISE if 0 <= limit <= counting else FailureDecision.RETRY
