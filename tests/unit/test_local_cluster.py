"""The head node of a local cluster, as far as it needs no Ray."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from prefect_elastic_train.core.settings import ClusterSettings
from prefect_elastic_train.supervisor import cluster
from prefect_elastic_train.supervisor.cluster import LocalCluster


@pytest.fixture
def few_ports(monkeypatch: pytest.MonkeyPatch) -> range:
    """Four ports to choose from, all of which are looked at."""
    ports = range(64_100, 64_104)
    monkeypatch.setattr(cluster, "_ports", lambda: ports)
    monkeypatch.setattr(cluster, "_PORT_PROBES", len(ports))
    return ports


def test_ports_are_none_that_the_kernel_gives_to_others_meanwhile() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    for _ in range(50):
        port = cluster._free_port()
        assert not first <= port <= last
        assert port >= 10_000


def test_a_port_that_is_taken_is_left_out(few_ports: range) -> None:
    with socket.socket() as taken:
        taken.bind(("", few_ports[1]))
        taken.listen()
        assert {cluster._free_port() for _ in range(50)} == set(few_ports) - {few_ports[1]}


def test_last_words_are_the_end_of_the_log_without_its_colours(tmp_path: Path) -> None:
    head = LocalCluster(ClusterSettings(), 0, tmp_path, {})
    assert head.last_words() == ""
    (tmp_path / "r0.log").write_text("x" * 5_000 + "\n\x1b[31mgcs_server [exit code=-9]\x1b[39m\n")
    words = head.last_words()
    assert words.endswith("x\ngcs_server [exit code=-9]")
    assert len(words) <= 2_000
