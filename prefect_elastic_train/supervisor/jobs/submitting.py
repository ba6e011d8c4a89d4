"""Submissions: what is asked of Ray's client, which runs in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect_elastic_train.core.settings import ClusterSettings
from prefect_elastic_train.supervisor.cluster import write_token
from prefect_elastic_train.supervisor.jobs.api import ca_bundle_of, token_of

__all__ = ["run_submission", "with_token", "write_request"]

_TURN_SECONDS = 0.2


def write_request(path: Path, cluster: ClusterSettings, **request: Any) -> None:
    """Write down what is submitted where, for `run_submission`."""
    verify = (ca_bundle_of(cluster) or True) if cluster.verify_tls else False
    path.write_text(json.dumps({"address": cluster.address, "verify": verify, **request}))


def with_token(environment: dict[str, str], cluster: ClusterSettings, folder: Path) -> dict[str, str]:
    """Give the environment of Ray's client, with the token in a file of the private folder."""
    token = token_of(cluster)
    kept = {name: value for name, value in environment.items() if name != "RAY_AUTH_TOKEN"}
    # The client packs into a temporary folder: what it may leave there goes with ours.
    return {**kept, **(write_token(token, folder) if token else {}), "TMPDIR": str(folder)}


def run_submission(
    request: Path, environment: dict[str, str], deadline: float, between: Callable[[], None]
) -> tuple[int, str]:
    """Submit a job.

    Args:
        request: What `write_request` has written.
        environment: See `with_token`.
        deadline: When to give up, by the monotonic clock.
        between: Called several times a second; what it raises ends the client and passes on.

    Returns:
        0 if the cluster has accepted it, 1 if nobody knows, 2 if it cannot be submitted as it is; and what was said.
    """
    with subprocess.Popen(
        [sys.executable, "-m", "prefect_elastic_train.supervisor.jobs.submit", str(request)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            while time.monotonic() < deadline:
                between()
                try:
                    output, _ = process.communicate(timeout=_TURN_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
                return process.returncode, output.decode(errors="replace").strip()[-2000:]
            return 1, "Ray's client did not come to an end"
        finally:
            process.kill()
