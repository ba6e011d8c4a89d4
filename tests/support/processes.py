"""Starting, watching and ending what the tests run, and reading what it has left."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import httpx
import psutil

from prefect_elastic_train.core.request import MARK_VARIABLE
from prefect_elastic_train.supervisor.guard import kill_marked, marked_processes

T = TypeVar("T")
ROOT = Path(__file__).parents[2]

#: What all processes of a test session inherit, and those of another one on this machine do not; and the same of a run
#: of several sessions.
SESSION_VARIABLE, RUN_VARIABLE = "TEST_SESSION_MARK", "TEST_RUN_MARK"
#: Below the ports that the kernel gives out by itself, which may be taken again before anything listens there, and
#: above those that Ray gives its workers; so many for each of eight test processes.
FIRST_PORT, PORTS_OF_A_PROCESS = 20_000, 1_500
# Tests that somebody runs in another shell begin elsewhere.
_steps = itertools.count(secrets.randbelow(PORTS_OF_A_PROCESS))


def call(*command: str | Path, folder: Path = ROOT, timeout: float = 120, **more: Any) -> str:
    """Run a command in a folder, which must succeed, and return what it says."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **more}
    done = subprocess.run([str(part) for part in command], cwd=folder, text=True, timeout=timeout, **streams)
    said = done.stdout or ""
    assert done.returncode == 0, f"{command} failed with {done.returncode}:\n{said[-6000:]}{done.stderr or ''}"
    return said


def spawn(*command: str | Path, log: Path, folder: Path = ROOT, **more: Any) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, which says what it says in a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        streams = {"stdout": file, "stderr": file, "start_new_session": True, **more}
        return subprocess.Popen([str(part) for part in command], cwd=folder, **streams)


def free_port() -> int:
    """Return a port that is free, and that no test process beside this one returns."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
    while True:
        port = FIRST_PORT + worker * PORTS_OF_A_PROCESS + next(_steps) % PORTS_OF_A_PROCESS
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_for(what: Callable[[], T], timeout: float, why: str = "", of: FlowProcess | None = None) -> T:
    """Return what becomes true; a flow process that ends before, if one is given, fails the test at once."""
    if timeout >= 60:  # it waits for clusters and processes to start, on a machine that may be slow
        timeout *= 3
    deadline = time.monotonic() + timeout
    while True:
        has_ended = of is not None and of.process.poll() is not None
        found = what()
        if found:
            return found
        if has_ended or time.monotonic() > deadline:
            waited = "the flow process ended before there was" if has_ended else f"waited {timeout:g} s for"
            logs = "".join(f"\n\n{flow.log_file}:\n{flow.log[-4000:]}" for flow in FlowProcess.open)
            raise AssertionError(f"{waited} {why or what}{logs}")
        time.sleep(0.1)


def read_ledger(path: Path | str) -> list[dict[str, Any]]:
    """The lines of a ledger but one that is being written."""
    text = Path(path).read_text() if Path(path).exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def steps_of(path: Path | str, rank: int = 0) -> list[int]:
    """The steps of a rank in the order in which it took them."""
    return [line["step"] for line in read_ledger(path) if line["rank"] == rank]


def repeated(steps: list[int]) -> int:
    """How many steps were taken again."""
    return len(steps) - len(set(steps))


def generations(path: Path | str, rank: int = 0) -> list[tuple[int, int]]:
    """For each process that had a rank, one after the other, the step it resumed from and its last step."""
    found: dict[int, tuple[int, int]] = {}
    for line in read_ledger(path):
        if line["rank"] == rank:
            found[line["pid"]] = (found.get(line["pid"], (line["resumed_from"],))[0], line["step"])
    return list(found.values())


def run_folder(storage: Path) -> Path | None:
    """The only run directory below a storage path."""
    return next((folder.parent for folder in storage.glob("*/.elastic_train")), None)


def records(run: Path | None, kind: str) -> list[dict[str, Any]]:
    """The records of a kind (a folder's name) in a run directory."""
    files = sorted((run / ".elastic_train" / kind).glob("[0-9]*.json")) if run else []
    return [json.loads(file.read_text()) for file in files]


def attempts(run: Path | None) -> list[dict[str, Any]]:
    """The attempts recorded in a run directory."""
    return records(run, "attempts")


def commits(run: Path | None) -> list[dict[str, Any]]:
    """The commits in a run directory."""
    return records(run, "commits")


def assert_every_step_counts_once(path: Path | str, steps: int, checkpoint_every: int) -> None:
    """Check that the steps that led to the end follow each other without a gap and without one counted twice.

    Each process goes on right after the checkpoint that it resumed from, which was a step of the one before.
    """
    processes: dict[int, list[dict[str, Any]]] = {}
    for line in read_ledger(path):
        processes.setdefault(line["pid"], []).append(line)
    reached = 0
    for lines in processes.values():
        first = lines[0]["resumed_from"]
        last = first + len(lines)
        assert [line["step"] for line in lines] == list(range(first + 1, last + 1))
        assert first % checkpoint_every == 0, "it resumed at a checkpoint"
        if lines[0]["rank"] == 0:
            assert first <= reached, f"steps {reached + 1} to {first} were skipped"
            reached = last
    assert reached == steps


def assert_each_rank_knew_its_run(path: Path | str, run: Path | None, flow_run_id: str, deployment: str = "") -> None:
    """Check what the ranks of a ledger knew of their run: the same in all attempts, and which attempt it was."""
    assert run is not None
    known = [{**line["run"], "rank": line["rank"]} for line in read_ledger(path)]
    numbers = [attempt["attempt"] for attempt in attempts(run)]
    ranks = {one["rank"] for one in known}
    assert {(one["rank"], one["attempt"]) for one in known} == {*itertools.product(ranks, numbers)}
    run_id = json.loads((run / ".elastic_train" / "run.json").read_text())["id"]
    expected = {"run_id": run_id, "run_uri": str(run), "flow_run_id": flow_run_id}
    expected["deployment_name"] = deployment.partition("/")[2]
    assert all(expected.items() <= one.items() for one in known)


def _those(processes: Iterable[psutil.Process], are: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            if are(process):
                found.append(process)
    return found


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that still run; one that is only waiting to be reaped does not."""
    return _those(processes, lambda one: one.is_running() and one.status() != psutil.STATUS_ZOMBIE)


def titled(processes: Iterable[psutil.Process], part: str) -> list[psutil.Process]:
    """Those that live and have a part in their command line."""
    return _those(processes, lambda one: part in " ".join(one.cmdline()))


def carrying(entry: str, folder: Path | None = None) -> list[psutil.Process]:
    """The processes that have an entry, such as ``NAME=value``, in the environment that they started with.

    Ray's agents write their title over it: those that have a file below a folder open are found, too.
    """

    def does(process: psutil.Process) -> bool:
        if entry.encode() in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
            return True
        of_ray = folder is not None and "".join(process.cmdline()).startswith("ray::")
        return of_ray and any(file.path.startswith(f"{folder}/") for file in process.open_files())

    return alive(_those(psutil.process_iter(), does))


def kill_all(find: Callable[[], list[psutil.Process]]) -> list[str]:
    """Kill what is found until nothing is, and return what their titles were."""
    titles: list[str] = []
    for _ in range(20):
        left = find()
        if not left:
            break
        for process in left:
            with contextlib.suppress(psutil.Error):
                titles.append(" ".join(process.cmdline())[:120])
                process.kill()
        psutil.wait_procs(left, timeout=1)
    return titles


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """End a program with all that it has started, gently first."""
    tree: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        program = psutil.Process(process.pid)
        tree = [*program.children(recursive=True), program]
    if process.poll() is None:
        process.terminate()
    _, left = psutil.wait_procs(tree, timeout=15)
    for one in left:
        with contextlib.suppress(psutil.Error):
            one.kill()
    process.wait(10)


def drivers_of(*flow_processes: int) -> Iterator[tuple[psutil.Process, str]]:
    """The drivers, or scripts in their place, that flow processes have now, with their marks.

    Of two in one flow process the younger is pre-started, and is left out.
    """
    seen = set[int]()
    for process in sorted(psutil.process_iter(["cmdline", "create_time"]), key=lambda one: one.info["create_time"]):
        if {"prefect_elastic_train.driver", "tests.support.scripted_driver"} & {*(process.info["cmdline"] or ())}:
            with contextlib.suppress(psutil.Error):
                parent = process.ppid()
                if parent in flow_processes and parent not in seen:
                    seen.add(parent)
                    yield process, process.environ()[MARK_VARIABLE]


class FlowProcess:
    """A flow run in a process of its own, to be watched and killed."""

    #: Those that are not closed, whose logs are shown when a test waits in vain.
    open: ClassVar[list[FlowProcess]] = []

    def __init__(self, folder: Path, api_url: str, python: str = sys.executable, **arguments: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        storage = arguments.setdefault("storage", str(folder / "runs"))
        self.storage = Path(storage if isinstance(storage, str) else folder / "no directory")
        self.result_file = arguments["result_file"] = folder / "result.json"
        self.flow_run_file = arguments["flow_run_file"] = folder / "flow-run.jsonl"
        self.log_file = folder / "flow.log"
        environment = {**os.environ, "PREFECT_API_URL": api_url, "PYTHONPATH": str(ROOT)}
        environment |= {name: str(value) for name, value in arguments.pop("environment", {}).items()}
        file = folder / "arguments.json"
        file.write_text(json.dumps(arguments, default=str))
        script = (python, "-m", "tests.support.flow_script", file)
        self.process = spawn(*script, log=self.log_file, env=environment)
        self.pid = self.process.pid
        FlowProcess.open.append(self)
        self._mark = ""
        self.private_folder = Path("/unknown")

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @property
    def run(self) -> Path | None:
        return run_folder(self.storage)

    @property
    def flow_run_id(self) -> str:
        """The id of the flow run, once it runs."""
        line = wait_for(lambda: self.flow_run_file.exists() and self.flow_run_file.read_text(), 60, "the flow to run")
        return str(json.loads(str(line).splitlines()[-1])["flow_run_id"])

    def wait_for(self, what: Callable[[], T], timeout: float, why: str) -> T:
        """Wait for something that only a flow process that lives can bring about."""
        return wait_for(what, timeout, why, of=self)

    def wait_for_commits(self, number: int = 2) -> None:
        """Wait until the run directory holds so many commits."""
        self.wait_for(lambda: len(commits(self.run)) >= number, 120, f"{number} commits")

    def driver(self) -> psutil.Process | None:
        """The driver process, if one runs."""
        for process, self._mark in drivers_of(self.pid):
            self.private_folder = Path(self._mark)
            return process
        return None

    def living_driver(self) -> psutil.Process:
        """The driver process, which must run, or begin to."""
        driver = self.wait_for(self.driver, 60, "a driver")
        assert driver is not None
        return driver

    def guard(self) -> psutil.Process | None:
        """The guard, which carries no mark."""
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self.pid).children()
            return next(iter(titled(children, "prefect_elastic_train.supervisor.guard")), None)
        return None

    def marked(self) -> list[psutil.Process]:
        """All processes of the training; its driver must have been looked at, for their mark."""
        assert self._mark, "nobody has looked at the driver while it lived"
        return marked_processes(self._mark)

    def wait(self, timeout: float) -> dict[str, Any]:
        """Wait for the end of the flow process; return what it wrote: ``state``, and ``result`` or ``error``."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the flow did not end within {timeout:g} s:\n{self.log[-6000:]}") from None
        assert self.result_file.exists(), f"the flow process went without a result:\n{self.log[-6000:]}"
        return dict(json.loads(self.result_file.read_text()))

    def completed(self, timeout: float) -> dict[str, Any]:
        """Wait for the end of a flow that succeeds, and return its training's result."""
        outcome = self.wait(timeout)
        assert outcome["state"] == "COMPLETED", f"{outcome}\n{self.log[-4000:]}"
        return dict(outcome["result"])

    def close(self) -> None:
        """End the flow process and everything of its training."""
        if self in FlowProcess.open:
            FlowProcess.open.remove(self)
        if self.process.poll() is None:
            self.driver()
            self.process.kill()
            self.process.wait(10)
        if self._mark:
            kill_marked(self._mark)


@contextlib.contextmanager
def prefect_server(folder: Path, port: int = 0) -> Iterator[str]:
    """Run a real Prefect server, with its UI and a database in a folder; yields the URL of its API."""
    port = port or free_port()
    url = f"http://127.0.0.1:{port}/api"
    environment = {
        **os.environ,
        "PREFECT_HOME": str(folder),
        # Its pages would ask for the API at the default port.
        "PREFECT_UI_API_URL": url,
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "5",
        "PREFECT_SERVER_DEPLOYMENTS_CONCURRENCY_SLOT_WAIT_SECONDS": "2",
    }
    environment.pop("PREFECT_API_URL", None)
    command = (sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port))
    server = spawn(*command, log=folder / "server.log", env=environment)

    def answers() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{url}/health", timeout=2).is_success
        return False

    try:
        wait_for(answers, 90, "the Prefect server")
        yield url
    finally:
        end_tree(server)


#: Starts a flow process: the fixture ``start``.
Start = Callable[..., FlowProcess]
