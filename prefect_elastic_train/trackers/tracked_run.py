"""A training's run in a tracker, as a value that processes exchange, and the marks of a training that has failed.

As a script: marks the run, which is the first argument as JSON, with the status that is the second.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

#: The metrics of a step: its number, its time in seconds since the epoch, and the values by name.
Row = tuple[int, float, dict[str, float]]


@dataclass(frozen=True)
class TrackedRun:
    """The values by which a process finds a training's run in a tracker. They contain no credentials.

    Attributes:
        kind: ``mlflow``, ``wandb`` or ``tensorboard``.
        ids: ``run_id``, ``run_name`` and other ids and names of the training.
        options: Options of the tracker, as given to ``loop.track``.
        link: URL or folder of the run in the tracker; empty while it is unknown.
    """

    kind: str
    ids: dict[str, str]
    options: dict[str, str]
    link: str = ""

    @property
    def backend(self) -> Any:
        """The class ``Backend`` of the tracker's module.

        Its constructor finds or creates the run and marks it as running. An instance has:

        - ``link``: that of :class:`TrackedRun`.
        - ``last``: the last step that the run has of each metric, a ``defaultdict``.
        - ``log(rows, checkpoint)``: log steps in ascending order, and the URI of the newest checkpoint, if any.
        - ``finish(status, checkpoint)``: mark the run as ``FINISHED``, ``FAILED`` or ``KILLED``.

        Each raises whatever the tracker raises, for example if it does not answer.
        """
        return import_module(f"{__package__}.{self.kind}_backend").Backend

    def connect(self, parameters: Mapping[str, Any]) -> Any:
        """Return the backend of this run, with the parameters of the training for a new run."""
        return self.backend(self.ids, parameters, **self.options)


def mark_ended(run: TrackedRun, status: str, seconds: float, warn: Callable[[str], object]) -> None:
    """Mark a training's run as ``FAILED`` or ``KILLED``; call ``warn`` with a message if it cannot be marked in time.

    A process does it, which is killed after ``seconds``. This process could not exit while W&B waits for its server.
    """
    if run.kind == "tensorboard" or not run.link:  # TensorBoard has no marks, and a run without a link was not made
        return
    command = (sys.executable, "-m", __name__, json.dumps(asdict(run)), status)
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=seconds)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        lines = (error.stderr or b"no answer").decode().splitlines()
        warn(f"The run in {run.kind} could not be marked as {status} within {seconds:g} s. Last output: {lines[-1]}")


if __name__ == "__main__":
    signal.alarm(60)  # seconds, after which this process ends if the flow process, which kills it, was killed
    TrackedRun(**json.loads(sys.argv[1])).connect({}).finish(sys.argv[2], "")
