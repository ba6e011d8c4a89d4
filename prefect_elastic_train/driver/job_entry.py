"""The first code that runs in a job: sees whether this cluster can run the driver, then runs it.

It travels in the job's package as ``elastic_train_job/__main__.py``. It imports nothing but the standard library until
everything that the driver needs is known to be here.
"""

import json
import os
import sys
from importlib.util import find_spec

#: The one of :mod:`prefect_elastic_train.core.events`.
TAG = "@elastic-train-event "


def main() -> None:
    """Run the driver, or say why it cannot run, as its last word."""
    folder = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(folder, "wanted.json"), encoding="utf-8") as file:
        wanted = json.load(file)
    python, problem = f"{sys.version_info[0]}.{sys.version_info[1]}", ""
    missing = [name for name in wanted["modules"] if find_spec(name) is None]
    if python != wanted["python"]:
        problem = (
            f"the cluster runs Python {python} and the flow Python {wanted['python']}: what the flow pickles cannot be "
            "read there; use images with the same minor version"
        )
    elif missing:
        problem = (
            f"the cluster lacks what the driver needs: {', '.join(missing)}; install it in its image, or have it "
            f'installed for the run with runtime_env={{"pip": {json.dumps(missing)}}} of the RayCluster'
        )
    if problem:
        event = {"kind": "attempt_ended", "sequence": 1, "outcome": "invalid", "final": True, "message": problem}
        sys.stdout.write(f"{TAG}{json.dumps(event)}\n")
        sys.exit(1)
    from prefect_elastic_train.driver.__main__ import main as run_driver

    run_driver([os.path.join(folder, "spec")])


if __name__ == "__main__":
    main()
