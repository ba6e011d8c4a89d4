"""What the report, the progress, the events and the log of a run cost: `python -m benchmarks.reporting`.

Three parts: reports a second of a training with and without reporting; processor time and API writes of a supervisor
that follows a simulated run of 1,000 workers; size and memory of the report of a long history.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.common import (
    POLL_SECONDS,
    SAME_POLL,
    Side,
    SideFailedError,
    SideRun,
    Workbench,
    machine_lines,
    markdown_table,
    parse_arguments,
    rotated,
    summary,
    warm_up,
)
from benchmarks.loops import WORKERS, LoopSettings, SideSettings

if TYPE_CHECKING:
    from prefect_elastic_train.core.events import Event
    from prefect_elastic_train.orchestration.logs import RunLog
    from prefect_elastic_train.orchestration.report_publisher import Publisher

PARTS = ("throughput", "supervisor", "memory")

THROUGHPUT_LOOPS = {
    "paced by the polls": LoopSettings(steps=350, step_seconds=0.01, checkpoint_every=50),
    "paced by its work": LoopSettings(steps=300, step_seconds=0, work_seconds=0.3, checkpoint_every=50),
}
"""A report waits for the controller's poll. A loop that works for longer than that keeps all cores of the machine busy,
so that whatever reporting takes is missing there."""

UNMEASURED_STEPS = 60
"""In the first half minute matplotlib is imported and the first pictures are drawn."""
ON = Side("reporting on", "ours-reporting", needs_prefect=True)
OFF = Side("reporting off", "ours-reporting", {"PREFECT_ELASTIC_TRAIN_REPORTING": "false"}, needs_prefect=True)
RAW = Side("raw-same-poll", "raw-reporting", SAME_POLL)
THROUGHPUT_SIDES = (ON, OFF, RAW)
THROUGHPUT_LIMIT = 0.99

SUPERVISOR = Side("supervisor", "supervisor", needs_prefect=True)
SIMULATED_WORKERS = 1000
REPORTS_PER_SECOND = 95
COMMITS_PER_SECOND = 5
"""Each is a report as well, and tells a stall besides, which makes 100 events a second."""

FAILURE_SECONDS = 20
FAILING_SECONDS = 60
"""So long workers fail; what comes after is the steady state."""

ALONE_SECONDS = 20
TICK_SECONDS = 0.1
CPU_LIMIT_PERCENT = 5.0
LOG_THREADS = ("APILogWorkerThread", "GlobalEventLoopThread")
"""Prefect's threads that send the log; the second one also sends the events, which takes little."""

WRITES_LIMIT = 12.0
GAP_LIMIT_SECONDS = 5.0

REPLAY = Side("memory", "replay")
REPLAY_LOOP = LoopSettings(steps=100_000, step_seconds=0.5, checkpoint_every=200)
REPLAY_STRIDE = 10_000
REPORT_LIMIT_BYTES = 300_000
MEMORY_LIMIT_MB = 20.0
MB = 10**6

RUN_NAME = "llama-7b"
RUN_URI = f"s3://bucket/runs/{RUN_NAME}"
WORKERS_PER_NODE = 8
PEER_ERROR = (
    'Traceback (most recent call last):\n  File "/app/train.py", line 81, in train\n    loss.backward()\n'
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.{rank}]:4711"
)
DEAD = "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."


@dataclass(frozen=True)
class Life:
    """What befalls a simulated run, in reports from one to the next; 0: never.

    Attributes:
        failures: All ranks of the worker group fail.
        failures_until: The last report that a failure may follow; 0: any.
        resizes: The worker group is resized.
        drivers: The driver is lost.
    """

    failures: int = 0
    failures_until: int = 0
    resizes: int = 0
    drivers: int = 0


class SimulatedRun:
    """The history of a run that nobody trains.

    Args:
        began: When it begins, in seconds since the epoch.
        loop: Its reports and checkpoints.
        workers: Size of its first worker group.
        life: What befalls it.
    """

    def __init__(self, began: float, loop: LoopSettings, workers: int, life: Life) -> None:
        self._loop = loop
        self._life = life
        self._at = began
        self._workers = workers
        self._attempt = self._step = self._kept = self._index = 0
        self._alive_at = 0.0

    def events(self) -> Iterator[Event]:
        """All its events; it does not end."""
        yield from self._start_driver()
        for number in range(1, self._loop.steps + 1):
            self._at += self._loop.step_seconds
            self._step += 1
            self._index += 1
            yield from self._report(number)
            if _is_due(number, self._life.failures) and number <= (self._life.failures_until or number):
                yield from self._fail()
            if _is_due(number, self._life.resizes):
                yield from self._resize()
            if _is_due(number, self._life.drivers):
                yield from self._lose_driver()

    def _report(self, number: int) -> Iterator[Event]:
        from prefect_elastic_train.core.events import (
            ALIVE_SECONDS,
            CheckpointCommitted,
            CheckpointStalled,
            ControllerAlive,
            Reported,
        )

        at, attempt = self._at, self._attempt
        metrics = simulated_metrics(self._step, self._loop.steps)
        common = {
            "at": at,
            "attempt": attempt,
            "index": self._index,
            "metrics": metrics,
            "world_size": self._workers,
        }
        if self._loop.steps_after_checkpoint(number):
            yield Reported(**common)
        else:
            self._kept = self._step
            yield CheckpointCommitted(checkpoint=f"checkpoint_{number:09}", size_bytes=123 * MB, **common)
            yield CheckpointStalled(at=at, attempt=attempt, seconds=self._loop.step_seconds / 10)
        if at - self._alive_at >= ALIVE_SECONDS:
            self._alive_at = at
            yield ControllerAlive(at=at, attempt=attempt, doing="polling the workers", seconds=0.1)

    def _fail(self) -> Iterator[Event]:
        from prefect_elastic_train.core.causes import Cause
        from prefect_elastic_train.core.events import StateChanged, WorkerFailed

        dead = self._workers // 2
        peer_error = PEER_ERROR.format(rank=0)
        others = [rank for rank in range(self._workers) if rank != dead]
        message = peer_error.splitlines()[-1]
        causes = [
            Cause(others, message, is_consequence=True, traceback=peer_error),
            Cause([dead], DEAD, is_death=True, traceback=DEAD),
        ]
        lost = self._step - self._kept
        yield WorkerFailed(at=self._at, attempt=self._attempt, causes=causes, retried=True, reports_lost=lost)
        yield StateChanged(at=self._at, attempt=self._attempt, state="RESTARTING")
        yield from self._start_group()

    def _resize(self) -> Iterator[Event]:
        from prefect_elastic_train.core.events import WorkerGroupResized

        old, self._workers = self._workers, self._workers + WORKERS_PER_NODE
        yield WorkerGroupResized(
            at=self._at, attempt=self._attempt, old_size=old, new_size=self._workers, reason="commit", waited_seconds=12
        )
        yield from self._start_group()

    def _lose_driver(self) -> Iterator[Event]:
        from prefect_elastic_train.core.events import AttemptEnded
        from prefect_elastic_train.core.outcomes import Outcome

        message = "the driver process (pid 4711) was ended by signal SIGKILL"
        yield AttemptEnded(at=self._at, attempt=self._attempt, outcome=Outcome.DRIVER_LOST, message=message)
        yield from self._start_driver()

    def _start_driver(self) -> Iterator[Event]:
        from prefect_elastic_train.core.events import AttemptStarted

        self._attempt += 1
        self._index = 0
        yield AttemptStarted(
            at=self._at, attempt=self._attempt, run_name=RUN_NAME, run_uri=RUN_URI, driver_started_at=self._at
        )
        yield from self._start_group()

    def _start_group(self) -> Iterator[Event]:
        from prefect_elastic_train.core.events import StateChanged, WorkerGroupStarted

        self._step = self._kept
        ranks = {f"{ip}:{pid}": rank for rank, (ip, pid) in enumerate(map(worker_place, range(self._workers)))}
        for state in ("SCHEDULING", "RUNNING"):
            yield StateChanged(at=self._at, attempt=self._attempt, state=state)
        yield WorkerGroupStarted(at=self._at, attempt=self._attempt, world_size=self._workers, ranks=ranks)


def _is_due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0


def simulated_metrics(step: int, steps: int) -> dict[str, Any]:
    """What a loop reports at a step: a loss that falls, with a peak now and then."""
    share = step / steps
    loss = 2.5 * (1 - 0.9 * share) + step * 7919 % 101 / 2000 + (3 if step % 9973 == 0 else 0)
    return {
        "step": step,
        "total_steps": steps,
        "loss": loss,
        "accuracy": 1 - loss / 6,
        "learning_rate": 1e-3 * (1 - share),
        "gradient_norm": 1 + step * 31 % 17 / 17,
    }


def worker_place(rank: int) -> tuple[str, int]:
    """Address of the node and process id of a simulated worker."""
    node, place = divmod(rank, WORKERS_PER_NODE)
    return f"10.0.{node // 200}.{node % 200 + 10}", 20_000 + place


@dataclass
class Following:
    """What following a run has cost over some time.

    Attributes:
        seconds: Wall time.
        cpu: Processor time of the whole process, in seconds.
        work: Processor time of the thread that follows, by what it does.
        threads: Processor time of the process's threads by their names; those that have ended are left out.
        writes: Requests and events by what they write.
    """

    seconds: float
    cpu: float
    work: dict[str, float] = field(default_factory=dict)
    threads: dict[str, float] = field(default_factory=dict)
    writes: dict[str, int] = field(default_factory=dict)

    def since(self, before: Following) -> Following:
        """The difference to an earlier state."""
        return Following(
            seconds=self.seconds - before.seconds,
            cpu=self.cpu - before.cpu,
            work={name: value - before.work.get(name, 0.0) for name, value in self.work.items()},
            threads={name: value - before.threads.get(name, 0.0) for name, value in self.threads.items()},
            writes={name: value - before.writes.get(name, 0) for name, value in self.writes.items()},
        )


class WriteCounter:
    """Counts what this process writes to the Prefect API: at httpx, and where Prefect takes events."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        #: When the report ("str") and the progress ("float") were written, by the monotonic clock.
        self.artifacts_at: dict[str, list[float]] = defaultdict(list)

    def install(self) -> None:
        """Count from now on, for the rest of the process."""
        import httpx
        import prefect.events

        send, send_async = httpx.HTTPTransport.handle_request, httpx.AsyncHTTPTransport.handle_async_request
        emit = prefect.events.emit_event

        def handle_request(transport: Any, request: httpx.Request) -> httpx.Response:
            self._count(request)
            return send(transport, request)

        async def handle_async_request(transport: Any, request: httpx.Request) -> httpx.Response:
            self._count(request)
            return await send_async(transport, request)

        def emit_event(event: str, *arguments: Any, **named: Any) -> Any:
            self.counts[f"event {event.rpartition('.')[2]}"] += 1
            return emit(event, *arguments, **named)

        httpx.HTTPTransport.handle_request = handle_request  # type: ignore[method-assign]
        httpx.AsyncHTTPTransport.handle_async_request = handle_async_request  # type: ignore[method-assign]
        prefect.events.emit_event = emit_event

    def _count(self, request: Any) -> None:
        path = request.url.path
        if request.method == "GET" or path.endswith("/filter"):
            return
        if "/artifacts/" in path:
            self.artifacts_at[type(json.loads(request.content)["data"]).__name__].append(time.monotonic())
            self.counts["artifact"] += 1
        elif "/logs/" in path:
            self.counts["batch of log lines"] += 1


class Follower:
    """Does with each line of a driver's output what `elastic_train` does, and takes the time of it."""

    def __init__(self, log: RunLog, publisher: Publisher) -> None:
        self.work = dict.fromkeys(("decode", "log", "report"), 0.0)
        self._log = log
        self._publisher = publisher

    def take(self, line: bytes) -> None:
        """Take a line in."""
        from prefect_elastic_train.core.events import EVENT_TAG, decode_event

        began = time.thread_time()
        text = line.decode(errors="replace").rstrip("\n")
        event = decode_event(text[len(EVENT_TAG) :]) if text.startswith(EVENT_TAG) else None
        began = self._spent("decode", began)
        if event is None:
            self._log.line("driver", text)
            self._spent("log", began)
            return
        self._log.event(event)
        began = self._spent("log", began)
        self._publisher.add(event)
        self._spent("report", began)

    def _spent(self, what: str, began: float) -> float:
        now = time.thread_time()
        self.work[what] += now - began
        return now


def follow_simulated_run(settings: SideSettings) -> None:
    """Follow a simulated run in a flow, and write down what that has cost."""
    writes = WriteCounter()
    writes.install()  # before anything takes Prefect's functions by their names
    from prefect import flow
    from prefect.context import get_run_context
    from prefect.logging import get_run_logger

    from prefect_elastic_train.core.operator_settings import get_settings
    from prefect_elastic_train.orchestration.logs import RunLog
    from prefect_elastic_train.orchestration.report_publisher import Publisher
    from prefect_elastic_train.report.run_report import RunReport

    @flow(name="benchmark")
    def benchmark() -> dict[str, Any]:
        lines = output_of_simulated_run(settings.loop)
        alone = _state({}, writes)
        feed(lines, 0, ALONE_SECONDS, lambda line: None)
        alone = _state({}, writes).since(alone)
        errors: list[str] = []
        # As elastic_train sets them up.
        publisher = Publisher(
            RunReport(run_name=RUN_NAME, score_attribute="loss", score_order="min"),
            errors.append,
            interval_seconds=get_settings().report_interval_seconds,
            flow_run_id=str(get_run_context().flow_run.id),
        )
        publisher.start()
        follower = Follower(RunLog(get_run_logger(), get_settings().log_lines_per_second), publisher)
        states = [_state(follower.work, writes)]
        feed(lines, 0, FAILING_SECONDS, follower.take)
        states.append(_state(follower.work, writes))
        feed(lines, FAILING_SECONDS, float("inf"), follower.take)
        states.append(_state(follower.work, writes))
        gaps = [later - at for times in writes.artifacts_at.values() for at, later in itertools.pairwise(times)]
        publisher.end("completed")
        publisher.close()
        return {
            "alone": asdict(alone),
            "failing": asdict(states[1].since(states[0])),
            "steady": asdict(states[2].since(states[1])),
            "smallest_gap": min(gaps, default=0.0),
            "errors": len(errors),
        }

    settings.write_result(benchmark())


def output_of_simulated_run(loop: LoopSettings) -> list[tuple[float, bytes]]:
    """What the driver of a simulated run prints, and when, in seconds from its beginning."""
    from prefect_elastic_train.core.events import EVENT_TAG, encode_event

    began = time.time()
    life = Life(
        failures=FAILURE_SECONDS * REPORTS_PER_SECOND,
        failures_until=FAILING_SECONDS * REPORTS_PER_SECOND - 1,
    )
    run = SimulatedRun(began, loop, SIMULATED_WORKERS, life)
    lines = [(event.at - began, f"{EVENT_TAG}{encode_event(event)}\n".encode()) for event in run.events()]
    for number in range(int(loop.steps / REPORTS_PER_SECOND * loop.lines_per_second)):
        ip, pid = worker_place(number * 7 % SIMULATED_WORKERS)
        text = f"\x1b[36m(RayTrainWorker pid={pid}, ip={ip})\x1b[0m step {number}: loss 2.345, 1,234 tokens/s\n"
        lines.append((number / loop.lines_per_second, text.encode()))
    return sorted(lines, key=lambda line: line[0])


def feed(lines: Sequence[tuple[float, bytes]], start: float, end: float, take: Callable[[bytes], None]) -> None:
    """Hand over the lines of a span of time, each when it is due or up to a tick later."""
    began = time.monotonic() - start
    for at, line in lines:
        if not start <= at < end:
            continue
        if at > time.monotonic() - began:
            time.sleep(TICK_SECONDS)
        take(line)


def _state(work: dict[str, float], writes: WriteCounter) -> Following:
    process = psutil.Process()
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    spent: Counter[str] = Counter()
    for thread in process.threads():
        spent[names.get(thread.id, "others")] += thread.user_time + thread.system_time
    cpu = process.cpu_times()
    return Following(time.monotonic(), cpu.user + cpu.system, dict(work), dict(spent), dict(writes.counts))


def replay_history(settings: SideSettings) -> None:
    """Make the report of a long history, and write down its largest size and the growth of the memory, in bytes."""
    from prefect_elastic_train.core.events import Report
    from prefect_elastic_train.report.markdown import render
    from prefect_elastic_train.report.pictures import draw
    from prefect_elastic_train.report.run_report import RunReport

    report = RunReport(run_name=RUN_NAME, score_attribute="loss", score_order="min")
    life = Life(failures=16_950, resizes=24_950, drivers=29_950)
    sizes: list[int] = []
    memory: list[int] = []
    for event in SimulatedRun(time.time(), settings.loop, SIMULATED_WORKERS, life).events():
        report.add(event)
        if isinstance(event, Report) and report.reports % REPLAY_STRIDE == 0:
            sizes.append(len(render(report, event.at, draw(report, event.at)).encode()))
            gc.collect()
            memory.append(psutil.Process().memory_info().rss)
    settings.write_result(
        {"sizes": sizes, "growth": memory[-1] - memory[0], "state": len(report.model_dump_json()), "cpu": _cpu()}
    )


def _cpu() -> float:
    cpu = psutil.Process().cpu_times()
    return cpu.user + cpu.system


def measure_throughput(run: SideRun, loop: LoopSettings) -> float:
    """Reports a second of a run, by its rank 0."""
    run.wait(timeout=300)
    times = [line.at for line in run.ledger.read() if line.rank == 0]
    if len(times) != loop.steps:
        raise run.failed(f"did {len(times)} steps instead of {loop.steps}")
    measured = times[UNMEASURED_STEPS - 1 :]
    return (len(measured) - 1) / (measured[-1] - measured[0])


@dataclass(frozen=True)
class SupervisorSample:
    """What one supervisor has cost."""

    alone: Following
    failing: Following
    steady: Following
    smallest_gap: float

    @classmethod
    def of(cls, run: SideRun, seconds: int) -> SupervisorSample:
        """Let a supervisor come to its end."""
        run.wait(timeout=seconds + ALONE_SECONDS + 120)
        result = run.result()
        if result["errors"]:
            raise run.failed(f"could not write {result['errors']} times")
        phases = {name: Following(**result[name]) for name in ("alone", "failing", "steady")}
        return cls(**phases, smallest_gap=result["smallest_gap"])

    def percent(self, phase: Following) -> float:
        """Share of a core that following takes, without what the loop takes that hands over the lines."""
        return 100 * (phase.cpu / phase.seconds - self.alone.cpu / self.alone.seconds)

    def percent_of_log(self, phase: Following) -> float:
        """The part of it that writing the log takes, here and in Prefect's threads."""
        return 100 * (phase.work["log"] + sum(phase.threads.get(name, 0.0) for name in LOG_THREADS)) / phase.seconds

    def percent_without_log(self, phase: Following) -> float:
        """The part of it that everything else takes: events, report, artifacts."""
        return self.percent(phase) - self.percent_of_log(phase)


def writes_per_minute(phase: Following) -> float:
    """Artifacts and events a minute; Prefect batches the log itself."""
    told = sum(count for name, count in phase.writes.items() if name == "artifact" or name.startswith("event "))
    return 60 * told / phase.seconds


def limit_line(what: str, values: Sequence[float], limit: float, at_least: bool = False, digits: int = 2) -> str:
    """One line that holds the median of some values against a limit."""
    allowed = f"{'>=' if at_least else '<='} {limit:g}"
    if not values:
        return f"- {what}: not measured ({allowed})"
    middle = statistics.median(values)
    kept = middle >= limit if at_least else middle <= limit
    return f"- {what}: {middle:.{digits}f} ({allowed}): {'PASS' if kept else 'FAIL'}"


def show_throughput(samples: dict[tuple[str, str], list[float]]) -> list[str]:
    """Print the first table and give its lines against the limits."""
    print(f"Throughput: {WORKERS} workers with a report at each step; poll interval {POLL_SECONDS} s.\n")
    for pace, loop in THROUGHPUT_LOOPS.items():
        print(
            f"- {pace}: {loop.steps} steps of {loop.step_seconds:g} s of pause and {loop.work_seconds:g} s of "
            f"processor time, a checkpoint every {loop.checkpoint_every}"
        )
    print()
    sides = [(pace, side.name) for pace in THROUGHPUT_LOOPS for side in THROUGHPUT_SIDES]
    rows = [[*side, str(len(samples[side])), summary(samples[side], 3)] for side in sides]
    print(markdown_table(["loop", "side", "runs", "reports a second"], rows), end="\n\n")
    lines = []
    for pace in THROUGHPUT_LOOPS:
        on, off = samples[pace, ON.name], samples[pace, OFF.name]
        ratio = [statistics.median(on) / statistics.median(off)] if on and off else []
        what = f"reports a second, {pace}, on to off"
        lines.append(limit_line(what, ratio, THROUGHPUT_LIMIT, at_least=True, digits=4))
    return lines


def show_supervisor(samples: Sequence[SupervisorSample], lines_per_second: float) -> list[str]:
    """Print the tables of the second part and give its lines against the limits."""
    events = REPORTS_PER_SECOND + COMMITS_PER_SECOND
    print(
        f"Supervisor of {SIMULATED_WORKERS} simulated workers: {events} events and {lines_per_second:g} lines of "
        f"output a second; all workers fail each {FAILURE_SECONDS} s for {FAILING_SECONDS} s, then none.\n"
    )
    phases = [[(sample, sample.failing) for sample in samples], [(sample, sample.steady) for sample in samples]]
    parts = (
        ("all", SupervisorSample.percent),
        ("of it the log", SupervisorSample.percent_of_log),
        ("of it all else", SupervisorSample.percent_without_log),
    )
    rows = [
        [name, *(summary([share(sample, phase) for sample, phase in taken]) for taken in phases)]
        for name, share in parts
    ]
    for name in _names(phase.work for taken in phases for _, phase in taken):
        shares = [[_share(phase.work, name, phase) for _, phase in taken] for taken in phases]
        rows.append([f"MainThread: {name}", *map(summary, shares)])
    for name in _names(phase.threads for taken in phases for _, phase in taken):
        shares = [[_share(phase.threads, name, phase) for _, phase in taken] for taken in phases]
        if any(share >= 0.01 for taken in shares for share in taken):
            rows.append([f"thread {name}", *map(summary, shares)])
    alone = [100 * sample.alone.cpu / sample.alone.seconds for sample in samples]
    rows.append(["handing over the lines, not in all", summary(alone), summary(alone)])
    print(markdown_table(["processor time [% of a core]", "with failures", "steady"], rows), end="\n\n")
    rows = [["artifacts and events", *(summary([writes_per_minute(phase) for _, phase in taken]) for taken in phases)]]
    for name in _names(phase.writes for taken in phases for _, phase in taken):
        counts = [[60 * phase.writes.get(name, 0) / phase.seconds for _, phase in taken] for taken in phases]
        rows.append([name, *map(summary, counts)])
    print(markdown_table(["API writes [a minute]", "with failures", "steady"], rows), end="\n\n")
    return [
        limit_line(
            "% of a core, with failures", [sample.percent(sample.failing) for sample in samples], CPU_LIMIT_PERCENT
        ),
        limit_line("% of a core, steady", [sample.percent(sample.steady) for sample in samples], CPU_LIMIT_PERCENT),
        limit_line(
            "% of a core without the log, with failures",
            [sample.percent_without_log(sample.failing) for sample in samples],
            CPU_LIMIT_PERCENT,
        ),
        limit_line(
            "API writes a minute, steady", [writes_per_minute(sample.steady) for sample in samples], WRITES_LIMIT
        ),
        limit_line(
            "seconds between updates of artifacts, least",
            [min(sample.smallest_gap for sample in samples)] if samples else [],
            GAP_LIMIT_SECONDS,
            at_least=True,
        ),
    ]


def _names(spent: Iterator[dict[str, Any]]) -> list[str]:
    return sorted({name for part in spent for name in part})


def _share(spent: dict[str, float], name: str, phase: Following) -> float:
    return 100 * spent.get(name, 0.0) / phase.seconds


def show_memory(samples: Sequence[dict[str, Any]]) -> list[str]:
    """Print the last table and give its lines against the limits."""
    print(f"Memory: a history of {REPLAY_LOOP.steps:,} reports, a report of it each {REPLAY_STRIDE:,}.\n")
    largest = [float(max(sample["sizes"])) for sample in samples]
    growth = [sample["growth"] / MB for sample in samples]
    rows = [
        ["largest report [bytes]", summary(largest, 0)],
        ["its state as JSON [bytes]", summary([sample["state"] for sample in samples], 0)],
        [f"memory, from {REPLAY_STRIDE:,} reports to {REPLAY_LOOP.steps:,} [MB]", summary(growth, 1)],
        ["processor time of the whole replay [s]", summary([sample["cpu"] for sample in samples], 1)],
    ]
    print(markdown_table(["what", "value"], rows), end="\n\n")
    return [
        limit_line("largest report [bytes]", largest, REPORT_LIMIT_BYTES, digits=0),
        limit_line("growth of the memory [MB]", growth, MEMORY_LIMIT_MB, digits=1),
    ]


def main() -> int:
    """Measure the parts in turn and print their tables and limits.

    Returns:
        1 if a run failed, else 0. A missed limit is printed, not an error.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--seconds", type=int, default=150, help="length of the simulated run, with 60 s of failures (default: 150)"
    )
    parser.add_argument("--lines", type=float, default=0.0, help="its lines of output a second (default: %(default)g)")
    arguments = parse_arguments((__doc__ or "").splitlines()[0], PARTS, parser)
    if arguments.seconds <= FAILING_SECONDS:
        parser.error(f"--seconds {arguments.seconds}: must be above {FAILING_SECONDS}")
    every = REPORTS_PER_SECOND // COMMITS_PER_SECOND
    simulated = LoopSettings(
        steps=arguments.seconds * REPORTS_PER_SECOND,
        step_seconds=1 / REPORTS_PER_SECOND,
        checkpoint_every=every,
        checkpoint_offset=every // 2,
        lines_per_second=arguments.lines,
    )
    throughput: dict[tuple[str, str], list[float]] = defaultdict(list)
    supervisor: list[SupervisorSample] = []
    memory: list[dict[str, Any]] = []
    jobs: list[tuple[Side, LoopSettings, Callable[[SideRun], None]]] = []
    failed = 0

    def rate_of(pace: str, side: Side) -> Callable[[SideRun], None]:
        return lambda run: throughput[pace, side.name].append(measure_throughput(run, THROUGHPUT_LOOPS[pace]))

    def end_replay(run: SideRun) -> None:
        run.wait()
        memory.append(run.result())

    for repeat in range(arguments.repeats):
        if "throughput" in arguments.only:
            for pace, loop in THROUGHPUT_LOOPS.items():
                jobs += [(side, loop, rate_of(pace, side)) for side in rotated(THROUGHPUT_SIDES, repeat)]
        if "supervisor" in arguments.only:
            jobs.append(
                (SUPERVISOR, simulated, lambda run: supervisor.append(SupervisorSample.of(run, arguments.seconds)))
            )
        if "memory" in arguments.only:
            jobs.append((REPLAY, REPLAY_LOOP, end_replay))
    load_before = os.getloadavg()[0]
    warm_up()
    with Workbench(with_prefect=any(side.needs_prefect for side, _, _ in jobs)) as workbench:
        for number, (side, loop, measure) in enumerate(jobs, start=1):
            progress = f"# {number}/{len(jobs)} {side.name}"
            try:
                with workbench.run(side, loop) as run:
                    measure(run)
            except SideFailedError as error:
                failed += 1
                print(f"{progress} failed: {error}", flush=True)
                continue
            print(f"{progress}: done after {time.time() - run.started:.0f} s", flush=True)
    print(f"\n{machine_lines('benchmarks.reporting', load_before)}")
    print(f"Median (min–max) of up to {arguments.repeats} runs, each in a fresh process.\n")
    lines = []
    if "throughput" in arguments.only:
        lines += show_throughput(throughput)
    if "supervisor" in arguments.only:
        lines += show_supervisor(supervisor, arguments.lines)
    if "memory" in arguments.only:
        lines += show_memory(memory)
    print("Limits:")
    print("\n".join(lines))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
