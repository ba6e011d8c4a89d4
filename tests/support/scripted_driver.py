"""A driver that does what a script says: all that the supervisor sees of a training, without Ray.

It takes the driver's place in :attr:`TrainingProcesses.driver_command`, gets the spec of the attempt as drivers do,
writes the events of :mod:`prefect_elastic_train.core.events` to its standard output, and exits on SIGINT. As a script:
``python -m tests.support.scripted_driver <script> <spec>``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.request import STOP_FILE, read_spec
from prefect_elastic_train.core.result import RunResult
from tests.support.processes import read_ledger

#: An event is said; ``kill``, ``hang`` (without a word), ``deaf`` (to SIGINT from now on), ``child`` (starts a process
#: that heeds no signal that can be ignored); ``{"exit": code}``, ``{"until": file}``,
#: ``{"train": steps}`` (20 a second, each with a checkpoint).
Step = ev.Event | str | dict[str, Any]

MODULE = "tests.support.scripted_driver"
COMPLETED: Step = ev.AttemptEnded(outcome=Outcome.COMPLETED)


def ended(outcome: Outcome, message: str = "as the script says", **more: Any) -> ev.Event:
    """The final event of an attempt that does not complete."""
    return ev.AttemptEnded(outcome=outcome, message=message, **more)


class Script:
    """What the drivers of one training do.

    Args:
        folder: Keeps the script, and what its drivers did.
        attempts: What each driver does, one after the other; those after the last do the same as the last.
    """

    def __init__(self, folder: Path, *attempts: list[Step]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "script.json"
        self.path.write_text(json.dumps(attempts, default=lambda event: event.model_dump(mode="json")))

    @property
    def command(self) -> tuple[str, ...]:
        """What starts a driver."""
        return (sys.executable, "-m", MODULE, str(self.path))

    def drivers(self) -> list[dict[str, Any]]:
        """What each driver was told, with its ``pid`` and when it began (``at``, seconds since the epoch)."""
        return self.did("start")

    def trained(self) -> int:
        """The number of steps that the newest driver has taken."""
        drivers = self.drivers()
        return len([line for line in self.did("train") if line["pid"] == drivers[-1]["pid"]])

    def did(self, what: str) -> list[dict[str, Any]]:
        """When drivers did something: ``start``, ``train``, or a signal by its name, with what it was sent for."""
        return _did(self.path, what)


def _did(script: Path, what: str) -> list[dict[str, Any]]:
    return [line for line in read_ledger(script.with_suffix(".journal")) if line["did"] == what]


class _Driver:
    def __init__(self, script: Path, spec_file: Path) -> None:
        self._script = script
        self._spec_file = spec_file
        spec = read_spec(spec_file)
        self._attempt = 1 + len(_did(script, "start"))
        self._sequence = 0
        self._steps = 0
        self._run = {"run_name": spec.request.run_name, "run_uri": f"/{spec.request.run_name}"}
        owner = spec.request.owner.flow_run_id
        self._note("start", run_name=spec.request.run_name, flow_run_id=owner, previous_end=spec.previous_end)
        signal.signal(signal.SIGINT, self._interrupted)

    def run(self) -> None:
        attempts = json.loads(self._script.read_text())
        self._say(ev.AttemptStarted(**self._run))
        for step in attempts[min(self._attempt, len(attempts)) - 1]:
            self._do(step)

    def _do(self, step: Any) -> None:
        match step:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(3600)
            case "deaf":
                signal.signal(signal.SIGINT, lambda *_: self._note("SIGINT"))
            case "child":
                code = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; time.sleep(600)"
                subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
            case {"exit": code}:
                sys.exit(code)
            case {"until": file}:
                while not Path(file).exists():
                    time.sleep(0.05)
            case {"train": steps}:
                for _ in range(steps):
                    self._train()
            case _:
                self._say(ev.KINDS[step["kind"]].model_validate(step))

    def _train(self) -> None:
        self._steps += 1
        self._note("train")
        metrics = {"step": self._steps}
        name = f"checkpoint_{self._steps}"
        self._say(
            ev.CheckpointCommitted(index=self._steps, metrics=metrics, checkpoint=name, world_size=1, size_bytes=1)
        )
        time.sleep(0.05)

    def _interrupted(self, *_: object) -> None:
        stop = self._spec_file.with_name(STOP_FILE)
        outcome = Outcome(stop.read_text()) if stop.exists() else Outcome.DRIVER_LOST
        self._note("SIGINT", sent_for=outcome.value)
        self._say(ended(outcome, "was told to end"))
        os._exit(0)

    def _say(self, event: ev.Event) -> None:
        self._sequence += 1
        told: dict[str, Any] = {"sequence": self._sequence, "attempt": self._attempt, "at": time.time()}
        if isinstance(event, ev.AttemptEnded) and event.outcome is Outcome.COMPLETED:
            result = RunResult(**self._run, attempts=self._attempt, metrics={"step": self._steps})
            told["result"] = result.model_dump(mode="json")
        print(f"{ev.EVENT_TAG}{ev.encode_event(event.model_copy(update=told))}", flush=True)

    def _note(self, did: str, **more: Any) -> None:
        with self._script.with_suffix(".journal").open("a") as file:
            file.write(json.dumps({"did": did, "pid": os.getpid(), "at": time.time(), **more}) + "\n")


if __name__ == "__main__":
    _Driver(Path(sys.argv[1]), Path(sys.argv[2])).run()
