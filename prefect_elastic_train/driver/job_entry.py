"""The first code that runs in a job: sees whether this cluster can run the driver, then runs it.

It travels in the job's package as ``elastic_train_job/__main__.py``. It imports nothing but the standard library until
everything that the driver needs is known to be here.
"""

import importlib.util
import json
import os
import sys
from typing import Any

#: The one of :mod:`prefect_elastic_train.core.events`.
TAG = "@elastic-train-event "


def find_problem(wanted: "dict[str, Any]") -> str:
    """Return what keeps the driver from running here, empty if nothing does."""
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if python != wanted["python"]:
        return (
            f"the cluster runs Python {python} and the flow Python {wanted['python']}: what the flow pickles cannot be "
            "read there; use images with the same minor version"
        )
    missing = [name for name in wanted["modules"] if not _is_installed(name)]
    if missing:
        return (
            f"the cluster lacks what the driver needs: {', '.join(missing)}; install it in its image, or have it "
            f'installed for the run with runtime_env={{"pip": {json.dumps(missing)}}} of the RayCluster'
        )
    return ""


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def main() -> int:
    """Run the driver, or say why it cannot run, as its last word."""
    folder = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(folder, "wanted.json"), encoding="utf-8") as file:
        problem = find_problem(json.load(file))
    if problem:
        event = {"kind": "attempt_ended", "sequence": 1, "outcome": "invalid", "final": True, "message": problem}
        sys.stdout.write(f"{TAG}{json.dumps(event)}\n")
        return 1
    from prefect_elastic_train.driver.__main__ import main as run_driver

    run_driver([os.path.join(folder, "spec")])
    return 0


if __name__ == "__main__":
    sys.exit(main())
