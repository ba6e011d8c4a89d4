"""A training's run in a tracker, as a value that processes exchange, and the marks of a training that has failed."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
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


def mark_ended(runs: Iterable[TrackedRun], status: str, warn: Callable[[str], object]) -> None:
    """Mark the runs of a training as ``FAILED`` or ``KILLED``; call ``warn`` with a message for each that it cannot."""
    for run in runs:
        if run.kind == "tensorboard" or not run.link:  # TensorBoard has no marks, and a run without a link was not made
            continue
        try:
            run.connect({}).finish(status, "")
        except Exception as error:  # noqa: BLE001 - whatever the tracker raises
            warn(f"The run in {run.kind} could not be marked as {status}: {type(error).__name__}: {error}")
