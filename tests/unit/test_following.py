"""Following a driver from outside: real processes that speak, fall silent, crash, or leave something behind; finding
and ending what a run has started, also by its guard; and the head of a local cluster, as far as it needs no Ray.
"""

import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path

import psutil
import pytest

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core import time_limits
from prefect_elastic_train.core.operator_settings import ElasticTrainSettings
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.request import MARK_VARIABLE, write_spec
from prefect_elastic_train.core.settings import ClusterSettings, ScalingSettings
from prefect_elastic_train.driver import prestarted
from prefect_elastic_train.orchestration import supervision
from prefect_elastic_train.supervisor import driver_handle, local_cluster
from prefect_elastic_train.supervisor.follower import Follower
from prefect_elastic_train.supervisor.guard import kill_marked, marked_processes
from prefect_elastic_train.supervisor.local_cluster import LocalCluster
from prefect_elastic_train.supervisor.raylet_patches import unused_ports
from prefect_elastic_train.supervisor.training_processes import TrainingProcesses
from tests.support.processes import wait_for
from tests.unit.support import REPOSITORY, Stop, spec

SPEC = spec(cluster=ClusterSettings(address="auto"))

STARTED = ev.AttemptStarted(attempt=4, run_name="mnist", run_uri="/runs/mnist")
LAST = ev.AttemptEnded(attempt=4, outcome=Outcome.USER_ERROR, message="ValueError")


def _say(*events: ev.Event) -> str:
    """Return the code with which a driver sends events."""
    return "".join(f"print({ev.EVENT_TAG + ev.encode_event(event)!r}, flush=True)\n" for event in events)


class Supervisor(Follower):
    """Makes supervisors, and records what they report."""

    def __init__(self) -> None:
        self.events: list[ev.Event] = []
        self.lines: list[tuple[str, str]] = []
        self.notes: list[str] = []
        self.settings = ElasticTrainSettings(liveness_timeout_seconds=60, stop_grace_seconds=0.1)
        self._runtimes: list[TrainingProcesses] = []

    def runtime(self, code: str) -> TrainingProcesses:
        """Return what runs attempts whose drivers run some code."""
        runtime = TrainingProcesses(self.settings, self)
        runtime.driver_command = (sys.executable, "-c", f"import os, signal, subprocess, sys, time\n{code}")
        self._runtimes.append(runtime)
        return runtime

    def close(self) -> None:
        """End all processes."""
        for runtime in self._runtimes:
            runtime.close()

    def on_event(self, event: ev.Event, replayed: bool) -> None:
        self.events.append(event)

    def on_line(self, source: str, text: str) -> None:
        self.lines.append((source, text))

    def on_note(self, text: str, level: int = logging.INFO) -> None:
        self.notes.append(text)

    def follow(self, code: str) -> ev.AttemptEnded:
        """Follow a driver that runs some code to its end."""
        return self.runtime(code).run_attempt(SPEC)


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    """A supervisor without a cluster."""
    monkeypatch.setattr(driver_handle, "_PIPE_SECONDS", 0.3)
    with closing(Supervisor()) as supervisor:
        yield supervisor


#: Lines with a tag that are no events.
_NO_EVENTS = [ev.EVENT_TAG + "{}", "x" + ev.EVENT_TAG + ev.encode_event(STARTED)]


def test_events_and_lines_are_told_in_their_order_and_the_last_word_is_how_the_attempt_ended(
    supervisor: Supervisor,
) -> None:
    states = [ev.StateChanged(state=str(number)) for number in range(300)]
    prints = "".join(f"print({line!r})\n" for line in _NO_EVENTS)
    assert supervisor.follow(_say(STARTED) + "print('oh', file=sys.stderr)\n" + prints + _say(*states, LAST)) == LAST
    assert supervisor.events == [STARTED, *states, LAST]
    assert sorted(supervisor.lines) == sorted([*(("driver", line) for line in _NO_EVENTS), ("stderr", "oh")])


_KILL = "os.kill(os.getpid(), signal.SIGKILL)"
_CORE = "[2026-11-22 15:36:29,080 E 6449 6500] (python-core-driver) gcs_rpc_client.h:199: Failed to connect to GCS."


@pytest.mark.parametrize(
    ("code", "how"),
    [
        # Something that it started holds its output.
        (f"subprocess.Popen(['sleep', '30'])\n{_KILL}", "was ended by signal 9 (Killed)"),
        (f"os.kill(os.getpid(), {int(signal.SIGRTMIN) + 3})", f"was ended by signal {int(signal.SIGRTMIN) + 3}"),
        ("os._exit(7)", "was ended by exit code 7"),
        ("os._exit(0)", "its final event was lost"),
        ("raise RuntimeError('no such package')", "RuntimeError: no such package"),
        (
            f"print({_CORE!r})\nprint('(RayTrainWorker pid=7) ValueError: of a rank', flush=True)\nos._exit(1)",
            f"was ended by exit code 1: {_CORE}",
        ),
    ],
)
def test_a_driver_that_went_without_a_last_word_was_lost(supervisor: Supervisor, code: str, how: str) -> None:
    started = time.monotonic()
    ended = supervisor.follow(_say(STARTED) + "print('more words', flush=True)\n" + code)
    assert time.monotonic() - started < 10
    assert (ended.outcome, ended.attempt) == (Outcome.DRIVER_LOST, 4)
    assert how in ended.message
    assert "more words" not in ended.message, "its output is told line by line, as it comes"


@pytest.mark.parametrize("chatter", ["time.sleep(60)", "while True: print('epoch', flush=True); time.sleep(0.01)"])
def test_a_driver_without_a_sign_of_life_is_given_up_whatever_it_prints(supervisor: Supervisor, chatter: str) -> None:
    alive = ev.ControllerAlive(doing="SCHEDULING", seconds=1)
    code = _say(STARTED) + f"for _ in range(9):\n    time.sleep(0.4)\n    {_say(alive)}" + chatter
    supervisor.settings = ElasticTrainSettings(liveness_timeout_seconds=3, stop_grace_seconds=0.1)
    ended = supervisor.follow(code)
    assert ended.outcome is Outcome.DRIVER_LOST
    assert "no heartbeat for 3 s, last SCHEDULING" in ended.message
    assert supervisor.events == [STARTED, *[alive] * 9], "heartbeats have kept it"


def test_a_driver_whose_signs_of_life_lie_unread_since_its_supervisor_stood_still_is_left_alone(
    supervisor: Supervisor,
) -> None:
    def stand_still(event: ev.Event, replayed: bool) -> None:
        if event == STARTED:
            time.sleep(2.5)

    supervisor.settings = ElasticTrainSettings(liveness_timeout_seconds=2, stop_grace_seconds=0.1)
    alive = _say(ev.ControllerAlive(doing="RUNNING", seconds=1))
    supervisor.on_event = stand_still  # type: ignore[method-assign]
    code = _say(STARTED) + f"for _ in range(20):\n    time.sleep(0.2)\n    {alive}" + _say(LAST)
    assert supervisor.follow(code) == LAST


@pytest.mark.usefixtures("stops_by_signal")
def test_a_request_to_stop_is_seen_while_a_driver_chatters_and_another_leaves_it_its_time(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    code = (
        "from pathlib import Path\n"
        "try:\n    while True: print('epoch', flush=True)\n"
        "finally:\n    os.kill(os.getppid(), signal.SIGUSR1)\n    time.sleep(0.5)\n"
        f"    Path({str(tmp_path)!r}, 'told').write_text(Path(sys.argv[1]).with_name('stop').read_text())"
    )

    def check_stop() -> None:
        if supervisor.lines:
            raise TimeoutError

    supervisor.settings = ElasticTrainSettings(stop_grace_seconds=5)
    supervisor.check_stop = check_stop  # type: ignore[method-assign]
    with pytest.raises(Stop):
        supervisor.follow(code)
    assert (tmp_path / "told").read_text() == "timed_out"


_PRESTARTED = """
told = sys.stdin.readline().strip() if sys.argv[1] == "--prestarted" else sys.argv[1]
assert told.endswith("/spec")
print(os.getpid(), flush=True)
"""


def test_a_prestarted_driver_is_the_next_one_if_its_environment_is_the_same_and_ends_with_the_training(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_handle, "_PRESTART_SECONDS", 0)
    runtime = supervisor.runtime(_PRESTARTED + _say(ev.WorkerGroupStarted(world_size=1)) + f"time.sleep(1)\n{_KILL}")
    prestarted_pids = []
    for variable in ("A", "A", "B"):
        monkeypatch.setenv(variable, "1")
        runtime.run_attempt(SPEC)
        prestarted_pids.append(runtime._starter.prestarted.pid)
    supervisor.close()
    first, second, third = [int(line) for source, line in supervisor.lines if source == "driver"]
    assert second == prestarted_pids[0]
    assert third not in prestarted_pids, "it would not see what has changed"
    assert not any(psutil.pid_exists(pid) for pid in (first, *prestarted_pids))


def test_a_prestarted_driver_exits_with_its_supervisor_and_without_memory_unless_it_is_needed_by_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prestarted, "memory_left", lambda: -1.0)
    monkeypatch.setattr(prestarted, "import_ahead", lambda modules: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "_exit", sys.exit)
    reader, writer = os.pipe()
    with open(reader) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with open(writer, "w") as stream:
            with pytest.raises(SystemExit):
                prestarted.wait_for_spec("none")
            print("/run/spec", file=stream, flush=True)
            assert prestarted.wait_for_spec("none") == Path("/run/spec")
        with pytest.raises(SystemExit):
            prestarted.wait_for_spec("none")


def test_the_steps_of_a_cancellation_fit_into_the_time_before_a_runner_kills() -> None:
    steps = (
        time_limits.FLOW_RUN_STATE_SECONDS,
        time_limits.STOP_GRACE_SECONDS,
        time_limits.KILL_SECONDS,
        time_limits.PUBLISHER_CLOSE_SECONDS,
    )
    assert sum(steps) < time_limits.RUNNER_GRACE_SECONDS
    *_, seconds = supervision._TRACKER_MARKS[supervision.TrainingState.CANCELLED]
    assert seconds <= time_limits.PUBLISHER_CLOSE_SECONDS, "marks are beside the report's last update"
    assert time_limits.FIT_EXIT_SECONDS + time_limits.EXIT_STEP_SECONDS < time_limits.STOP_GRACE_SECONDS


def test_ports_are_none_that_the_kernel_gives_to_others_meanwhile() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not {*islice(unused_ports(), 50)} & {*range(first, last + 1)}


def test_the_private_folder_is_where_paths_are_short_also_if_a_short_link_leads_elsewhere(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = tmp_path / "a-folder-with-a-long-name"
    far.mkdir()
    link = Path("/tmp", secrets.token_hex(4))
    link.symlink_to(far)
    monkeypatch.setattr(tempfile, "tempdir", str(link))
    try:
        supervisor.follow("print(sys.argv[1], flush=True)")
    finally:
        link.unlink()
    [(_, folder)] = supervisor.lines
    assert len(folder) < 50
    assert Path(folder).is_relative_to(os.path.realpath("/tmp"))


def test_a_token_is_in_a_private_file_and_in_no_environment(tmp_path: Path) -> None:
    environment = {"RAY_AUTH_TOKEN": "of another cluster"}
    local_cluster.use_token(environment, "hush", tmp_path)
    assert environment == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    assert ((tmp_path / "token").read_text(), (tmp_path / "token").stat().st_mode & 0o777) == ("hush", 0o600)


#: A head that listens as Ray's does, and says on its way out which of its processes it has lost.
_HEAD = """
import signal, socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
def end(*_):
    print("gcs_server [exit code=-9]", flush=True)
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
while True:
    listener.accept()
"""

#: A driver that wants a cluster, says when it answers, and perhaps lingers.
_JOINING = """
import pickle, socket, sys, time
from pathlib import Path
from prefect_elastic_train.core.events import EVENT_TAG, AttemptEnded, ClusterWanted, encode_event
address = pickle.loads(Path(sys.argv[1]).read_bytes()).local_address
print(EVENT_TAG + encode_event(ClusterWanted(sequence=1)), flush=True)
while True:
    try:
        socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))).close()
        break
    except OSError:
        time.sleep(0.05)
print("joined", address, flush=True)
if Path("lingers").exists():
    time.sleep(60)
outcome = "cluster_lost" if Path("is lost").exists() else "completed"
last = AttemptEnded(sequence=2, outcome=outcome, result={})
print(EVENT_TAG + encode_event(last), flush=True)
"""


def test_a_cluster_is_started_once_outlives_its_drivers_and_is_replaced_when_it_has_died(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LocalCluster, "_command", lambda self: [sys.executable, "-c", _HEAD, self.address[10:]])
    runtime = supervisor.runtime(_JOINING)

    def join() -> ev.AttemptEnded:
        return runtime.run_attempt(spec(cluster=ClusterSettings()))

    def heads() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if _HEAD in child.cmdline()]

    def on_line(source: str, text: str) -> None:
        supervisor.lines.append((source, text))
        if text.startswith("joined") and Path("lingers").exists():
            [head] = heads()
            head.terminate()

    supervisor.on_line = on_line  # type: ignore[method-assign]
    assert {join().outcome for _ in range(2)} == {Outcome.COMPLETED}
    Path("lingers").touch()
    lost = join()
    assert lost.outcome is Outcome.CLUSTER_LOST
    assert lost.message.endswith("has died: gcs_server [exit code=-9]")
    Path("lingers").unlink()
    assert join().outcome is Outcome.COMPLETED
    Path("is lost").touch()
    assert join().outcome is Outcome.CLUSTER_LOST
    Path("is lost").unlink()
    assert join().outcome is Outcome.COMPLETED
    first, same, dying, second, of_no_use, third = [line for _, line in supervisor.lines if line.startswith("joined")]
    assert first == same == dying != second == of_no_use != third, "a head that has not died was of no use, either"
    assert len(heads()) == 1
    supervisor.close()
    assert heads() == []


def test_a_cluster_waits_for_a_gpu_that_another_has_for_no_longer_than_is_wanted(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = secrets.token_hex(4)  # pretended, of no other test
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpu)
    heads = "import os, sys; print(os.environ['CUDA_VISIBLE_DEVICES'], sys.argv[2], flush=True)\n" + _HEAD
    monkeypatch.setattr(
        LocalCluster,
        "_command",
        lambda self: [sys.executable, "-c", heads, self.address[10:], str(len(self._claims.sockets))],
    )
    scaling = ScalingSettings(accelerator="gpu", capacity_timeout_seconds=1.5)
    limited, patient = spec(scaling=scaling), spec(scaling=ScalingSettings(accelerator="gpu"))
    first = supervisor.runtime(_JOINING)
    assert first.run_attempt(limited).outcome is Outcome.COMPLETED
    in_use = f"GPU {gpu} is used by training 'mnist' (pid {os.getpid()}); the local cluster waits for GPUs: 1"
    with closing(Supervisor()) as other:
        with pytest.raises(AttemptFailedError) as caught:
            other.runtime(_JOINING).run_attempt(limited)
        assert caught.value.outcome is Outcome.TIMED_OUT
        assert str(caught.value) == f"capacity_timeout_seconds (1.5 s) have passed: {in_use}"
        assert [event.missing for event in other.events if isinstance(event, ev.WaitingForCapacity)] == [in_use]
        closing_first = threading.Timer(1.0, first.close)
        closing_first.start()
        second = other.runtime(_JOINING)
        assert second.run_attempt(patient).outcome is Outcome.COMPLETED
        closing_first.join()
        assert (second._folder / "r0.log").read_text().splitlines()[0] == f"{gpu} 1"


#: Starts a child that starts a grandchild in a session of its own; the child ends, so the grandchild is nobody's.
_IN_BETWEEN = (
    "import subprocess, sys; "
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)"
)
#: An orphan, a child without the mark, and one that ignores every signal that it can.
_FAMILY = f"""
import os, subprocess, sys, time
subprocess.run([sys.executable, "-c", {_IN_BETWEEN!r}])
stubborn = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; time.sleep(60)"
subprocess.Popen([sys.executable, "-c", stubborn])
unmarked = {{name: value for name, value in os.environ.items() if name != {MARK_VARIABLE!r}}}
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=unmarked)
time.sleep(60)
"""


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    """A mark of this test, the path of a private folder, none of whose processes survives it."""
    mark = tmp_path / "private"
    mark.mkdir()
    yield str(mark)
    assert not marked_processes(str(mark)) or kill_marked(str(mark)) == []


def _start(mark: str, *command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", *command], env={**os.environ, MARK_VARIABLE: mark})


def _count(mark: str, count: int) -> list[psutil.Process]:
    def look() -> list[psutil.Process]:
        found = marked_processes(mark)
        with suppress(psutil.NoSuchProcess):  # one that has just ended: look again
            settled = not any(_IN_BETWEEN in process.cmdline() for process in found)
            return found if settled and len(found) == count else []
        return []

    return wait_for(look, 15, f"{count} marked processes")


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_a_whole_family_is_found_and_ended_whatever_it_has_thrown_away_and_nothing_else(
    mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = _start(f"{mark}0", "import time; time.sleep(60)")
    zombie = _start(mark, "")
    parent = _start(mark, _FAMILY)
    try:
        monkeypatch.setenv(MARK_VARIABLE, mark)
        family = _count(mark, 4)
        assert len([one for one in family if one.pid != parent.pid and one.ppid() != parent.pid]) == 1, "the orphan"
        assert not {os.getpid(), other.pid, zombie.pid} & {process.pid for process in family}
        assert kill_marked(mark) == []
        assert not any(map(_lives, family))
        assert other.poll() is None
    finally:
        for process in (other, parent, zombie):
            process.kill()
            process.wait()


def test_an_agent_of_ray_without_its_mark_is_found_by_title_and_folder_and_a_shell_in_there_is_not(
    mark: str, tmp_path: Path
) -> None:
    inside, beside = Path(mark) / "r0", tmp_path / "private-too"
    for folder in (inside, beside):
        folder.mkdir()
    started = [
        subprocess.Popen([title, "60"], executable=shutil.which("sleep"), cwd=folder)
        for title, folder in [("ray::DashboardAgent", inside), ("sleep", inside), ("ray::DashboardAgent", beside)]
    ]
    try:
        wait_for(lambda: all(psutil.Process(process.pid).cmdline() for process in started), 10, "their titles")
        assert [process.pid for process in marked_processes(mark)] == [started[0].pid]
        # Between two attempts the folder of the session that has died is removed.
        shutil.rmtree(inside)
        assert kill_marked(mark) == []
        assert [process.poll() is None for process in started] == [False, True, True]
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_a_process_that_appears_while_the_others_are_ended_is_ended_too(mark: str) -> None:
    # Each process starts the next one, as a supervisor of daemons does that restarts them.
    chain = """
import subprocess, sys, time
left, code = int(sys.argv[1]), sys.argv[2]
if left:
    subprocess.Popen([sys.executable, "-c", code, str(left - 1), code])
time.sleep(60)
"""
    first = _start(mark, chain, "5", chain)
    assert kill_marked(mark) == []
    assert marked_processes(mark) == []
    first.wait(5)


#: A flow process that is in the middle of an attempt; its driver ends in order when it is asked to.
_FLOW = """
import pathlib, sys
from prefect_elastic_train.core.operator_settings import ElasticTrainSettings
from prefect_elastic_train.core.request import read_spec
from prefect_elastic_train.supervisor.follower import Follower
from prefect_elastic_train.supervisor.training_processes import TrainingProcesses
follower = Follower()
follower.on_line = lambda source, text: print(text, flush=True)
runtime = TrainingProcesses(ElasticTrainSettings(), follower)
runtime.driver_command = (sys.executable, "-c", *sys.argv[1:], "prefect_elastic_train.driver")
try:
    runtime.run_attempt(read_spec(pathlib.Path(sys.argv[3]).with_name("spec")))
finally:
    runtime.close()
"""
_DRIVER = """
import os, pathlib, signal, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
# Whoever runs the tests in the background may have SIGINT ignored, which a driver does not.
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    print(sys.argv[-1], flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    pathlib.Path(sys.argv[2]).touch()
"""


_OTHERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _ignores_others(pid: int) -> bool:
    """Whether a guard is on watch. Who runs the tests in the background has it ignore some of them from the start."""
    ignored = int(Path(f"/proc/{pid}/status").read_text().partition("SigIgn:")[2].split()[0], 16)
    return all(ignored & (1 << (number - 1)) for number in _OTHERS)


def test_a_flow_process_that_is_killed_leaves_nothing_running(tmp_path: Path) -> None:
    in_order = tmp_path / "in-order"
    write_spec(SPEC, tmp_path / "spec")
    with subprocess.Popen(
        [sys.executable, "-c", _FLOW, _DRIVER, _FAMILY, str(in_order)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        text=True,
    ) as flow:
        private = Path(flow.stdout.readline().strip()).parent
        try:
            _count(str(private), 5)
            [guard] = [one for one in psutil.Process(flow.pid).children() if str(flow.pid) in one.cmdline()]
            wait_for(lambda: _ignores_others(guard.pid), 10, "the guard to be on watch")
            for other in _OTHERS:
                guard.send_signal(other)  # what ends a flow must not end its guard
            flow.kill()
            wait_for(lambda: not marked_processes(str(private)), 20, "the end of all marked processes")
            wait_for(lambda: not private.exists(), 5, "the end of the folder")
            wait_for(lambda: not _lives(guard), 5, "the guard to go")
            assert in_order.exists(), "the driver was asked first"
        finally:
            flow.kill()
            kill_marked(str(private))
