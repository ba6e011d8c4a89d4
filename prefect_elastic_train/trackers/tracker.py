"""The metrics of a training for its trackers: sent in the background, each step once, after its commit."""

import logging
import math
import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from .tracked_run import Row, TrackedRun

logger = logging.getLogger(__name__)

#: Shortest time for which sent points stay in checkpoints: W&B writes to its files and its server every 15 s.
_KEEP_SECONDS = 60.0
_CLOSE_SECONDS = 30.0  # time limit of each tracker at the end
_PAUSE_SECONDS = 1.0  # between two attempts to send; doubled after each error, up to:
_MAX_PAUSE_SECONDS = 16.0


def scalar(value: Any) -> Any:
    """Return a copy of a number, or of a tensor or array with one element; None for other values.

    A tensor stays on its device.
    """
    with suppress(Exception):  # not an array with a single element
        value = value.reshape(()) + 0  # a copy, since the loop may overwrite its own
    if not hasattr(value, "__float__") or isinstance(value, bool) or np.ndim(value):
        return None
    return value.detach() if hasattr(value, "detach") else value


def valid_name(name: Any) -> str:
    """Return the name of a metric or parameter in characters that MLflow allows. It refuses a request with others."""
    return re.sub(r"[^\w.\- :/]", "_", str(name)).strip("/")


class Tracker:
    """Sends the metrics of each step to trackers, from rank 0. Made by :func:`loop.track`.

    With a session, pass it as ``loop.session(..., tracker=tracker)``. The session logs the metrics of each
    ``session.step``, and steps are sent after their commit. Without one, call :meth:`log` and :meth:`close` on all
    ranks: steps are sent at once, and one that is done again after a restart keeps its first value.

    Args:
        runs: The run in each tracker; none on ranks other than 0.
        parameters: Parameters of the training.

    Attributes:
        runs: The run in each tracker, with its link once it is known, by kind.
        committed: Steps up to this one may be sent.
        checkpoint: URI of the newest committed checkpoint; empty: unknown.
    """

    committed = math.inf
    checkpoint = ""
    _is_closing = False

    def __init__(self, runs: list[TrackedRun], parameters: Mapping[str, Any]) -> None:
        self.runs = {run.kind: run for run in runs}
        self._parameters = {valid_name(name): value for name, value in parameters.items()}
        self._fresh = deque[tuple[int, float, str, Any]]()  # points whose values may be on a device
        self._names: dict[str, int] = {}
        self._points = np.empty((0, 4))  # columns: step, time in seconds since the epoch, index of the name, value
        self._sent = dict.fromkeys(self.runs, 0)  # last step that was sent to each tracker
        self._history = deque([(0.0, 0)])  # times, and the step up to which each tracker had got all steps
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._senders = [threading.Thread(target=self._send, args=(run,), daemon=True, name=run.kind) for run in runs]
        for sender in self._senders:
            sender.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add metrics of a step, without waiting for a tracker or a device.

        Numbers may be tensors or arrays with one element. Other values are left out.
        """
        if self.runs:
            at = time.time()
            self._fresh.extend((step, at, valid_name(name), scalar(value)) for name, value in metrics.items())

    def points(self) -> dict[str, Any]:
        """Return the points that a restart may have to send, as arrays for a checkpoint or a recovery point."""
        if not self.runs:
            return {}
        with self._lock:
            fresh = []
            for _ in range(len(self._fresh)):  # the loop may add points meanwhile
                step, at, name, value = self._fresh.popleft()
                with suppress(Exception):  # no real number
                    number = float(value)
                    fresh.append((step, at, self._names.setdefault(name, len(self._names)), number))
            points = np.concatenate([self._points, np.reshape(fresh, (-1, 4))])
            now = time.time()
            self._history.append((now, min(self._sent.values())))
            while len(self._history) > 1 and self._history[1][0] <= now - _KEEP_SECONDS:
                self._history.popleft()
            self._points = points[points[:, 0] >= self._history[0][1]]
            return {"tracked_names": np.array([*self._names]), "tracked_points": self._points}

    def restore(self, arrays: Mapping[str, Any]) -> None:
        """Continue with the points of a checkpoint or a recovery point of this run, if it has any."""
        if "tracked_points" in arrays:
            with self._lock:
                self._names = {name: index for index, name in enumerate(arrays["tracked_names"].tolist())}
                self._points = arrays["tracked_points"]

    def commit(self, step: int, checkpoint: str) -> None:
        """Let the points up to this step be sent. ``checkpoint``: URI of the checkpoint that contains the step."""
        self.checkpoint = checkpoint
        self.committed = step
        self._wake.set()

    def close(self) -> None:
        """Send the remaining points, as all steps are committed, and mark the runs as finished.

        Wait for at most 30 s for each tracker. If it has not got all steps by then, log a warning with their number.
        """
        self.committed = math.inf
        self._is_closing = True
        self._wake.set()
        for sender in self._senders:
            sender.join(_CLOSE_SECONDS)
            if sender.is_alive():
                unsent = len(self._rows(self._sent[sender.name] + 1, defaultdict(int)))
                logger.warning("%s did not answer for %g s: it lacks %d steps", sender.name, _CLOSE_SECONDS, unsent)

    def _rows(self, first: int, last: defaultdict[str, int]) -> list[Row]:
        """Return the committed steps from ``first`` on, and of each only metrics after their ``last`` step."""
        points = self.points()["tracked_points"]
        names = [*self._names]
        rows: dict[float, Row] = {}
        for step, at, index, value in points[(points[:, 0] >= first) & (points[:, 0] <= self.committed)].tolist():
            if step > last[names[int(index)]]:
                rows.setdefault(step, (int(step), at, {}))[2][names[int(index)]] = value
        return [*rows.values()]

    def _send(self, run: TrackedRun) -> None:
        """Send to a tracker what may be sent, until the end.

        After an error, query the last steps again, since the request may have been carried out.
        """
        backend = None
        pause = _PAUSE_SECONDS
        while True:
            is_closing = self._is_closing
            try:
                self.points()  # reads the values from the device, also during an outage
                backend = backend or run.connect(self._parameters)
                self.runs[run.kind] = replace(run, link=backend.link)
                if rows := self._rows(self._sent[run.kind], backend.last):
                    backend.log(rows, self.checkpoint)
                    for step, _, metrics in rows:
                        backend.last.update(dict.fromkeys(metrics, step))
                        self._sent[run.kind] = step
                if pause > _PAUSE_SECONDS:
                    logger.warning("%s answers again, and has got what it had missed", run.kind)
                    pause = _PAUSE_SECONDS
                if is_closing:
                    backend.finish("FINISHED", self.checkpoint)
                    return
            except Exception as error:  # noqa: BLE001 - whatever the tracker raises
                backend = None
                if pause == _PAUSE_SECONDS:
                    logger.warning("%s does not answer: %s. Training goes on, and sends later", run.kind, error)
                pause = min(2 * pause, _MAX_PAUSE_SECONDS)
            self._wake.wait(pause)
            self._wake.clear()
