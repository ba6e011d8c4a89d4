"""``python -m prefect_elastic_train.supervisor.head <arguments>``: ``ray start`` without what a training never uses.

Ray's head brings the server of Ray Client and the process of the dashboard with it, also if no dashboard is wanted.
Each is a Python process that boots before the first worker can, listens on a port, and keeps some 70 MB.

Uses ``ray.scripts.scripts`` and ``ray._private.services``, since no option leaves these two out.
"""

from __future__ import annotations

import sys
from typing import Any

from ray._private import services
from ray.scripts import scripts


def _no_dashboard(*_: Any, **__: Any) -> tuple[None, None]:
    """Return no address and no process, as Ray's own function does where the dashboard cannot be started."""
    return None, None


if __name__ == "__main__":
    services.start_api_server = _no_dashboard
    scripts.get_ray_client_dependency_error = lambda: "no client is served"
    sys.exit(scripts.main())
