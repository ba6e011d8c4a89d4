"""Kills drivers whose actors ask for placement groups: ``python -m tests.support.orphans <address> <name>``.

Prints how many are removed of those that outlive a driver with that name in its command line, and how many are left.
"""

from __future__ import annotations

import subprocess
import sys
import time

import ray
from ray.util.placement_group import placement_group_table

from prefect_elastic_train.controller.nodes import remove_orphaned_placement_groups
from tests.support.processes import wait_for

TRIES = 10
#: For what Ray removes itself.
SETTLING_SECONDS = 3.0
DRIVER = """
import sys, time, ray
from ray.util.placement_group import placement_group

class Controller:
    async def run(self):
        while True:
            placement_group([{"CPU": 0.001}])
            time.sleep(0.01)

ray.init(address=sys.argv[1], log_to_driver=False)
controller = ray.remote(num_cpus=0)(Controller).remote()
running = controller.run.remote()
time.sleep(3600)
"""


def kept() -> int:
    """How many placement groups Ray keeps; a node may, rarely, hold what a removed one had (Ray 2.60)."""
    return sum(group["state"] != "REMOVED" for group in placement_group_table().values())


def is_over() -> bool:
    """Whether no actor lives, and no driver but this one."""
    state = ray._private.state
    has_actors = any(actor["State"] != "DEAD" for actor in state.actors().values())
    return not has_actors and sum(not job["IsDead"] for job in state.jobs()) == 1


def main(address: str, name: str) -> None:
    """Kill drivers until one leaves something behind."""
    ray.init(address=address, log_to_driver=False)
    for _ in range(TRIES):
        driver = subprocess.Popen([sys.executable, "-c", DRIVER, address, name])
        try:
            wait_for(lambda: kept() > 5, 60, "some placement groups")
        finally:
            driver.kill()
            driver.wait(10)
        wait_for(is_over, 20, "the end of the driver and its actor")
        time.sleep(SETTLING_SECONDS)
        if kept():
            removed = remove_orphaned_placement_groups()
            time.sleep(SETTLING_SECONDS)
            print(removed, kept())
            return
    print("none is left: Ray removes them now, so that nobody else need do it")


if __name__ == "__main__":
    main(*sys.argv[1:])
