"""A training's run in TensorBoard: a folder with the event files of its processes."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from .tracked_run import Row


class Backend:
    """A run in TensorBoard, which has no parameters, marks or references. See :attr:`TrackedRun.backend`."""

    def __init__(self, ids: Mapping[str, str], parameters: Mapping[str, Any], log_dir: str) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.link = f"{log_dir}/{ids['run_name']}-{ids['run_id'][:8]}"
        self._writer = EventFileWriter(self.link)
        events = EventAccumulator(self.link, {"scalars": 1}).Reload()  # it keeps the last one of each metric
        self.last = defaultdict(int, {name: events.Scalars(name)[-1].step for name in events.Tags()["scalars"]})

    def log(self, rows: Sequence[Row], checkpoint: str) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for step, at, metrics in rows:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
            self._writer.add_event(Event(wall_time=at, step=step, summary=Summary(value=values)))
        self._writer.flush()

    def finish(self, status: str, checkpoint: str) -> None:
        self._writer.close()
