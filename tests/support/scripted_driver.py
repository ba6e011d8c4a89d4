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
        return [line for line in _journal(self.path) if "run_name" in line]

    def trained(self, driver: int = -1) -> int:
        """The number of steps that a driver has taken."""
        drivers = self.drivers()
        pid = drivers[driver]["pid"] if drivers else 0
        return sum(line.get("did") == "train" for line in _journal(self.path) if line["pid"] == pid)

    def did(self, what: str) -> list[dict[str, Any]]:
        """When drivers did something: ``train``, or a signal by its name, with what it was sent for."""
        return [line for line in _journal(self.path) if line.get("did") == what]


def _journal(script: Path) -> list[dict[str, Any]]:
    path = script.with_suffix(".journal")
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


class _Driver:
    def __init__(self, script: Path, spec_file: Path) -> None:
        self._script, self._spec_file, spec = script, spec_file, read_spec(spec_file)
        self._attempt = 1 + sum("run_name" in line for line in _journal(script))
        self._sequence = self._steps = 0
        self._run_name = spec.request.run_name
        self._note(run_name=self._run_name, flow_run_id=spec.request.owner.flow_run_id, previous_end=spec.previous_end)
        signal.signal(signal.SIGINT, self._interrupted)

    def run(self) -> None:
        attempts = json.loads(self._script.read_text())
        self._say(ev.AttemptStarted(run_name=self._run_name, run_uri=f"/{self._run_name}"))
        for step in attempts[min(self._attempt, len(attempts)) - 1]:
            self._do(step)

    def _do(self, step: Any) -> None:
        if step == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif step == "hang":
            time.sleep(3600)
        elif step == "deaf":
            signal.signal(signal.SIGINT, lambda *_: self._note(did="SIGINT"))
        elif step == "child":
            code = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; time.sleep(600)"
            subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        elif "kind" in step:
            self._tell(step)
        elif "exit" in step:
            sys.exit(step["exit"])
        elif "until" in step:
            while not Path(step["until"]).exists():
                time.sleep(0.05)
        else:
            for _ in range(step["train"]):
                self._steps += 1
                self._note(did="train")
                made = {"checkpoint": f"checkpoint_{self._steps}", "world_size": 1, "size_bytes": 1}
                self._say(ev.CheckpointCommitted(index=self._steps, metrics={"step": self._steps}, **made))
                time.sleep(0.05)

    def _interrupted(self, *_: object) -> None:
        stop = self._spec_file.with_name(STOP_FILE)
        outcome = Outcome(stop.read_text()) if stop.exists() else Outcome.DRIVER_LOST
        self._note(did="SIGINT", sent_for=outcome.value)
        self._say(ended(outcome, "was told to end"))
        os._exit(0)

    def _say(self, event: ev.Event) -> None:
        self._tell(json.loads(ev.encode_event(event)))

    def _tell(self, event: dict[str, Any]) -> None:
        self._sequence += 1
        event = {**event, "sequence": self._sequence, "attempt": self._attempt, "at": time.time()}
        if event["kind"] == "attempt_ended" and event["outcome"] == "completed":
            found = {"attempts": self._attempt, "metrics": {"step": self._steps}}
            result = RunResult(run_name=self._run_name, run_uri=f"/{self._run_name}", **found)
            event["result"] = result.model_dump(mode="json")
        print(f"{ev.EVENT_TAG}{json.dumps(event)}", flush=True)

    def _note(self, **what: Any) -> None:
        with self._script.with_suffix(".journal").open("a") as file:
            file.write(json.dumps({"pid": os.getpid(), "at": time.time(), **what}) + "\n")


if __name__ == "__main__":
    _Driver(Path(sys.argv[1]), Path(sys.argv[2])).run()
