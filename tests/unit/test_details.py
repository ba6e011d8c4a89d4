"""Ray's own output, told apart from the user's."""

from __future__ import annotations

import logging
from functools import partial

import pytest
from ray._private.log import PlainRayHandler
from ray.train.v2._internal.execution import context

from prefect_elastic_train.core.ray_output import Details, is_detail, silence_ray_train
from prefect_elastic_train.driver.relay import LineStream
from prefect_elastic_train.orchestration.logs import RunLog

RAYS = [
    "(TrainController pid=5) Graceful shutdown of backend failed.",
    "\x1b[36m(TrainController pid=5, ip=10.0.0.3)\x1b[0m Traceback (most recent call last):",
    "(SplitCoordinator pid=9) Execution plan of Dataset numbers_0: InputDataBuffer[Input]",
    "(raylet) A worker died or was killed while executing a task by an unexpected system error.",
    "(raylet, ip=10.0.0.3) *** SIGSEGV received at time=1",
    "(RayTrainWorker pid=7) @elastic-train-detail Error in training function:",
    "(RayTrainWorker pid=7) [2026-11-22 15:36:29,080 E 7 70] core_worker.cc:1: Failed to connect",
    "(RayTrainWorker pid=7)     @     0x7f00  (unknown)",
    "(RayTrainWorker pid=7) [rank1]:[W1122 15:36:29.123456789 ProcessGroupNCCL.cpp:1496] Warning: destroy",
    "(RayTrainWorker pid=7) E0000 00:00:1795362557.123456    7 coordination_service_agent.cc:334] Polled an error",
    "2026-11-22 15:38:12,196\tWARNING tqdm_ray.py:319 -- tqdm is not installed. Progress bars will be disabled.",
    "    [2026-11-22 16:51:51,419 W 27194 27205] (raylet) store.cc:366: Disconnecting client",
    "(pid=gcs_server) [2026-11-22 16:51:51,415 E 27073 27073] gcs_actor_scheduler.cc:538: Failed",
]
USERS = [
    "(RayTrainWorker pid=7) epoch 3: loss 0.25",
    "(RayTrainWorker pid=7, ip=10.0.0.3) Traceback (most recent call last):",
    "(RayTrainWorker pid=7) [W1122 15:36:29.123456789 reducer.cpp:1400] Warning: find_unused_parameters=True",
    "(MapBatches(clean) pid=7) a row without a number",
    "(autoscaler +12s) Error: No available node types can fulfill resource request",
    "(TrainController pid=5) @elastic-train-told Removed checkpoints whose upload was interrupted: a",
    "2026-11-22 15:38:12,196 INFO train.py epoch 3",
    "(raylet) 3 Workers (tasks / actors) killed due to memory pressure (OOM)",
    "ValueError: mine",
    "",
]


def test_what_is_rays_own_is_a_detail_and_what_is_the_users_or_ours_is_told() -> None:
    assert [line for line in RAYS if not is_detail(line)] == []
    assert [line for line in USERS if is_detail(line)] == []


def test_a_record_of_rays_own_is_a_detail_to_its_end_and_all_of_it_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    record = ["2026-11-22 15:38:12,196\tERROR worker.py:319 -- Failed.", "Traceback (most recent call last):", "E: x"]
    details, log = Details(), RunLog(logging.getLogger("details"), 100)
    with caplog.at_level(logging.DEBUG, "details"):
        for lines in ("mine\n", "\n".join(record) + "\n", "mine too\n"):
            details.take(lambda text: [log.line("stderr", line) for line in text.splitlines()], lines)
    told = [(entry.levelname, entry.getMessage()) for entry in caplog.records]
    assert told == [
        ("INFO", "[stderr] mine"),
        *(("DEBUG", f"[stderr] {line}") for line in record),
        ("INFO", "[stderr] mine too"),
    ]
    assert [line[9:] for line in details.content().decode().splitlines()] == record, "behind the time of day"


def test_what_a_node_has_logged_before_it_was_lost_is_a_detail(caplog: pytest.LogCaptureFixture) -> None:
    details, told = Details(), list[str]()
    stream = LineStream(partial(details.take, told.append), 1)
    print(
        "(raylet) The node with node id 1a has been marked dead because it missed too many heartbeats.\n"
        "    (2) raylet has lagging heartbeats\n    [state-dump] DebugString() time ms: 1",
        file=stream,
    )
    assert all(map(is_detail, "".join(told).splitlines()))


def test_ray_train_says_nothing_in_a_worker_and_the_loop_what_it_logs(caplog: pytest.LogCaptureFixture) -> None:
    console, root, trains = PlainRayHandler(), logging.getLogger(), logging.getLogger("ray.train")
    before = root.handlers[:], trains.handlers[:], trains.propagate, context.logger.parent
    try:
        for logger in (root, trains):  # as Ray Train's configuration of a worker has it
            logger.addHandler(console)
        trains.propagate = False
        silence_ray_train()
        context.logger.warning("Reporting training result 1")
        assert not caplog.records, "it would reach the root"
        assert (console in root.handlers, console in trains.handlers) == (True, False)
        assert console.plain_handler.format(logging.makeLogRecord({"msg": "epoch 3"})) == "epoch 3"
    finally:
        root.handlers, trains.handlers, trains.propagate, context.logger.parent = before


def test_only_so_much_is_kept_and_that_is_the_newest() -> None:
    details = Details()
    for number in range(10_000):
        details.keep(f"{number} {'x' * 10_000}")
    lines = details.content().splitlines()
    assert (len(lines), max(map(len, lines))) == (2000, 2009)
    assert b" 9999 " in lines[-1]
