"""``python -m prefect_elastic_train.driver <spec file>``: the process of one attempt.

``--prestarted <framework>`` in place of the spec file starts a process that waits for an attempt: :mod:`.prestarted`.

The driver does all work on the run directory, so the supervisor does not need access to the storage. The last event of
a driver is ``attempt_ended``. A driver that exits without it was lost.
"""

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

from prefect_elastic_train.core.events import AttemptEnded
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.ray_output import Details
from prefect_elastic_train.core.request import read_spec
from prefect_elastic_train.core.threads import start_thread
from prefect_elastic_train.core.time_limits import FIT_EXIT_SECONDS

from .attempt import Attempt
from .endings import final_event_of_error, final_event_of_signal
from .event_relay import EventOutput, LineStream
from .prestarted import PRESTARTED, wait_for_spec
from .termination_signals import TERMINATION_SIGNALS, count_signals, watch_signals


def main(arguments: list[str]) -> None:
    """Run a driver: the attempt of the spec file in the arguments. Exit the process at the end.

    With ``--prestarted <framework>`` as arguments, wait for the path of the spec file first.
    """
    spec_file = wait_for_spec(arguments[1]) if arguments[0] == PRESTARTED else Path(arguments[0])
    output = EventOutput(sys.stdout)
    details = Details()
    sys.stdout = LineStream(partial(details.write, output.write_text), 1)
    sys.stderr = LineStream(partial(details.write, sys.stderr.write), 2)
    # Libraries may write to descriptor 1 themselves, which would break an event in two.
    os.dup2(2, 1)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    _handle_signals(signal.default_int_handler)
    watch_signals()
    spec = read_spec(spec_file)
    attempt = Attempt(spec, output, details, started_at=spec_file.stat().st_mtime)
    is_ending = threading.Lock()

    def end(ended: AttemptEnded, stuck: bool) -> None:
        """Record and publish the end of the attempt, and exit.

        If called in two threads, the first call does it; the second one exits if that takes a minute.
        """
        if is_ending.acquire(timeout=60.0):
            attempt.close(ended)
            attempt.leave_cluster(stuck)
            output.close(10.0)
        # os._exit, because threads of Ray or of the user's libraries may keep a process alive. Ray's dashboard shows
        # the exit code of a job.
        os._exit(0 if ended.outcome is Outcome.COMPLETED else 1)

    def end_if_stuck() -> None:
        """Wait for a signal, and end the attempt if ``fit()`` does not react to it within `FIT_EXIT_SECONDS`.

        ``fit()`` does not react while Ray Train waits for a placement group.
        """
        while not count_signals(signal.SIGINT) and (attempt.saves_first or not count_signals()):
            time.sleep(0.1)
        time.sleep(FIT_EXIT_SECONDS)
        end(final_event_of_signal(spec, spec_file), stuck=True)

    start_thread(end_if_stuck)
    try:
        try:
            ended = attempt.run()
        except Exception as error:  # noqa: BLE001 - every error becomes a final event
            details.add("".join(traceback.format_exception(error)))
            ended = final_event_of_error(error, spec.storage)
    except (KeyboardInterrupt, SystemExit):  # may also come while an error is classified
        _handle_signals(signal.SIG_IGN)  # a second signal must not prevent the final event
        ended = final_event_of_signal(spec, spec_file)
    _handle_signals(signal.SIG_IGN)
    end(ended, stuck=False)


def _handle_signals(handler: Callable[..., None] | signal.Handlers) -> None:
    for number in TERMINATION_SIGNALS:
        signal.signal(number, handler)


if __name__ == "__main__":
    main(sys.argv[1:])
