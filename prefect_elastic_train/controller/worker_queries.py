"""Functions that the controller runs in its workers, with a time limit."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import ray


def ready_references(references: list[Any], timeout_seconds: float) -> set[Any]:
    """Wait until all of Ray's object references are ready or the time is up, and return those that are ready."""
    return set(ray.wait(references, num_returns=len(references), timeout=timeout_seconds)[0]) if references else set()


def query_workers(workers: Sequence[Any], function: Callable[[], Any], timeout_seconds: float) -> dict[int, Any]:
    """Run a function in each worker, and return the results by rank; a rank that failed or was too late is missing."""
    references = [worker.execute_async(function) for worker in workers]
    ready = ready_references(references, timeout_seconds)
    results = {}
    for rank, reference in enumerate(references):
        if reference in ready:
            with suppress(Exception):
                results[rank] = ray.get(reference, timeout=1)
    return results
