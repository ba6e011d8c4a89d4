"""Ray's checkpoint manager with our order of scores, and with commits that list only what is new.

Uses ``ray.train.v2._internal``: Ray's ``CheckpointManager`` alone knows which checkpoints are kept.
"""

from typing import Any

from ray.train import CheckpointConfig
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager

from prefect_elastic_train.core.scores import score_key

#: Number of checkpoints up to which each commit is full, and the most that an incremental commit lists.
_MAX_ADDED = 500


class RankedCheckpointManager(CheckpointManager):  # type: ignore[misc]
    """Ray's checkpoint manager, except that a checkpoint without a score is worse than all with one, in both orders.

    In Ray's manager, a checkpoint without a score is the best one if lower scores are better, and a score that is not a
    number ends the run.
    """

    _listed = 0  # number of checkpoints in the last full commit; 0: the next commit is full

    def _get_checkpoint_score(self, checkpoint: Any) -> tuple[bool, float, int]:
        config = self._checkpoint_config
        rank = score_key(checkpoint.metrics, config.checkpoint_score_attribute or "", config.checkpoint_score_order)
        return *rank, self._checkpoint_to_report_index[checkpoint.checkpoint]

    def _write_state_to_storage(self) -> None:
        """Commit Ray's list of checkpoints.

        A long list that only grows is usually committed as an increment: the checkpoints added since the last full
        commit.
        """
        results = self._checkpoint_results
        # No checkpoint is removed, reordered, or given other metrics by a validation.
        only_grows = self._checkpoint_config == CheckpointConfig() and not self._validated_checkpoints
        if only_grows and max(_MAX_ADDED, self._listed) < len(results) <= self._listed + _MAX_ADDED:
            self._checkpoint_results: list[Any] = results[self._listed :]
            added = self._save_state().encode()
            self._checkpoint_results = results
            self._storage_context.storage_filesystem.handler.commits.commit(added, is_full=False)
        else:
            super()._write_state_to_storage()
            self._listed = len(results)

    def _assert_checkpoints_exist(self) -> None:
        """Do nothing. Ray's check makes a request for each checkpoint, and all existed when the attempt began."""

    def _load_state(self, json_state: str) -> None:
        """Load Ray's list of checkpoints from the text of its snapshot, and sort it again.

        Another version of this package or another checkpoint policy may have ordered the list differently.
        """
        super()._load_state(json_state)
        self._checkpoint_results.sort(key=self._get_checkpoint_score)
