"""Time limits of a cancellation, in seconds. They are here together because each must fit into the one around it.

To cancel a flow run, Prefect's runner sends SIGTERM to the flow process, and SIGKILL 30 s later. Until then the flow
process has these steps, one after the other. Each usually takes less than a second; these are their limits:

======================================================  ==============================  ====
query the flow run's state (was the end wanted?)        ``FLOW_RUN_STATE_SECONDS``         8
the driver exits after SIGINT                           ``STOP_GRACE_SECONDS``             8
SIGKILL to all processes that are left                  ``KILL_SECONDS``                   8
the report's last update, beside the marks in trackers  ``PUBLISHER_CLOSE_SECONDS``        5
sum, below ``RUNNER_GRACE_SECONDS``                                                       29
======================================================  ==============================  ====

The driver has two steps within ``STOP_GRACE_SECONDS``: it waits ``FIT_EXIT_SECONDS`` (4.5) for ``fit()``, and, on a
cluster that others use, ``EXIT_STEP_SECONDS`` (2.5) for its reservation to be released; 7 together.

A training that runs as a Ray job is stopped by the cluster instead: ``JOB_STOP_SECONDS`` (20) take the place of the
driver's exit and SIGKILL, and Ray lets the driver exit within ``STOP_GRACE_SECONDS`` of them; 33 together. With a
dashboard that does not answer, the report's last update may be lost.

After SIGTERM that is not a cancellation, such as before the loss of a machine, a session saves first, which may take
``TERMINATION_GRACE_SECONDS`` (25) more.

If the flow process is killed, its guard stops the driver and kills the rest with the same limits.
"""

RUNNER_GRACE_SECONDS = 30.0
FLOW_RUN_STATE_SECONDS = 8.0
#: Default of the setting ``stop_grace_seconds``.
STOP_GRACE_SECONDS = 8.0
#: Default of the setting ``termination_grace_seconds``.
TERMINATION_GRACE_SECONDS = 25.0
KILL_SECONDS = 8.0
PUBLISHER_CLOSE_SECONDS = 5.0
FIT_EXIT_SECONDS = 4.5
EXIT_STEP_SECONDS = 2.5
JOB_STOP_SECONDS = 20.0
