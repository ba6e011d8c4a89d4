"""``python -m prefect_elastic_train.supervisor.jobs.submit <request>``: uploads a job's package and submits the job.

Ray's client does that, in a process of its own: its requests have no bound in time, it takes another cluster's address
from the environment, and it needs Ray, which a flow process has no other use for.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

__all__ = ["main"]

_PASSING_STATUS = ("408", "425", "429")


def main(arguments: list[str]) -> int:
    """Submit the job that a file describes.

    Returns:
        0 if the cluster has accepted it, 1 if nobody knows, 2 if it was refused or could not be sent as it is; the
        reason goes to standard output.
    """
    request = json.loads(Path(arguments[0]).read_text())
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):  # Ray's client would go there instead
        os.environ.pop(name, None)
    import requests
    from ray.job_submission import JobSubmissionClient

    try:
        client = JobSubmissionClient(request["address"], verify=request["verify"])
        client.submit_job(
            entrypoint=request["entrypoint"],
            submission_id=request["submission_id"],
            runtime_env=request["runtime_env"],
            metadata=request["metadata"],
            **request["resources"],
        )
    except Exception as error:  # noqa: BLE001 - the supervisor tells it
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
        # Ray's client tells the status of an answer in its text only.
        answered = re.search(r"status code (\d+)", str(error))
        if isinstance(error, requests.RequestException | ConnectionError | TimeoutError):
            return 1
        return 1 if answered and (answered[1].startswith("5") or answered[1] in _PASSING_STATUS) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
