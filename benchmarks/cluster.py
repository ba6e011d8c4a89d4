"""A Ray cluster on this machine that gets and loses nodes while a side trains on it."""

from __future__ import annotations

import secrets
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from prefect_elastic_train.rehearsal.node_cluster import COMMAND, NodeCluster

DRAIN, KILL = "drain", "kill"
DRAIN_SECONDS = 30
"""From the announcement that a node goes until it does."""


class GrowingCluster:
    """A head without resources for workers, and nodes with one CPU each, in a process of its own.

    Whoever makes it ends the process and all that is below it.

    Args:
        directory: Where Ray keeps its session directory and the process its log; it exists.
        environment: The environment of all processes of the cluster, without the token.
    """

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        """What a process has to have in its environment to join."""
        with (directory / "cluster.log").open("wb") as output:
            process = subprocess.Popen(
                COMMAND,
                env={**environment, **self.environment, "RAY_TMPDIR": str(directory)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )
        self._nodes = NodeCluster(process)
        self.address = self._nodes.address

    def add_node(self) -> float:
        """Add a node for one worker and wait until the cluster knows it; return when that was, since the epoch."""
        self._nodes.add(num_cpus=1)
        return time.time()

    def take_node(self, how: str) -> None:
        """Take the newest node back: announce that it goes (`DRAIN`), or end it without a word (`KILL`)."""
        newest = self._nodes.ids[-1]
        if how == KILL:
            self._nodes.remove(newest)
        else:
            self._nodes.drain(newest, DRAIN_SECONDS)
