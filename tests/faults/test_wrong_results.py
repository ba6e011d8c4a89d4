"""Damaged hardware that computes wrong results without an error."""

import re
from pathlib import Path

from prefect_elastic_train.core.events import WorkerFailed
from tests.support.clusters import RayHead
from tests.support.processes import Start
from tests.support.reports import history
from tests.support.session_training import SessionTraining


def test_a_rank_whose_weights_have_a_flipped_bit_is_named_and_its_steps_are_done_again(
    start: Start, head: RayHead, tmp_path: Path
) -> None:
    """The newest checkpoint (step 15) is older than the flip (step 17): the final weights are those without it."""
    three = {"min_workers": 3, "max_workers": 3, "resources_per_worker": {"CPU": 0.1}}
    flip = {"flips": (17, 1), "replay_every": 10}
    training = SessionTraining(
        start, tmp_path, scaling=three, shards=8, sleep=0.1, disturbances=flip, cluster=head.block
    )
    training.group(3, steps=15)
    training.group(3)
    assert training.end(attempts=1, worker_failures=1) == [3, 3]
    [failure] = history(training.flow.run, WorkerFailed)
    [cause] = [each for each in failure.causes if not each.is_consequence]
    assert cause.ranks == [1]
    assert re.search(r"WrongResultError: step 20: the weights of rank 1 on ", cause.message)
