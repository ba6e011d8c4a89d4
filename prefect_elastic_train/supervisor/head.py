"""``python -m prefect_elastic_train.supervisor.head <arguments>``: ``ray start`` without what a training never uses.

Ray's head brings the server of Ray Client and the process of the dashboard with it, also if no dashboard is wanted.
Each is a Python process that boots before the first worker can, listens on a port, and keeps some 70 MB.

Uses ``ray.scripts.scripts`` and ``ray._private.services``, since no option leaves these two out.
"""

import sys

from ray._private import services
from ray.scripts import scripts

from prefect_elastic_train.supervisor.nodes import change_nodes

if __name__ == "__main__":
    # No address and no process, as Ray's own function returns where the dashboard cannot be started.
    services.start_api_server = lambda *_, **__: (None, None)
    scripts.get_ray_client_dependency_error = lambda: "no client is served"
    change_nodes()
    sys.exit(scripts.main())
