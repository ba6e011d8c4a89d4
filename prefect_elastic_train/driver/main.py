"""The process of one attempt, from its spec file to its last word.

The driver does all work on the run directory, so the supervisor works the same whether or not it can see the
storage. It ends with one ``attempt_ended`` event; a driver that ends without one was lost.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from types import FrameType

from prefect_elastic_train.core.events import AttemptEnded
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.ray_output import Details
from prefect_elastic_train.core.spec import read_spec
from prefect_elastic_train.driver.attempt import Attempt
from prefect_elastic_train.driver.endings import end_by_error, end_by_signal
from prefect_elastic_train.driver.interruptions import interruptions, notice_interruptions
from prefect_elastic_train.driver.relay import EventOutput, LineStream

#: How long a driver that was told to end may take before it ends without Ray Train's help.
_STUCK_SECONDS = 4.5


class _Stopped(BaseException):
    """The supervisor asked this driver to end."""


def main(arguments: list[str]) -> int:
    """Run one attempt as the spec file says."""
    output = EventOutput(sys.stdout)
    details = Details()
    for name, write in (("stdout", output.write_text), ("stderr", sys.stderr.write)):
        descriptor = getattr(sys, f"__{name}__").fileno()
        setattr(sys, name, LineStream(partial(details.take, write), descriptor))
    # Whatever a library writes there itself must not end up in the middle of an event.
    os.dup2(2, 1)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, _stop)
    signal.signal(signal.SIGTERM, _stop)
    notice_interruptions()
    driver = _Driver(Path(arguments[0]), output, details)
    threading.Thread(target=driver.end_if_stuck, name="elastic-train-stop", daemon=True).start()
    try:
        ended = driver.attempt.run()
    except (_Stopped, KeyboardInterrupt, SystemExit):
        ended = driver.end_by_signal()
    except Exception as error:  # noqa: BLE001 - the last resort: an unforeseen end is told, not swallowed
        details.keep("".join(traceback.format_exception(error)))
        ended = end_by_error(error, driver.attempt.spec.storage)
    # From here on a second signal must not cut the last word short.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    driver.end(ended)
    return 0


def _stop(signum: int, frame: FrameType | None) -> None:
    raise _Stopped


class _Driver:
    """This process, and its end."""

    def __init__(self, spec_file: Path, output: EventOutput, details: Details) -> None:
        spec = read_spec(spec_file)
        output.is_shared = spec.cluster.is_submitted
        self.attempt = Attempt(spec, output, details)
        self._spec_file = spec_file
        self._output = output
        self._ending = threading.Lock()

    def end_by_signal(self) -> AttemptEnded:
        """How the attempt ended that a signal has cut short."""
        error = self.attempt.taken_over()
        if error is not None:
            return AttemptEnded(outcome=error.outcome, message=str(error))
        return end_by_signal(self.attempt.spec, self._spec_file)

    def end_if_stuck(self) -> None:
        """End a driver that was told to end and cannot.

        While Ray Train's controller waits for a placement group, ``fit()`` does not get out of its handler of SIGINT.
        """
        while not interruptions():
            time.sleep(0.1)
        time.sleep(_STUCK_SECONDS)
        self.end(self.end_by_signal(), stuck=True)

    def end(self, ended: AttemptEnded, stuck: bool = False) -> None:
        """Say the last word and end this process; the first caller does it, and any other waits for that.

        Args:
            ended: How the attempt ended.
            stuck: ``fit()`` does not return.
        """
        if not self._ending.acquire(blocking=False):
            time.sleep(60)
            return
        self.attempt.close(ended)
        self.attempt.leave_cluster(stuck)
        self._output.close()
        # Threads of Ray or of the user's libraries may not keep a finished driver.
        sys.stdout.flush()
        sys.stderr.flush()
        # Ray's dashboard shows a job's exit code.
        os._exit(0 if ended.outcome is Outcome.COMPLETED else 1)
