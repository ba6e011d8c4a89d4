"""``python -m prefect_elastic_train.supervisor.cluster_head <arguments>``: ``ray start`` without two unused processes.

Ray's head starts the server of Ray Client, and the process of the dashboard even if no dashboard is requested. Each is
a Python process that starts before the first worker, listens on a port, and uses some 70 MB.

Uses ``ray.scripts.scripts`` and ``ray._private.services``, since no option leaves these two out.
"""

import sys

from ray._private import services
from ray.scripts import scripts

from .raylet_patches import patch_raylet_start

if __name__ == "__main__":
    # No address and no process: Ray's own function returns this if the dashboard cannot be started.
    services.start_api_server = lambda *_, **__: (None, None)
    scripts.get_ray_client_dependency_error = lambda: "Ray Client is not served"
    patch_raylet_start()
    sys.exit(scripts.main())
