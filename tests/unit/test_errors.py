"""Ray's output and errors of ranks: separated from output of the user's code, deduplicated, and shortened."""

from __future__ import annotations

import logging
import time
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray._private.log import PlainRayHandler
from ray.train.v2._internal.execution import context

from prefect_elastic_train.core import causes, ray_output
from prefect_elastic_train.orchestration.logs import RunLog

TRACEBACK = """Traceback (most recent call last):
  File "/work/train.py", line 31, in loop
    step(batch)
  File "/work/model.py", line 7, in step
    raise ValueError(f"bad batch {number}")
ValueError: bad batch 17
"""

GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "/work/train.py", line 31, in loop
  |     raise ExceptionGroup("two readers", caught)
  | ExceptionGroup: two readers (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/work/train.py", line 9, in read
    |     raise ValueError("bad batch 17")
    | ValueError: bad batch 17
    +---------------- 2 ----------------
    | ExceptionGroup: inner (1 sub-exception)
    +-+---------------- 1 ----------------
      | KeyError: 'labels'
      +------------------------------------
"""

DEATH = """ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
\tclass_name: RayTrainWorker
The actor is dead because its worker process has died.
"""

CONNECTION = """Traceback (most recent call last):
  File "/torch/distributed.py", line 1, in all_reduce
    work.wait()
RuntimeError: [/gloo/pair.cc:534] Connection closed by peer [10.0.0.3]:3412
"""
NO_ANSWER = f"WorkerHealthCheckFailedError: A worker health check failed.\nWorker info: Worker(…)\n{DEATH}"
EXIT = f"{NO_ANSWER.strip()} Worker exit type: SYSTEM_ERROR Worker exit detail: "


def test_errors_of_a_thousand_ranks_that_differ_only_in_numbers_count_as_one() -> None:
    errors = {rank: f"RuntimeError: rank {rank} lost 10.0.0.{rank % 256} at 0x{rank:012x}" for rank in range(1000)}
    texts, also = causes.distinct_errors(errors)
    assert (texts, also) == ({"0": errors[0]}, {"0": list(range(1, 1000))})
    assert causes.causes(texts, also)[0].startswith("ranks 0-999: RuntimeError: rank 0")
    result = causes.distinct_errors({7: "x 7", 3: "x 3", 11: "y", 5: "x 5", 2: "y"})
    assert result == ({"2": "y", "3": "x 3"}, {"3": [5, 7], "2": [11]})


def test_errors_are_of_a_bounded_size_with_beginning_and_end_and_no_rank_is_forgotten() -> None:
    whole = "x" * 50_000 + "\nValueError: the end"
    assert causes.distinct_errors({0: whole})[0]["0"] == whole
    (cut,) = causes.distinct_errors({0: "y" * 1_000_000 + "\nValueError: the end"})[0].values()
    assert len(cut) <= 100_000
    assert (cut[:3], "bytes left out" in cut, cut[-7:]) == ("yyy", True, "the end")
    errors = {rank: "ghi"[rank // 400] * (rank % 400 + 1) + " " + "z" * 10_000 for rank in range(1000)}
    texts, also = causes.distinct_errors(errors)
    assert sum(map(len, texts.values())) <= 400_000
    thousands = causes.distinct_errors({rank: chr(0x4E00 + rank) * 500 for rank in range(5000)})[0]
    assert sum(len(text.encode()) for text in thousands.values()) <= 500_000, "an event has room for so much"
    assert sorted([*map(int, texts), *chain.from_iterable(also.values())]) == [*range(1000)]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (TRACEBACK, "ValueError: bad batch 17"),
        (f"{TRACEBACK}\nDuring handling:\n\n{CONNECTION}", "RuntimeError: [/gloo/pair.cc:534]"),
        (TRACEBACK.replace("17", "17\n  of two\n"), "ValueError: bad batch 17 of two"),
        (GROUP, "ExceptionGroup: two readers (2 sub-exceptions); ValueError: bad batch 17; ExceptionGroup: in"),
        (f"{GROUP}\nDuring handling:\n\n{TRACEBACK}", "ValueError: bad batch 17"),
        (" \n\n", "no reason given"),
        ("a\nb\n", "a"),
    ],
)
def test_the_cause_is_the_last_exception_of_a_traceback_else_the_first_line(text: str, cause: str) -> None:
    assert causes.causes({"3": text}, {})[0].startswith(f"rank 3: {cause}")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (DEATH, "The actor is dead because its worker process has died."),
        (f"{EXIT}Worker unexpectedly exits with a connection error code 2.", "its process was killed or has crashed"),
        (f"{EXIT}Worker exits by SIGTERM.", "Worker exits by SIGTERM."),
        (f"{EXIT}Task was killed due to the node running low on memory.", "due to the node running low on memory."),
        (NO_ANSWER.replace("is dead because its worker process", "died because its node"), "because its node has died"),
        ("WorkerHealthCheckFailedError: x\nTask was killed: low on memory.\nTop 10:\n5", "killed: low on memory."),
        ("x\nThe node 17 died at noon\ny", "The node 17 died at noon"),
        ("WorkerHealthCheckFailedError: x\ny", "WorkerHealthCheckFailedError: x"),
    ],
)
def test_the_death_of_a_process_has_its_reason_as_cause(text: str, cause: str) -> None:
    assert cause in causes.causes({"0": text}, {})[0]
    assert causes.loop_errors({"0": text}) == {}


def test_deaths_and_errors_of_the_loop_are_causes_and_their_consequences_on_other_ranks_are_not() -> None:
    result = causes.causes({"0": CONNECTION, "3": DEATH}, {"0": [1, 2], "3": [4]})
    assert result == ["ranks 3-4: The actor is dead because its worker process has died."]
    raised = TRACEBACK.replace("ValueError: bad batch 17", "RuntimeError: prefetch worker died: out of shm\nand more")
    errors = {"0": raised, "1": NO_ANSWER, "2": CONNECTION, "3": CONNECTION.replace("gloo", "NCCL")}
    assert causes.loop_errors(errors) == {"0": raised}, "whatever its text"
    assert causes.causes(errors, {})[0] == "rank 0: RuntimeError: prefetch worker died: out of shm and more"
    assert len(causes.causes(errors, {})) == 2
    assert causes.loop_errors({"0": CONNECTION, "1": DEATH}) == {}
    assert causes.causes({"0": CONNECTION, "1": f"{EXIT}connection reset by peer"}, {}) == [
        "rank 1: connection reset by peer"
    ]
    assert causes.loop_errors({"0": CONNECTION}) == {"0": CONNECTION}, "unless there is no other error"


def test_only_some_causes_are_shown_and_the_rest_is_counted() -> None:
    errors = {str(rank): f"{'ABCDEFGHIJ'[rank]}Error: x" for rank in range(10)}
    result = causes.causes(errors, {})
    assert result == ["rank 0: AError: x", "rank 1: BError: x", "rank 2: CError: x", "and 7 other errors"]
    assert causes.causes({}, {}) == []


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (["ValueError: a", "torch.cuda.OutOfMemoryError: b. Tried to", "  bye"], "torch.cuda.OutOfMemoryError: b"),
        (
            ["[2026-11-22 15:36:29,080 E 7 70] (raylet) core_worker.cc:1: Failed. x"],
            "[2026-11-22 15:36:29,080 E 7 70] (raylet) core_worker.cc:1: Failed",
        ),
        (["Fatal Python error: Aborted"], "Fatal Python error: Aborted"),
        (["all is well"], ""),
    ],
)
def test_the_last_error_that_a_process_has_written_is_its_cause(lines: list[str], cause: str) -> None:
    assert causes.last_error_line(lines) == cause


@pytest.mark.parametrize("text", ["node ", "A", "Error", "worker is ", "node x\n"])
def test_no_text_takes_long_to_look_through(text: str) -> None:
    began = time.process_time()
    causes.causes(*causes.distinct_errors({0: text * (60_000 // len(text))}))
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([4], "rank 4"),
        ([7, 3, 2, 1, 0], "ranks 0-3, 7"),
        (range(1000), "ranks 0-999"),
        (range(0, 1000, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18 and 490 more"),
    ],
)
def test_ranks_are_formatted_as_spans(ranks: list[int], words: str) -> None:
    assert causes.format_ranks(ranks) == words


@given(st.dictionaries(st.integers(0, 2000), st.text(max_size=50), max_size=30))
def test_every_rank_is_in_one_group(errors: dict[int, str]) -> None:
    texts, also = causes.distinct_errors(errors)
    assert sorted([*map(int, texts), *chain.from_iterable(also.values())]) == sorted(errors)
    causes.causes(texts, also)


RAYS = [
    "(TrainController pid=5) Graceful shutdown of backend failed.",
    "(SynchronizationActor pid=5) The workers have been waiting for 60.00 s for the following ranks to join",
    "\x1b[36m(TrainController pid=5, ip=10.0.0.3)\x1b[0m Traceback (most recent call last):",
    "(raylet) A worker died or was killed while executing a task by an unexpected system error.",
    "(RayTrainWorker pid=7) @elastic-train-detail Error in training function:",
    "(RayTrainWorker pid=7) [2026-11-22 15:36:29,080 E 7 70] core_worker.cc:1: Failed to connect",
    "(RayTrainWorker pid=7)     @     0x7f00  (unknown)",
    "(RayTrainWorker pid=7) [rank1]:[W1122 15:36:29.123456789 ProcessGroupNCCL.cpp:1496] Warning: destroy",
    "(RayTrainWorker pid=7) E0000 00:00:1795362557.123456    7 coordination_service_agent.cc:334] Polled an error",
    "(RayTrainWorker pid=7) [Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1",
    "(RayTrainWorker pid=7) Connecting to JAX distributed service on 10.0.0.3:53637",
    "2026-11-22 15:38:12,196\tWARNING tqdm_ray.py:319 -- tqdm is not installed. Progress bars will be disabled.",
    "    [2026-11-22 16:51:51,419 W 27194 27205] (raylet) store.cc:366: Disconnecting client",
    "(pid=gcs_server) [2026-11-22 16:51:51,415 E 27073 27073] gcs_actor_scheduler.cc:538: Failed",
]
USERS = [
    "(RayTrainWorker pid=7) [W1122 15:36:29.123456789 reducer.cpp:1400] Warning: find_unused_parameters=True",
    "(MapBatches(clean) pid=7) a row without a number",
    "(RayTrainWorker pid=7) *** SIGTERM received, saving ***",
    "(RayTrainWorker pid=7) W1127 15:36:29.123456 7 socket_reader.py:9] lost 300 samples",
    "(TrainController pid=5) @elastic-train-own Removed checkpoints whose upload was interrupted: a",
    "(raylet) 3 Workers (tasks / actors) killed due to memory pressure (OOM)",
    "",
]


def test_lines_of_ray_are_details_and_lines_of_the_user_and_ours_are_not() -> None:
    assert [line for line in RAYS if not ray_output.is_detail(line)] == []
    assert [line for line in USERS if ray_output.is_detail(line)] == []


def test_a_log_record_of_ray_is_a_detail_with_all_its_lines(caplog: pytest.LogCaptureFixture) -> None:
    record = ["2026-11-22 15:38:12,196\tERROR worker.py:319 -- Failed.", "Traceback (most recent call last):", "E: x"]
    details, log = ray_output.Details(), RunLog(logging.getLogger("details"), 100)
    with caplog.at_level(logging.DEBUG, "details"):
        for lines in ("mine\n", "\n".join(record) + "\n", "mine too\n"):
            details.write(lambda text: [log.line("stderr", line) for line in text.splitlines()], lines)
    logged = [(entry.levelname, entry.getMessage()) for entry in caplog.records]
    assert logged == [
        ("INFO", "[stderr] mine"),
        *(("DEBUG", f"[stderr] {line}") for line in record),
        ("INFO", "[stderr] mine too"),
    ]
    assert [line[9:] for line in details.content().decode().splitlines()] == record, "behind the time of day"


def test_ray_train_is_silent_in_a_worker_and_the_loops_log_records_have_their_level(
    caplog: pytest.LogCaptureFixture,
) -> None:
    console, root, trains = PlainRayHandler(), logging.getLogger(), logging.getLogger("ray.train")
    before = root.handlers[:], trains.handlers[:], trains.propagate, trains.level, context.logger.parent
    try:
        for logger in (root, trains):  # as Ray Train's configuration of a worker has it
            logger.addHandler(console)
        trains.propagate = False
        trains.setLevel(logging.DEBUG)
        ray_output.silence_ray_train()
        context.logger.warning("Reporting training result 1")
        assert not caplog.records, "it would reach the root"
        levels = [level for level in (logging.INFO, logging.WARNING) if context.logger.isEnabledFor(level)]
        assert levels == [logging.WARNING], "a line for each report would fill the disk of Ray's logs"
        assert (console in root.handlers, console in trains.handlers) == (True, False)
        assert (
            console.plain_handler.format(logging.makeLogRecord({"msg": "epoch 3", "levelname": "ERROR"}))
            == "ERROR: epoch 3"
        )
    finally:
        root.handlers, trains.handlers, trains.propagate, trains.level, context.logger.parent = before


def test_only_the_newest_details_are_kept() -> None:
    details = ray_output.Details()
    for number in range(10_000):
        details.add(f"{number} {'x' * 10_000}")
    lines = details.content().splitlines()
    assert (len(lines), max(map(len, lines))) == (2000, 2009)
    assert b" 9999 " in lines[-1]
