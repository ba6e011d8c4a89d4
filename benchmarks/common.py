"""Running a side as fresh processes, reading its ledger, and printing medians, spreads and targets."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import secrets
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from benchmarks.cluster import GrowingCluster
from benchmarks.loops import CHECKPOINT_FILE, RESULT_FILE, WORKERS, LedgerLine, LoopSettings, SideSettings

REPOSITORY = Path(__file__).resolve().parents[1]
POLL_SECONDS = 0.1
"""The poll interval of elastic_train with two workers; raw Ray Train's own default is 2 s."""

SIDE_TIMEOUT_SECONDS = 120.0
POLL_FOR_LINES_SECONDS = 0.005
POLL_FOR_END_SECONDS = 0.02
LEDGER_FILE = "ledger"
LOG_FILE = "log"
LOG_TAIL_LINES = 30
PR_SET_CHILD_SUBREAPER = 36


class SideFailedError(RuntimeError):
    """A side ended, or did not get anywhere in time."""


@dataclass(frozen=True, eq=False)
class Side:
    """One thing that is measured.

    Attributes:
        name: What `--only` and the tables call it.
        entry_point: The function of `benchmarks.sides` that it runs.
        environment: Environment variables that make the side what it is.
        needs_prefect: Whether it talks to a Prefect server.
    """

    name: str
    entry_point: str
    environment: dict[str, str] = field(default_factory=dict)
    needs_prefect: bool = False


SAME_POLL = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(POLL_SECONDS)}
OURS = Side("ours", "ours", needs_prefect=True)
OURS_POINTS = Side("ours-points", "ours-points", needs_prefect=True)
"""With a session that makes a recovery point at each step."""
RAW_DEFAULT = Side("raw-default", "raw")
RAW_SAME_POLL = Side("raw-same-poll", "raw", SAME_POLL)
TORCHRUN = Side("torchrun", "torchrun", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
"""Without that variable torch 2.13 keeps one store for all restarts, and a restarted gloo group can read the addresses
of the one before: it then fails to connect and uses up its restarts."""


class LedgerReader:
    """Reads a ledger file while it grows; a line that is not yet whole waits for the next read."""

    def __init__(self, path: Path) -> None:
        self.lines: list[LedgerLine] = []
        self._path = path
        self._offset = 0

    def read(self) -> list[LedgerLine]:
        """All lines so far."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
            self._offset += len(whole) + len(newline)
            self.lines.extend(LedgerLine.parse(line) for line in whole.decode().splitlines())
        return self.lines


class SideRun:
    """One run of one side: a fresh process, and all that it starts."""

    def __init__(self, process: subprocess.Popen[bytes], started: float, directory: Path) -> None:
        self.process = process
        self.started = started
        self.ledger = LedgerReader(directory / LEDGER_FILE)
        self._directory = directory
        self._log = directory / LOG_FILE
        self._result = directory / RESULT_FILE

    def wait(self, timeout: float = SIDE_TIMEOUT_SECONDS) -> float:
        """Wait for the process to end well.

        Returns:
            Its wall time in seconds.

        Raises:
            SideFailedError: It failed, or did not end in `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not self.has_ended():
            if time.monotonic() > deadline:
                raise self.failed(f"did not end within {timeout:.0f} s")
            time.sleep(POLL_FOR_END_SECONDS)
        wall = time.time() - self.started
        if self.process.returncode:
            raise self.failed(f"ended with code {self.process.returncode}")
        return wall

    def wait_for_line(
        self, wanted: Callable[[LedgerLine], bool], what: str, timeout: float = SIDE_TIMEOUT_SECONDS
    ) -> LedgerLine:
        """Wait for the first ledger line that is `wanted`.

        Raises:
            SideFailedError: The process ended before, or `timeout` seconds went by.
        """
        deadline = time.monotonic() + timeout
        seen = 0
        while True:
            ended = self.has_ended()
            lines = self.ledger.read()
            for line in lines[seen:]:
                if wanted(line):
                    return line
            seen = len(lines)
            if ended:
                raise self.failed(f"ended with code {self.process.returncode} before {what}")
            if time.monotonic() > deadline:
                raise self.failed(f"did not get to {what} within {timeout:.0f} s")
            time.sleep(POLL_FOR_LINES_SECONDS)

    def result(self) -> Any:
        """What the side has written down itself, after its end.

        Raises:
            SideFailedError: It has written nothing.
        """
        if not self._result.exists():
            raise self.failed("has no result")
        return json.loads(self._result.read_text())

    def checkpoints(self) -> list[Path]:
        """The checkpoint files of the loop in the side's storage, the newest last."""
        return sorted(self._directory.glob(f"storage/**/{CHECKPOINT_FILE}"), key=lambda one: one.stat().st_mtime)

    def history(self) -> list[dict[str, Any]]:
        """The events that a run of ours has noted in its run directory so far, in order."""
        segments = sorted(self._directory.glob("storage/*/**/events/*.jsonl"))
        return [json.loads(line) for segment in segments for line in segment.read_text().splitlines()]

    def processes_running(self, argument: str) -> list[psutil.Process]:
        """Processes of this run, itself included, that have exactly `argument` in their command line."""
        found = []
        for process in [psutil.Process(self.process.pid), *descendants()]:
            try:
                if argument in process.cmdline() and process not in found:
                    found.append(process)
            except psutil.Error:
                continue  # ended meanwhile
        return found

    def failed(self, what: str) -> SideFailedError:
        """An error that says what happened and shows the end of the side's output."""
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
        return SideFailedError(f"{str(self.process.args)[:200]} {what}; its last lines:\n{tail}")

    def has_ended(self) -> bool:
        """Whether its process has ended."""
        reap_orphans(spare=self.process.pid)
        return self.process.poll() is not None


class Workbench:
    """A temporary directory, a Prefect server where it is needed, and the end of all that the sides leave.

    Ray's daemons and workers outlive a killed driver, in process groups of their own. The benchmark therefore
    is the subreaper of all its descendants (Linux): what loses its parent becomes its child and can be found.
    """

    def __init__(self, with_prefect: bool) -> None:
        self._with_prefect = with_prefect
        self._root = Path()
        self._runs = 0
        self._server: subprocess.Popen[bytes] | None = None
        self._prefect_environment: dict[str, str] = {}

    def __enter__(self) -> Workbench:
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "cannot become the subreaper of the measured processes")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        # Unix sockets of Ray live below this directory, and their paths may have 107 characters.
        self._root = Path(tempfile.mkdtemp(prefix="b", dir="/tmp"))
        try:
            if self._with_prefect:
                self._start_prefect()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        end_processes(keep=set())
        shutil.rmtree(self._root, ignore_errors=True)

    @contextmanager
    def cluster(self) -> Iterator[GrowingCluster]:
        """Start a Ray cluster for one run of a side; at the end of that run nothing of it is left.

        Raises:
            NodeClusterError: It does not start.
        """
        directory = Path(tempfile.mkdtemp(prefix="c", dir=self._root))
        try:
            yield GrowingCluster(directory, base_environment() | {"TMPDIR": str(self._root)})
        finally:
            self._end_sides()
            shutil.rmtree(directory, ignore_errors=True)

    @contextmanager
    def run(
        self,
        side: Side,
        loop: LoopSettings,
        restart_forever: bool = False,
        cluster: GrowingCluster | None = None,
        failures: int = 3,
    ) -> Iterator[SideRun]:
        """Run a side in a directory of its own; at the end nothing of it is left.

        Args:
            side: What to run.
            loop: What its loop does; the ledger is filled in.
            restart_forever: Wrap the side in a shell loop that starts it again until it succeeds.
            cluster: What it trains on; None for a cluster of its own.
            failures: How many of each kind the side survives.
        """
        self._runs += 1
        directory = self._root / str(self._runs)
        for name in ("storage", "t"):
            (directory / name).mkdir(parents=True)
        settings = SideSettings(
            loop=replace(loop, ledger=str(directory / LEDGER_FILE)),
            storage=str(directory / "storage"),
            run_name="benchmark",
            temp_dir=str(directory / "t"),
            cluster_address=cluster.address if cluster else "",
            failures=failures,
        )
        command = [sys.executable, "-m", "benchmarks.sides", side.entry_point, settings.to_json()]
        if side is TORCHRUN:
            torchrun = [
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={WORKERS}",
                f"--max-restarts={failures}",
            ]
            command[2:2] = [*torchrun, "-m"]
        if restart_forever:
            command = ["sh", "-c", f"until {shlex.join(command)}; do :; done"]
        try:
            with (directory / LOG_FILE).open("wb") as output:
                started = time.time()
                process = subprocess.Popen(
                    command,
                    cwd=REPOSITORY,
                    env=self._environment(side, cluster),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            yield SideRun(process, started, directory)
        finally:
            self._end_sides()
            shutil.rmtree(directory, ignore_errors=True)

    def _end_sides(self) -> None:
        end_processes(keep={self._server.pid} if self._server else set())

    def _environment(self, side: Side, cluster: GrowingCluster | None) -> dict[str, str]:
        environment = base_environment() | {"TMPDIR": str(self._root)} | side.environment
        if side.needs_prefect:
            environment |= self._prefect_environment
        if cluster is not None:
            environment |= cluster.environment
        elif side.entry_point.startswith("raw"):
            # Ray would otherwise create a token in the user's home directory.
            environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        return environment

    def _start_prefect(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        home = {"PREFECT_HOME": str(self._root / "prefect"), "DO_NOT_TRACK": "1"}
        log = self._root / "server.log"
        with log.open("wb") as output:
            self._server = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "prefect",
                    "server",
                    "start",
                    "--host",
                    "127.0.0.1",
                    "--port",
                    str(port),
                ],
                env=base_environment() | home,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        api = f"http://127.0.0.1:{port}/api"
        deadline = time.monotonic() + 90
        while not _answers(f"{api}/health"):
            if self._server.poll() is not None or time.monotonic() > deadline:
                raise SideFailedError(f"no Prefect server at {api}; it wrote:\n{log.read_text()[-4000:]}")
            time.sleep(0.2)
        self._prefect_environment = home | {"PREFECT_API_URL": api}


def base_environment() -> dict[str, str]:
    """This process's environment without settings that would make sides differ from a plain installation."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PREFECT_"))}
    return clean | {"PYTHONPATH": str(REPOSITORY), "RAY_USAGE_STATS_ENABLED": "0"}


def descendants() -> list[psutil.Process]:
    """All living processes below this one."""
    return psutil.Process().children(recursive=True)


def reap_orphans(spare: int) -> None:
    """Collect adopted processes that have ended: Ray takes a zombie for a living process.

    Args:
        spare: A process whose exit status somebody else waits for.
    """
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid == spare:
            return
        os.waitpid(ended.si_pid, 0)


def end_processes(keep: set[int], timeout: float = 20.0) -> None:
    """Kill everything below this process, and what that leaves behind, until nothing is left.

    Args:
        keep: Processes to spare, with all that is below them.
        timeout: Seconds after which what is left is an error.

    Raises:
        SideFailedError: Processes that cannot be ended.
    """
    deadline = time.monotonic() + timeout
    while True:
        spared = set(keep)
        for pid in keep:
            try:
                spared.update(child.pid for child in psutil.Process(pid).children(recursive=True))
            except psutil.NoSuchProcess:
                continue  # a kept process may have ended by itself
        left = [process for process in descendants() if process.pid not in spared]
        if not left:
            return
        if time.monotonic() > deadline:
            raise SideFailedError(f"cannot end {left}")
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue  # ended meanwhile
        psutil.wait_procs(left, timeout=1)


def warm_up() -> None:
    """Import everything once, so that the first side does not pay for a cold disk cache."""
    modules = "import prefect, ray.train.torch, torch.distributed.run"
    subprocess.run([sys.executable, "-c", modules], env=base_environment(), check=True, capture_output=True)


def rotated(sides: Sequence[Side], repeat: int) -> list[Side]:
    """The sides in turn, each repeat beginning with another one."""
    start = repeat % len(sides)
    return [*sides[start:], *sides[:start]]


def phases(repeats: int, checkpoint_every: int) -> list[int]:
    """Moments in steps after a checkpoint, one a repeat, spread evenly over the checkpoint interval."""
    return [int((repeat + 0.5) * checkpoint_every / repeats) for repeat in range(repeats)]


def summary(values: Sequence[float], digits: int = 2) -> str:
    """Median and spread of some values, for a table cell."""
    if not values:
        return "–"
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns line up when printed as it is."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def ratio_target(what: str, ours: Sequence[float], other: Sequence[float], limit: float, extra: float = 0) -> str:
    """One line that holds the medians against a target.

    Args:
        what: What is compared with what.
        ours: Our values.
        other: The other side's values.
        limit: Our median may be at most this multiple of the other's …
        extra: … plus so much.
    """
    allowed = f"<= {limit:g} x" + (f" + {extra:g}" if extra else "")
    if not ours or not other:
        return f"- {what}: not measured ({allowed})"
    mine, theirs = statistics.median(ours), statistics.median(other)
    ratio = f"ratio {mine / theirs:.3f}" if theirs else "no ratio"
    verdict = "PASS" if mine <= limit * theirs + extra else "FAIL"
    return f"- {what}: {mine:.2f} to {theirs:.2f}, {ratio} ({allowed}): {verdict}"


def machine_lines(module: str, load_before: float) -> str:
    """What was measured on, with what, by which command; `load_before` tells whether the machine was free."""
    versions = [f"{name} {metadata.version(name)}" for name in ("ray", "prefect", "torch")]
    command = shlex.join(["python", "-m", module, *sys.argv[1:]])
    machine = f"{os.cpu_count()} cores, {_cpu_model()}, Python {platform.python_version()}, {', '.join(versions)}"
    load = f"load average before {load_before:.1f}"
    return f"Machine: {machine}, {load}\nCommand: `{command}`"


def parse_arguments(
    description: str, names: Sequence[str], parser: argparse.ArgumentParser | None = None
) -> argparse.Namespace:
    """The command line of a benchmark: `--repeats` and `--only`, and what `parser` has of its own."""
    parser = parser or argparse.ArgumentParser()
    parser.description = description
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side (default: 3)")
    parser.add_argument("--only", nargs="+", choices=names, default=list(names), help="measure only these")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error(f"--repeats {arguments.repeats}: must be at least 1")
    return arguments


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
