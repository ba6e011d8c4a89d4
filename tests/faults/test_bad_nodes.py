"""A node whose workers die again and again is left out while others can train, and used again when they cannot."""

from pathlib import Path

import psutil

from prefect_elastic_train.core.events import NodesLeftOut
from tests.support.clusters import ElasticCluster
from tests.support.processes import Start
from tests.support.reports import history
from tests.support.session_training import SessionTraining

SCALING = {
    "accelerator": "gpu",
    "resources_per_worker": {"GPU": 1},
    "max_workers": 3,
    "resize_check_interval_seconds": 1,
    "stability_delay_seconds": 1,
}


def test_a_node_whose_workers_die_is_left_out_until_there_is_no_other(
    start: Start, cluster: ElasticCluster, tmp_path: Path
) -> None:
    bad, *good = [cluster.add_gpu() for _ in range(3)]
    training = SessionTraining(
        start, tmp_path, scaling=SCALING, recovery_points=1, node_strikes=3, cluster=cluster.block
    )
    group = training.group(3)
    for workers in (3, 3, 2):
        [worker] = [line for line in group if line["node"] == bad]
        group = training.group(workers, dead=[worker["pid"]])
    assert {line["node"] for line in group} == {*good}
    cluster.remove(*good)
    group = training.group(1)
    assert [line["node"] for line in group] == [bad]
    psutil.Process(group[0]["pid"]).kill()  # one more: there is still no other node
    assert [line["node"] for line in training.group(1)] == [bad]
    sizes = training.end(attempts=1, worker_failures=5)
    assert (sizes[:4], sizes[-2:]) == ([3, 3, 3, 2], [1, 1])
    left_out, used_again = history(training.flow.run, NodesLeftOut)
    assert left_out.nodes == {bad: "workers crashed, hung or had wrong results"}
    assert used_again.nodes == {}
