"""Ray's output and errors of ranks: separated from output of the user's code, deduplicated, and shortened."""

import logging
import re
import time
from itertools import chain

import pytest
from ray._private.log import PlainRayHandler
from ray.train.v2._internal.execution import context

from prefect_elastic_train.controller.failures import causes_of
from prefect_elastic_train.core import ray_output
from prefect_elastic_train.core.causes import Cause, describe_causes, format_ranks, last_error_line, short_message
from prefect_elastic_train.core.events import WorkerFailed, decode_event, encode_event
from prefect_elastic_train.orchestration.logs import RunLog
from prefect_elastic_train.worker.worker_callbacks import silence_ray_train

DEATH = """ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
\tclass_name: RayTrainWorker
The actor is dead because its worker process has died.
"""
NO_ANSWER = f"WorkerHealthCheckFailedError: A worker health check failed.\nWorker info: Worker(…)\n{DEATH}"
EXIT = f"{NO_ANSWER.strip()} Worker exit type: SYSTEM_ERROR Worker exit detail: "


def test_errors_of_a_thousand_ranks_that_differ_only_in_numbers_count_as_one() -> None:
    errors = {rank: RuntimeError(f"rank {rank} lost 10.0.0.{rank % 256} at 0x{rank:012x}") for rank in range(1000)}
    message = "RuntimeError: rank 0 lost 10.0.0.0 at 0x000000000000"
    assert causes_of(errors) == [Cause([*range(1000)], message, traceback=message)]
    mixed = causes_of({7: OSError("x 7"), 3: OSError("x 3"), 11: OSError("y"), 5: OSError("x 5"), 2: OSError("y")})
    assert [cause.ranks for cause in mixed] == [[2, 11], [3, 5, 7]]


def test_errors_are_of_a_bounded_size_with_beginning_and_end_and_no_rank_is_forgotten() -> None:
    whole = "x" * 50_000 + "\nthe end"
    assert causes_of({0: OSError(whole)})[0].traceback == f"OSError: {whole}"
    (cut,) = causes_of({0: OSError("y" * 1_000_000 + "\nthe end")})
    assert len(cut.traceback) <= 100_000
    assert re.fullmatch("(?s)OSError: y.*bytes left out.*the end", cut.traceback)
    thousands = causes_of({rank: OSError(chr(0x4E00 + rank) * 5000) for rank in range(5000)})
    event = decode_event(encode_event(WorkerFailed(causes=thousands, retried=True)))
    assert sorted(chain.from_iterable(cause.ranks for cause in event.causes)) == [*range(5000)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (DEATH, "The actor is dead because its worker process has died."),
        (f"{EXIT}Worker unexpectedly exits with a connection error code 2.", "its process was killed or has crashed"),
        (f"{EXIT}Worker exits by SIGTERM.", "Worker exits by SIGTERM."),
        (f"{EXIT}Task was killed due to the node running low on memory.", "due to the node running low on memory."),
        (NO_ANSWER.replace("is dead because its worker process", "died because its node"), "because its node has died"),
        ("WorkerHealthCheckFailedError: x\nTask was killed: low on memory.\nTop 10:\n5", "killed: low on memory."),
        ("x\nThe node 17 died at noon\ny", "The node 17 died at noon"),
        ("\n WorkerHealthCheckFailedError: x\ny", "WorkerHealthCheckFailedError: x"),
        (
            'The actor died because of an error, ray::X()\n  File "x.py", line 3, in f\n    g()\nOSError: a\n  b\n',
            "OSError: a b",
        ),
        (" \n\n", "no reason given"),
    ],
)
def test_a_message_of_ray_is_shortened_to_the_reason_of_a_death_or_error_or_to_its_first_line(
    text: str, message: str
) -> None:
    assert message in short_message(text)
    assert len(short_message(text)) < 200


def test_leading_causes_are_shown_with_their_ranks_and_the_rest_is_counted() -> None:
    broken = Cause([0, 1, 2], "RuntimeError: closed by peer", is_consequence=True)
    died = Cause([3], "the node died")
    assert describe_causes([broken, died], {3: "pid 7, node a"}) == ["rank 3 (pid 7, node a): the node died"]
    assert describe_causes([broken], {0: "pid 7"}) == ["ranks 0-2: RuntimeError: closed by peer"]  # it is the only one
    several = [Cause([rank], f"{'ABCDE'[rank]}Error: x") for rank in range(5)]
    assert describe_causes([*several, broken])[2:] == ["rank 2: CError: x", "and 2 other errors"]
    assert describe_causes([]) == []


@pytest.mark.parametrize(
    ("lines", "error"),
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
def test_the_last_error_that_a_process_has_written_is_its_cause(lines: list[str], error: str) -> None:
    assert last_error_line(lines) == error


@pytest.mark.parametrize("text", ["node ", "A", "Error", "worker is ", "node x\n"])
def test_no_text_takes_long_to_look_through(text: str) -> None:
    began = time.process_time()
    short_message(text * (60_000 // len(text)))
    assert time.process_time() - began < 1


def test_ranks_are_formatted_as_spans() -> None:
    assert format_ranks([4]) == "rank 4"
    assert format_ranks([7, 3, 2, 1, 0]) == "ranks 0-3, 7"
    assert format_ranks(range(0, 1000, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18 and 490 more"


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
    assert [line[9:] for line in details.content().decode().splitlines()] == record  # behind the time of day


def test_ray_train_is_silent_in_a_worker_and_the_loops_log_records_have_their_level(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    console, root, trains = PlainRayHandler(), logging.getLogger(), logging.getLogger("ray.train")
    for logger in (root, trains):  # as Ray Train's configuration of a worker has it
        monkeypatch.setattr(logger, "handlers", [*logger.handlers, console])
    for owner, name, value in (
        (trains, "propagate", False),
        (trains, "level", logging.DEBUG),
        (context.logger, "parent", context.logger.parent),
    ):
        monkeypatch.setattr(owner, name, value)
    silence_ray_train()
    context.logger.warning("Reporting training result 1")
    assert not caplog.records  # it would reach the root
    assert [context.logger.isEnabledFor(level) for level in (logging.INFO, logging.WARNING)] == [False, True]
    assert (console in root.handlers, console in trains.handlers) == (True, False)
    record = logging.makeLogRecord({"msg": "epoch 3", "levelname": "ERROR"})
    assert console.plain_handler.format(record) == "ERROR: epoch 3"


def test_only_the_newest_details_are_kept() -> None:
    details = ray_output.Details()
    for number in range(10_000):
        details.add(f"{number} {'x' * 10_000}")
    lines = details.content().splitlines()
    assert (len(lines), max(map(len, lines))) == (2000, 2009)
    assert b" 9999 " in lines[-1]
