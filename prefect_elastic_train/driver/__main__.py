"""``python -m prefect_elastic_train.driver <spec file>``: the process of one attempt, up to its last word.

With ``--spare <framework>`` instead, it waits for the attempt that will need it: :mod:`.spare`.

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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

import psutil

from prefect_elastic_train.core.events import AttemptEnded
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.ray_output import Details
from prefect_elastic_train.core.request import read_spec
from prefect_elastic_train.driver.attempt import Attempt
from prefect_elastic_train.driver.endings import end_by_error, end_by_signal
from prefect_elastic_train.driver.interruptions import interruptions, notice_interruptions
from prefect_elastic_train.driver.relay import EventOutput, LineStream
from prefect_elastic_train.driver.spare import SPARE, wait_for_spec

#: How long a driver that was told to end may take before it ends without Ray Train's help.
_STUCK_SECONDS = 4.5


def main(arguments: list[str]) -> None:
    """Run one attempt as the spec file says, and end this process."""
    spec_file = Path(arguments[0])
    began_at = psutil.Process().create_time()
    if arguments[0] == SPARE:
        spec_file = wait_for_spec(arguments[1])
        began_at = spec_file.stat().st_mtime  # from then on it was needed
    output = EventOutput(sys.stdout)
    details = Details()
    sys.stdout = LineStream(partial(details.take, output.write_text), 1)
    sys.stderr = LineStream(partial(details.take, sys.stderr.write), 2)
    # Whatever a library writes there itself must not end up in the middle of an event.
    os.dup2(2, 1)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    _handle_signals(signal.default_int_handler)
    notice_interruptions()
    spec = read_spec(spec_file)
    attempt = Attempt(spec, output, details, began_at)
    ending = threading.Lock()

    def end(ended: AttemptEnded, stuck: bool) -> None:
        """Say the last word and end this process; the first caller does it, and any other waits for that."""
        if not ending.acquire(blocking=False):
            time.sleep(60)
            return
        attempt.close(ended)
        attempt.leave_cluster(stuck)
        output.close(10.0)
        # Threads of Ray or of the user's libraries may not keep a finished driver.
        sys.stdout.flush()
        sys.stderr.flush()
        # Ray's dashboard shows a job's exit code.
        os._exit(0 if ended.outcome is Outcome.COMPLETED else 1)

    def end_if_stuck() -> None:
        """While Ray Train waits for a placement group, ``fit()`` does not get out of its handler of SIGINT."""
        while not interruptions():
            time.sleep(0.1)
        time.sleep(_STUCK_SECONDS)
        end(attempt.taken_over() or end_by_signal(spec, spec_file), stuck=True)

    threading.Thread(target=end_if_stuck, name="elastic-train-stop", daemon=True).start()
    try:
        try:
            ended = attempt.run()
        except Exception as error:  # noqa: BLE001 - the last resort: an unforeseen end is told, not swallowed
            details.keep("".join(traceback.format_exception(error)))
            ended = attempt.taken_over() or end_by_error(error, spec.storage)
    except (KeyboardInterrupt, SystemExit):  # which may come while an error is judged, too
        _handle_signals(signal.SIG_IGN)  # a second one must not cut the last word short
        ended = attempt.taken_over() or end_by_signal(spec, spec_file)
    _handle_signals(signal.SIG_IGN)
    end(ended, stuck=False)


def _handle_signals(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


if __name__ == "__main__":
    main(sys.argv[1:])
