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


def refuse(message: str) -> None:
    """Say why the training cannot run here, as the driver's last word."""
    event = {"kind": "attempt_ended", "sequence": 1, "outcome": "invalid", "final": True, "message": message}
    sys.stdout.write(f"{TAG}{json.dumps(event)}\n")
    sys.stdout.flush()


def find_problem(wanted: "dict[str, Any]") -> str:
    """Say what keeps the driver from running here, nothing if nothing does."""
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
    import ray

    if ray.__version__.split(".")[:2] != wanted["ray"].split(".")[:2]:
        return f"the cluster runs Ray {ray.__version__} and the flow Ray {wanted['ray']}; use the same minor version"
    import prefect_elastic_train

    if prefect_elastic_train.__version__ != wanted["package"]:
        where = os.path.dirname(prefect_elastic_train.__file__)
        return (
            f"the cluster imports prefect-elastic-train {prefect_elastic_train.__version__} from {where} and the flow "
            f"uses {wanted['package']}; remove it there, or install the same version"
        )
    return ""


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def main() -> int:
    """Run the driver, or say why it cannot run."""
    folder = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(folder, "wanted.json"), encoding="utf-8") as file:
        wanted = json.load(file)
    problem = find_problem(wanted)
    if problem:
        refuse(problem)
        return 1
    from prefect_elastic_train.driver.main import main as run_driver

    return run_driver([os.path.join(folder, "spec")])


if __name__ == "__main__":
    sys.exit(main())
