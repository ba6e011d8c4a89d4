"""The digits pipeline in a process of its own, with the arguments of a file: ``python -m … <arguments file>``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from flows.digits import digits
from prefect_elastic_train import ElasticScaling, FailureBudget, RayCluster
from tests.support.flow_script import storage_of


def main() -> None:
    """Run the pipeline and write its summary."""
    arguments = json.loads(Path(sys.argv[1]).read_text())
    summary = digits(
        epochs=arguments["epochs"],
        data_dir=arguments["data_dir"],
        storage=storage_of(arguments["storage"]),
        cluster=RayCluster(**arguments.get("cluster", {})),
        scaling=ElasticScaling(min_workers=1, max_workers=1),
        failures=FailureBudget(driver_restart_delay_seconds=0.5),
    )
    Path(arguments["result_file"]).write_text(json.dumps(summary))


if __name__ == "__main__":
    main()
