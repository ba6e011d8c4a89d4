"""Strikes against nodes, on which workers crash, hang or are stragglers. A node with too many of them is left out."""

import json
import time
from collections import defaultdict
from contextlib import suppress

from prefect_elastic_train.core.settings import FailureSettings
from prefect_elastic_train.runs.layout import STATE_FOLDER
from prefect_elastic_train.storage.store import RunStore

_FOLDER = f"{STATE_FOLDER}/strikes"
_STORAGE_SECONDS = 5.0  # for which reads and writes are repeated
#: A node is left out for so many times ``forgive_after_seconds``, so that its failures no longer count when it returns.
_TIMES = 2.0


class NodeStrikes:
    """The strikes against the nodes of a cluster, which are recorded in a storage.

    Args:
        store: The run directory. Runs that share their strikes record them in the folder of the storage.
        run_id: Id of the run.
        settings: ``node_strikes``, ``shared_strikes`` and ``forgive_after_seconds`` apply here.
    """

    def __init__(self, store: RunStore, run_id: str, settings: FailureSettings) -> None:
        self._store = store.with_retry_limit(_STORAGE_SECONDS)  # a copy
        if settings.shared_strikes:
            self._store.path = store.path.rpartition("/")[0]
        self._run_id = run_id
        self._limit = settings.node_strikes
        self._seconds = _TIMES * settings.forgive_after_seconds or float("inf")
        #: Time, node and reason of each strike, by object.
        self._strikes: dict[str, list[tuple[float, str, str]]] = {}
        with suppress(OSError):
            self._read()

    def add(self, nodes: dict[str, str], count: int = 1) -> None:
        """Record strikes against each of some nodes, with the reason."""
        now = time.time()
        name = f"{now:017.6f}-{self._run_id}.json"
        self._strikes[name] = [(now, node, nodes[node]) for node in nodes] * count
        with suppress(OSError):  # the next driver does not know them then
            self._store.replace(f"{_FOLDER}/{name}", json.dumps(self._strikes[name]).encode())
            self._read()

    def nodes_to_leave_out(self) -> dict[str, str]:
        """Return the ids of the nodes that have too many strikes, and the reasons as text."""
        reasons = defaultdict[str, list[str]](list)
        for strikes in self._strikes.values():
            for at, node, reason in strikes:
                if time.time() - at < self._seconds:
                    reasons[node].append(reason)
        return {
            node: "; ".join(dict.fromkeys(reasons[node])) for node in reasons if 0 < self._limit <= len(reasons[node])
        }

    def _read(self) -> None:
        """Read the objects that are not known yet, which other runs or attempts have written."""
        for name in self._store.names(_FOLDER):
            with suppress(ValueError, TypeError):  # it is damaged
                if name not in self._strikes and time.time() - float(name[:17]) < self._seconds:
                    content = json.loads(self._store.read(f"{_FOLDER}/{name}") or b"[]")
                    self._strikes[name] = [(float(at), str(node), str(reason)) for at, node, reason in content]
