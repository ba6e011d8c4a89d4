"""Functions that the controller runs in its workers, with a time limit."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import ray


def query_workers(
    workers: Sequence[Any], function: Callable[..., Any], timeout_seconds: float = 5.0, *arguments: Any
) -> dict[int, Any]:
    """Run a function in each worker, and return the results by rank; a rank that failed or was too late is missing."""
    ranks = {worker.execute_async(function, *arguments): rank for rank, worker in enumerate(workers)}
    ready, _ = ray.wait([*ranks], num_returns=len(ranks), timeout=timeout_seconds)
    results = {}
    for reference in ready:
        with suppress(Exception):
            results[ranks[reference]] = ray.get(reference, timeout=1)
    return results
