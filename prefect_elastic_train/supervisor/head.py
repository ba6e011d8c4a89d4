"""``python -m prefect_elastic_train.supervisor.head <arguments>``: ``ray start`` without what a training never uses.

Ray's head brings the server of Ray Client and the process of the dashboard with it, also if no dashboard is wanted.
Each is a Python process that boots before the first worker can, listens on a port, and keeps some 70 MB.

Uses ``ray.scripts.scripts`` and ``ray._private.services``, since no option leaves these two out.
"""

import inspect
import os
import sys

from ray._private import services
from ray.scripts import scripts

from prefect_elastic_train.core.request import FORK_SERVER_VARIABLE
from prefect_elastic_train.supervisor import forked_worker

_start_raylet = services.start_raylet


def _start_raylet_that_forks(*arguments, **more):  # type: ignore[no-untyped-def]
    """Start Ray's node with workers that the fork server forks."""
    given = inspect.signature(_start_raylet).bind(*arguments, **more)
    os.environ[forked_worker.WORKER_VARIABLE] = given.arguments["worker_path"]
    given.arguments["worker_path"] = forked_worker.__file__
    return _start_raylet(*given.args, **given.kwargs)


if __name__ == "__main__":
    # No address and no process, as Ray's own function returns where the dashboard cannot be started.
    services.start_api_server = lambda *_, **__: (None, None)
    scripts.get_ray_client_dependency_error = lambda: "no client is served"
    if FORK_SERVER_VARIABLE in os.environ:
        services.start_raylet = _start_raylet_that_forks
    sys.exit(scripts.main())
