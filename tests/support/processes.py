"""Starting, watching and ending what the tests run."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import psutil

from prefect_elastic_train.core.spec import MARK_VARIABLE
from prefect_elastic_train.supervisor.processes import end_marked, marked_processes

T = TypeVar("T")
ROOT = Path(__file__).parents[2]

#: What all processes of a test session inherit, and those of another one on this machine do not; and the same of a run
#: of several sessions.
SESSION_VARIABLE, RUN_VARIABLE = "TEST_SESSION_MARK", "TEST_RUN_MARK"


def wait_for(what: Callable[[], T], timeout: float, why: str = "", of: FlowProcess | None = None) -> T:
    """Return what becomes true; a flow process that ends before, if one is given, fails the test at once."""
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


#: Below the ports that the kernel gives out by itself, which may be taken again before anything listens there, and
#: above those that Ray gives its workers; so many for each of eight test processes.
FIRST_PORT, PORTS_OF_A_PROCESS = 20_000, 1_500


def _candidates() -> Iterator[int]:
    """Give the ports of this test process, one after the other."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
    first = FIRST_PORT + number * PORTS_OF_A_PROCESS
    # Tests that somebody runs in another shell begin elsewhere.
    start = secrets.randbelow(PORTS_OF_A_PROCESS)
    return (first + (start + step) % PORTS_OF_A_PROCESS for step in itertools.count())


_ports = _candidates()


def free_port() -> int:
    """Give a port that is free, and that no test process beside this one gives."""
    while True:
        port = next(_ports)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def read_ledger(path: Path | str) -> list[dict[str, Any]]:
    """Read a ledger; a line that is being written is left out."""
    try:
        text = Path(path).read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def steps_of(path: Path | str, rank: int = 0) -> list[int]:
    """Give the steps of a rank in the order in which it took them."""
    return [line["step"] for line in read_ledger(path) if line["rank"] == rank]


def repeated(steps: list[int]) -> int:
    """Count the steps that were taken more than once."""
    return len(steps) - len(set(steps))


def run_folder(storage: Path) -> Path | None:
    """Give the only run directory below a storage path."""
    folders = [f for f in storage.iterdir() if (f / ".elastic_train").is_dir()] if storage.is_dir() else []
    return folders[0] if folders else None


def attempts(run: Path | None) -> list[dict[str, Any]]:
    """Give the attempts recorded in a run directory."""
    if run is None:
        return []
    files = sorted((run / ".elastic_train" / "attempts").glob("[0-9]*.json"))
    return [json.loads(file.read_text()) for file in files]


def commits(run: Path | None) -> list[dict[str, Any]]:
    """Give the commits in a run directory."""
    if run is None:
        return []
    files = sorted((run / ".elastic_train" / "commits").glob("[0-9]*.json"))
    return [json.loads(file.read_text()) for file in files]


def generations(path: Path | str, rank: int = 0) -> list[tuple[int, int]]:
    """Give, for each process that had a rank one after the other, the step it resumed from and its last step."""
    found: dict[int, tuple[int, int]] = {}
    for line in read_ledger(path):
        if line["rank"] == rank:
            resumed_from, _ = found.get(line["pid"], (line["resumed_from"], 0))
            found[line["pid"]] = (resumed_from, line["step"])
    return list(found.values())


def assert_every_step_counts_once(path: Path | str, steps: int, checkpoint_every: int) -> None:
    """Check that the steps that led to the end follow each other without a gap and without one counted twice.

    Each process goes on right after the checkpoint that it resumed from, which was a step of the one before.
    """
    reached = 0
    for number, (resumed_from, last) in enumerate(generations(path)):
        assert resumed_from <= reached, f"process {number} skipped steps {reached + 1} to {resumed_from}"
        assert resumed_from % checkpoint_every == 0, "it resumed at a checkpoint"
        reached = last
    assert reached == steps
    for pid in {line["pid"] for line in read_ledger(path)}:
        own = [line["step"] for line in read_ledger(path) if line["pid"] == pid]
        resumed_from = next(line["resumed_from"] for line in read_ledger(path) if line["pid"] == pid)
        assert own == list(range(resumed_from + 1, resumed_from + 1 + len(own)))


def assert_each_rank_knew_its_run(path: Path | str, run: Path | None, flow_run_id: str, deployment: str = "") -> None:
    """Check what the ranks of a ledger knew of their run: the same id in all attempts, and which attempt it was.

    Args:
        path: The ledger.
        run: The run directory.
        flow_run_id: The flow run that all attempts were for.
        deployment: Name of its deployment, ``<flow>/<deployment>``; empty for none.
    """
    assert run is not None
    record = json.loads((run / ".elastic_train" / "run.json").read_text())
    told = [(line["rank"], line["run"]) for line in read_ledger(path)]
    numbers = {attempt["attempt"] for attempt in attempts(run)}
    ranks = {rank for rank, _ in told}
    assert {(rank, known["attempt"]) for rank, known in told} == {(rank, n) for rank in ranks for n in numbers}
    same = {json.dumps({**known, "attempt": None}, sort_keys=True) for _, known in told}
    assert len(same) == 1, "all but the number of the attempt stays"
    known = told[0][1]
    assert (known["run_id"], known["run_name"]) == (record["id"], run.name)
    assert (known["storage_uri"], known["run_uri"]) == (str(run.parent), str(run))
    assert (known["flow_run_id"], known["flow_name"]) == (flow_run_id, record["creator"]["flow_name"])
    assert known["deployment_name"] == deployment.partition("/")[2]
    assert bool(known["deployment_id"]) == bool(deployment)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Give the processes that still run; one that is only waiting to be reaped does not."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def of_cluster(entry: str, folder: Path) -> list[psutil.Process]:
    """Give the processes of a test's cluster.

    Args:
        entry: Such as ``NAME=value``; in the environment that they started with. Ray's agents write their title over
            it, and are known by that title and the files that they have open.
        folder: Where the cluster keeps its files.
    """
    return alive([process for process in psutil.process_iter() if _carries(process, entry) or _logs(process, folder)])


def _carries(process: psutil.Process, entry: str) -> bool:
    try:
        return entry.encode() in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _logs(process: psutil.Process, folder: Path) -> bool:
    """Tell whether a process is one of Ray's and has a file below a folder open."""
    try:
        if not Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"ray::"):
            return False
        descriptors = os.listdir(f"/proc/{process.pid}/fd")
    except OSError:
        return False
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{process.pid}/fd/{descriptor}").startswith(f"{folder}/"):
                return True
    return False


def end_carrying(entry: str) -> list[str]:
    """Kill the processes that carry an entry in the environment that they started with, and give their titles."""
    titles: list[str] = []
    for _ in range(20):
        left = alive([process for process in psutil.process_iter() if _carries(process, entry)])
        if not left:
            break
        for process in left:
            with contextlib.suppress(psutil.Error):
                titles.append(" ".join(process.cmdline())[:120])
                process.kill()
        psutil.wait_procs(left, timeout=1)
    return titles


def titled(processes: list[psutil.Process], part: str) -> list[psutil.Process]:
    """Give those of some processes that live and have a part in their command line."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if part in " ".join(process.cmdline()):
                found.append(process)
    return found


def is_driver(command: list[str]) -> bool:
    """Whether a command line is that of a driver, or of a script in its place."""
    return bool({"prefect_elastic_train.driver", "tests.support.scripted_driver"} & set(command))


class FlowProcess:
    """A flow run in a process of its own, to be watched and killed."""

    #: Those that are not closed, whose logs are shown when a test waits in vain.
    open: ClassVar[list[FlowProcess]] = []

    def __init__(self, folder: Path, api_url: str, **arguments: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.api_url = api_url
        storage = arguments.setdefault("storage", str(folder / "runs"))
        self.storage = Path(storage if isinstance(storage, str) else folder / "no directory")
        self.result_file = folder / "result.json"
        self.log_file = folder / "flow.log"
        self.flow_run_file = folder / "flow-run.jsonl"
        environment = {
            **os.environ,
            "PREFECT_API_URL": api_url,
            "PYTHONPATH": str(ROOT),
            **{name: str(value) for name, value in arguments.pop("environment", {}).items()},
        }
        (folder / "arguments.json").write_text(
            json.dumps({**arguments, "result_file": str(self.result_file), "flow_run_file": str(self.flow_run_file)})
        )
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.flow_script", str(folder / "arguments.json")],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
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
        """Give the id of the flow run, once it runs."""
        line = wait_for(lambda: self.flow_run_file.exists() and self.flow_run_file.read_text(), 60, "the flow to run")
        return str(json.loads(str(line).splitlines()[-1])["flow_run_id"])

    def wait_for(self, what: Callable[[], T], timeout: float, why: str) -> T:
        """Wait for something that only a flow process that lives can bring about."""
        return wait_for(what, timeout, why, of=self)

    def driver(self) -> psutil.Process | None:
        """Give the driver process, if one runs."""
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if is_driver(command):
                with contextlib.suppress(psutil.Error):
                    if process.ppid() == self.pid:
                        self._mark = process.environ()[MARK_VARIABLE]
                        self.private_folder = Path(command[-1]).parent
                        return process
        return None

    def process_named(self, title: str) -> psutil.Process | None:
        """Give a process of the training by a part of its command line."""
        return next(iter(titled(self.marked(), title)), None)

    def guard(self) -> psutil.Process | None:
        """Give the guard, which carries no mark."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.pid).children():
                if "prefect_elastic_train.supervisor.guard" in child.cmdline():
                    return child
        return None

    def marked(self) -> list[psutil.Process]:
        """Give all processes of the training; its driver must have been looked at, for their mark."""
        assert self._mark, "nobody has looked at the driver while it lived"
        return marked_processes(self._mark)

    def wait(self, timeout: float) -> dict[str, Any]:
        """Wait for the end of the flow process and give what it wrote: ``state``, and ``result`` or ``error``."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the flow did not end within {timeout:g} s:\n{self.log[-6000:]}") from None
        assert self.result_file.exists(), f"the flow process went without a result:\n{self.log[-6000:]}"
        outcome: dict[str, Any] = json.loads(self.result_file.read_text())
        return outcome

    def close(self) -> None:
        """End the flow process and everything of its training."""
        if self in FlowProcess.open:
            FlowProcess.open.remove(self)
        if self.process.poll() is None:
            self.driver()
            self.process.kill()
            self.process.wait(10)
        if self._mark:
            end_marked(self._mark, 15)


class RayHead:
    """A cluster as an operator starts it, with `ray start --head`."""

    def __init__(
        self, cpus: int = 2, port: int = 0, token: str = "", dashboard: bool = False, **variables: str
    ) -> None:
        self._variables = variables
        self.port = port or free_port()
        self.dashboard_port = free_port() if dashboard else 0
        self.token = token or secrets.token_hex(16)
        self.cpus = cpus
        self.folder = Path(tempfile.mkdtemp(prefix="head-", dir="/tmp"))
        self._mark = secrets.token_hex(8)
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def block(self) -> dict[str, str]:
        """The fields of the `RayCluster` that joins it."""
        return {"address": self.address, "auth_token": self.token}

    @property
    def url(self) -> str:
        """The dashboard's."""
        return f"http://127.0.0.1:{self.dashboard_port}"

    @property
    def jobs_block(self) -> dict[str, Any]:
        """The fields of the `RayCluster` that submits to it, with the loops of the tests."""
        modules = [str(ROOT / "tests"), str(ROOT / "flows")]
        return {"address": self.url, "auth_token": self.token, "runtime_env": {"py_modules": modules}}

    def dashboard(self, method: str, path: str) -> Any:
        """Ask the dashboard."""
        import httpx

        answer = httpx.request(
            method, f"{self.url}{path}", headers={"Authorization": f"Bearer {self.token}"}, timeout=30
        )
        answer.raise_for_status()
        return answer.json()

    def jobs(self) -> list[dict[str, Any]]:
        """Give the submitted jobs, the newest last."""
        found = [job for job in self.dashboard("GET", "/api/jobs/") if job["type"] == "SUBMISSION"]
        return sorted(found, key=lambda job: int(job["start_time"]))

    def job_driver(self) -> psutil.Process | None:
        """Give the driver that runs as a job, if one does."""
        return next((one for one in titled(self.processes(), "elastic_train_job") if one.name() != "sh"), None)

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to join."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}

    def start(self) -> None:
        """Start the head; it is up when this returns."""
        environment = {
            **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
            **self.environment,
            **self._variables,
            "TEST_HEAD_MARK": self._mark,
            # As in an activated environment.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }
        environment.pop(MARK_VARIABLE, None)
        dashboard = ["--include-dashboard=false"]
        if self.dashboard_port:
            dashboard = [
                "--include-dashboard=true",
                "--dashboard-host=127.0.0.1",
                f"--dashboard-port={self.dashboard_port}",
            ]
        subprocess.run(
            [
                sys.executable,
                "-m",
                "ray.scripts.scripts",
                "start",
                "--head",
                "--disable-usage-stats",
                *dashboard,
                "--node-ip-address=127.0.0.1",
                f"--port={self.port}",
                f"--ray-client-server-port={free_port()}",
                "--dashboard-agent-listen-port=0",
                f"--num-cpus={self.cpus}",
                f"--temp-dir={self.folder}",
                # The kernel gives workers their ports: Ray's own choice may be that of a cluster beside this one.
                "--min-worker-port=0",
                "--max-worker-port=0",
            ],
            # Nothing of this repository is to be found by accident.
            cwd=self.folder,
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=120,
        )

    def processes(self) -> list[psutil.Process]:
        """Give all processes of the cluster, workers included."""
        return of_cluster(f"TEST_HEAD_MARK={self._mark}", self.folder)

    def train_processes(self) -> list[str]:
        """Give the titles of the controllers and workers that train in the cluster."""
        titles = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                titles.append(" ".join(process.cmdline()))
        return [title for title in titles if "RayTrainWorker" in title or "TrainController" in title]

    @property
    def mark(self) -> str:
        """What processes of the cluster have in their environment, as TEST_HEAD_MARK."""
        return self._mark

    def nodes(self) -> int:
        """Give the number of nodes that live."""
        return int(self._ask("sum(node['Alive'] for node in ray.nodes())"))

    def placement_groups(self) -> list[str]:
        """Give the states of the cluster's placement groups that are not removed."""
        states: list[str] = self._ask("[g['state'] for g in ray.util.placement_group_table().values()]")
        return [state for state in states if state != "REMOVED"]

    def _ask(self, what: str) -> Any:
        """Give what an expression is worth in a process that has joined the cluster."""
        code = (
            f"import ray, ray.util, json; ray.init(address={self.address!r}, log_to_driver=False, "
            f"logging_level='ERROR'); print(json.dumps({what}))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return json.loads(done.stdout.strip().splitlines()[-1])

    def kill(self) -> None:
        """Kill everything of the cluster at once, as a lost machine does."""
        for _ in range(20):
            left = self.processes()
            if not left:
                return
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, timeout=1)

    def close(self) -> None:
        """End the cluster."""
        import shutil

        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def prefect_server(folder: Path, port: int = 0) -> Iterator[str]:
    """Run a real Prefect server, with its UI, and give the URL of its API.

    Args:
        folder: Keeps its database, for a server that is started again.
        port: Where it listens; default a free one.
    """
    port = port or free_port()
    url = f"http://127.0.0.1:{port}/api"
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "PREFECT_HOME": str(folder),
        # Its pages would ask for the API at the default port.
        "PREFECT_UI_API_URL": url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "5",
        "PREFECT_SERVER_DEPLOYMENTS_CONCURRENCY_SLOT_WAIT_SECONDS": "2",
    }
    environment.pop("PREFECT_API_URL", None)
    with (folder / "server.log").open("ab") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for(lambda: _answers(url), 90, "the Prefect server")
        yield url
    finally:
        tree = [*psutil.Process(server.pid).children(recursive=True), psutil.Process(server.pid)]
        server.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(tree, timeout=15)
        for process in alive:
            process.kill()
        server.wait(10)


def _answers(url: str) -> bool:
    import httpx

    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
