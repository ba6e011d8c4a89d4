"""Strikes against nodes, on which workers crash, hang or lag behind. After some, the run leaves the node out."""

import json
import logging
import time
from contextlib import suppress

from prefect_elastic_train.runs.layout import STATE_FOLDER
from prefect_elastic_train.storage.store import RunStore

logger = logging.getLogger(__name__)

_FOLDER = f"{STATE_FOLDER}/strikes"
_STORAGE_SECONDS = 5.0  # for which reads and writes are repeated
_MAX_STRIKES = 100


class NodeStrikes:
    """The strikes against the nodes of a cluster, which are recorded in a storage.

    Args:
        store: The run directory, or the folder of a storage whose trainings share the strikes.
        run_id: Id of the run, which writes an object of its own.
        limit: Number of strikes after which a node is left out; 0: none is.
        window_seconds: Seconds after which a strike no longer counts; 0: it always counts.
    """

    def __init__(self, store: RunStore, run_id: str, limit: int, window_seconds: float) -> None:
        self._store = store.with_retry_limit(_STORAGE_SECONDS)
        self._own_name = f"{run_id}.json"
        self._limit = limit
        self._window_seconds = window_seconds or float("inf")
        self._strikes: dict[str, list[tuple[str, float, str]]] = {}  # node, time and reason, by object
        self._read()

    def add(self, nodes: dict[str, str], count: int = 1) -> None:
        """Record strikes against each of some nodes, with the reason."""
        self._read()
        own = [*self._strikes.get(self._own_name, []), *[(node, time.time(), nodes[node]) for node in nodes] * count]
        self._strikes[self._own_name] = own[-_MAX_STRIKES:]
        try:
            self._store.replace(f"{_FOLDER}/{self._own_name}", json.dumps(self._strikes[self._own_name]).encode())
        except OSError as error:
            logger.warning("Cannot record the strikes against nodes: %s", error)

    def struck_nodes(self) -> dict[str, str]:
        """Return the ids of the nodes with enough strikes that count, and their reasons as text."""
        if not self._limit:
            return {}
        reasons: dict[str, list[str]] = {}
        for strikes in self._strikes.values():
            for node, at, reason in strikes:
                if time.time() - at < self._window_seconds:
                    reasons.setdefault(node, []).append(reason)
        return {node: "; ".join(reasons[node]) for node in reasons if len(reasons[node]) >= self._limit}

    def _read(self) -> None:
        with suppress(OSError, ValueError):  # a node that is not left out costs another failure
            for name in self._store.names(_FOLDER):
                self._strikes[name] = json.loads(self._store.read(f"{_FOLDER}/{name}") or b"[]")
