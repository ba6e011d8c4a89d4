from pathlib import Path

import pytest

from tests.support.clusters import ElasticCluster

SLOW_AGENTS = """
import pathlib, time
if any(name in pathlib.Path("/proc/self/cmdline").read_text() for name in ("dashboard/agent.py", "runtime_env/agent")):
    time.sleep(40)
"""


@pytest.mark.full
def test_a_node_whose_agents_boot_slowly_starts_nonetheless(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_AGENTS)
    cluster = ElasticCluster(tmp_path)
    try:
        assert cluster.add(num_cpus=1)
    finally:
        cluster.close()
