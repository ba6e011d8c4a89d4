"""Following a driver from outside: real processes that speak, fall silent, crash, or leave something behind; and the
head node of a local cluster, as far as it needs no Ray.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from prefect_elastic_train.core.events import (
    EVENT_TAG,
    AttemptEnded,
    AttemptStarted,
    ControllerAlive,
    Event,
    StateChanged,
    encode_event,
)
from prefect_elastic_train.core.operator_settings import ElasticTrainSettings
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.request import DriverSpec
from prefect_elastic_train.core.settings import ClusterSettings
from prefect_elastic_train.supervisor import attempt, local_cluster
from prefect_elastic_train.supervisor.local_cluster import LocalCluster
from prefect_elastic_train.supervisor.runtime import Runtime
from tests.unit.support import spec

SPEC = spec(cluster=ClusterSettings(address="auto"))

STARTED = AttemptStarted(attempt=4, run_name="mnist", run_uri="/runs/mnist")
LAST = AttemptEnded(attempt=4, outcome=Outcome.USER_ERROR, message="ValueError")


def _say(*events: Event) -> str:
    """Return the code with which a driver tells events."""
    return "".join(f"print({EVENT_TAG + encode_event(event)!r}, flush=True)\n" for event in events)


class Supervisor:
    """A supervisor, and what it was told."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.lines: list[tuple[str, str]] = []

    def runtime(self, code: str, liveness: float = 60.0, grace: float = 0.1) -> Runtime:
        """Return what runs attempts whose drivers run some code."""
        settings = ElasticTrainSettings(liveness_timeout_seconds=liveness, stop_grace_seconds=grace)
        runtime = Runtime(settings, self.events.append, lambda source, text: self.lines.append((source, text)))
        runtime.driver_command = (sys.executable, "-c", f"import os, signal, subprocess, sys, time\n{code}")
        return runtime

    def follow(
        self,
        code: str,
        check_stop: Callable[[], None] = lambda: None,
        wanted: DriverSpec = SPEC,
        **more: float,
    ) -> AttemptEnded:
        """Follow a driver that runs some code to its end."""
        runtime = self.runtime(code, **more)
        runtime.check_stop = check_stop
        try:
            return runtime.run_attempt(wanted)
        finally:
            runtime.close()


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    """A supervisor without a cluster."""
    monkeypatch.setattr(attempt, "_PIPE_SECONDS", 0.3)
    return Supervisor()


def test_events_and_lines_are_told_in_their_order_and_the_last_word_is_how_the_attempt_ended(
    supervisor: Supervisor,
) -> None:
    states = [StateChanged(state=str(number)) for number in range(300)]
    told = _say(STARTED) + "print('epoch 1')\nprint('oh', file=sys.stderr)\n" + _say(*states, LAST)
    assert supervisor.follow(told) == LAST
    assert supervisor.events == [STARTED, *states, LAST]
    assert sorted(supervisor.lines) == [("driver", "epoch 1"), ("stderr", "oh")]


_CORE = "[2026-11-22 15:36:29,080 E 6449 6500] (python-core-driver) gcs_rpc_client.h:199: Failed to connect to GCS."


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by signal 9 (SIGKILL)"),
        (f"os.kill(os.getpid(), {int(signal.SIGRTMIN) + 3})", f"was ended by signal {int(signal.SIGRTMIN) + 3}"),
        ("os._exit(7)", "was ended by exit code 7"),
        ("os._exit(0)", "its last word was lost"),
        ("raise RuntimeError('no such package')", "RuntimeError: no such package"),
        (
            f"print({_CORE!r})\nprint('(RayTrainWorker pid=7) ValueError: of a rank', flush=True)\nos._exit(1)",
            "was ended by exit code 1: Failed to connect to GCS.",
        ),
    ],
)
def test_a_driver_that_went_without_a_last_word_was_lost(supervisor: Supervisor, code: str, how: str) -> None:
    ended = supervisor.follow(_say(STARTED) + "print('more words', flush=True)\n" + code)
    assert (ended.outcome, ended.attempt) == (Outcome.DRIVER_LOST, 4)
    assert how in ended.message
    assert "more words" not in ended.message, "its output is told line by line, as it comes"


@pytest.mark.parametrize("chatter", ["time.sleep(60)", "while True: print('epoch', flush=True); time.sleep(0.01)"])
def test_a_driver_without_a_sign_of_life_is_given_up_whatever_it_prints(supervisor: Supervisor, chatter: str) -> None:
    alive = ControllerAlive(doing="SCHEDULING", seconds=1)
    code = _say(STARTED) + f"for _ in range(6):\n    time.sleep(0.1)\n    {_say(alive)}" + chatter
    ended = supervisor.follow(code, liveness=0.5)
    assert ended.outcome is Outcome.DRIVER_LOST
    assert "no sign of life for 0.5 s, last SCHEDULING" in ended.message
    assert supervisor.events == [STARTED, *[alive] * 6], "signs of life have kept it"


def test_a_driver_that_dies_while_something_it_started_holds_its_output_is_noticed(supervisor: Supervisor) -> None:
    left = "import time; time.sleep(30)"
    code = _say(STARTED) + f"subprocess.Popen([sys.executable, '-c', {left!r}])\nos.kill(os.getpid(), signal.SIGKILL)"
    started = time.monotonic()
    assert "signal 9" in supervisor.follow(code).message
    assert time.monotonic() - started < 10


def test_a_request_to_stop_is_seen_while_a_driver_chatters_and_told_to_the_driver(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    code = (
        "from pathlib import Path\n"
        "try:\n    while True: print('epoch', flush=True)\n"
        f"finally: Path({str(tmp_path)!r}, 'told').write_text(Path(sys.argv[1]).with_name('stop').read_text())"
    )

    def check_stop() -> None:
        if supervisor.lines:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        supervisor.follow(code, check_stop=check_stop, grace=5)
    assert (tmp_path / "told").read_text() == "timed_out"


def test_a_line_that_is_no_event_is_output(supervisor: Supervisor) -> None:
    lines = [EVENT_TAG, EVENT_TAG + "{}", EVENT_TAG + '{"kind": "danced"}', "x" + EVENT_TAG + encode_event(STARTED)]
    ended = supervisor.follow("".join(f"print({line!r})\n" for line in lines))
    assert (supervisor.events, [text for _, text in supervisor.lines], ended.attempt) == ([], lines, 0)


def test_ports_are_none_that_the_kernel_gives_to_others_meanwhile() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not {local_cluster._free_port() for _ in range(50)} & {*range(first, last + 1)}


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
_DRIVER = """
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
last = AttemptEnded(sequence=2, outcome="completed", result={})
print(EVENT_TAG + encode_event(last), flush=True)
"""


def test_a_cluster_is_started_once_outlives_its_drivers_and_is_replaced_when_it_has_died(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LocalCluster, "_command", lambda self, port, folder: [sys.executable, "-c", _HEAD, str(port)])
    lines, runtime = supervisor.lines, supervisor.runtime(_DRIVER)
    wanted = spec(cluster=ClusterSettings())
    try:
        ended = [runtime.run_attempt(wanted) for _ in range(2)]
        assert [one.outcome for one in ended] == [Outcome.COMPLETED, Outcome.COMPLETED]
        assert lines[0] == lines[1], "the same cluster"
        Path("lingers").touch()
        heads = [one for one in psutil.Process().children() if _HEAD in one.cmdline()]
        assert len(heads) == 1
        threading.Timer(1.0, heads[0].terminate).start()
        lost = runtime.run_attempt(wanted)
        assert lost.outcome is Outcome.CLUSTER_LOST
        assert lost.message.endswith("has died: gcs_server [exit code=-9]")
        Path("lingers").unlink()
        assert runtime.run_attempt(wanted).outcome is Outcome.COMPLETED
        assert lines[-1][1].startswith("joined 127.0.0.1:")
        assert lines[-1] != lines[0]
    finally:
        runtime.close()
    assert not [one for one in psutil.Process().children(recursive=True) if _HEAD in " ".join(one.cmdline())]
