"""The head node of a local cluster, as far as it needs no Ray."""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path

import psutil
import pytest

from prefect_elastic_train.core.operator_settings import ElasticTrainSettings
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.settings import ClusterSettings
from prefect_elastic_train.supervisor import local_cluster
from prefect_elastic_train.supervisor.local_cluster import LocalCluster
from prefect_elastic_train.supervisor.runtime import Runtime
from tests.unit.support import spec


def test_ports_are_free_and_none_that_the_kernel_gives_to_others_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not {local_cluster._free_port() for _ in range(50)} & {*range(first, last + 1)}
    ports = range(64_100, 64_104)
    monkeypatch.setattr(local_cluster, "_PORTS", ports)
    monkeypatch.setattr(local_cluster, "_PORT_PROBES", len(ports))
    with socket.socket() as taken:
        taken.bind(("", ports[1]))
        taken.listen()
        assert {local_cluster._free_port() for _ in range(50)} == set(ports) - {ports[1]}


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LocalCluster, "_command", lambda self, port, folder: [sys.executable, "-c", _HEAD, str(port)])
    lines: list[str] = []
    runtime = Runtime(
        ElasticTrainSettings(stop_grace_seconds=0.2), lambda event: None, lambda source, text: lines.append(text)
    )
    runtime.driver_command = (sys.executable, "-c", _DRIVER)
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
        assert lines[-1].startswith("joined 127.0.0.1:")
        assert lines[-1] != lines[0]
    finally:
        runtime.close()
    assert not [one for one in psutil.Process().children(recursive=True) if _HEAD in " ".join(one.cmdline())]


def test_what_keeps_a_cluster_from_starting_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalCluster, "_command", lambda *_: [sys.executable, "-c", "print('no room')"])
    lines: list[str] = []
    settings = ElasticTrainSettings(stop_grace_seconds=0.2)
    runtime = Runtime(settings, lambda event: None, lambda source, text: lines.append(text))
    runtime.driver_command = (sys.executable, "-c", _DRIVER)
    try:
        ended = runtime.run_attempt(spec(cluster=ClusterSettings()))
    finally:
        runtime.close()
    assert ended.outcome is Outcome.CLUSTER_LOST
    assert ended.message == "the local Ray cluster has died: no room"
    assert any(line.endswith("no room") for line in lines)
