"""Functions that the controller runs in its workers, with a time limit."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any

import ray


def query_workers(
    workers: Sequence[Any], function: Callable[..., Any], timeout_seconds: float = 5.0, *arguments: Any
) -> dict[int, Any]:
    """Run a function in each worker, and return the results by rank; a rank that failed or was too late is missing."""
    ranks = {worker.execute_async(function, *arguments): rank for rank, worker in enumerate(workers)}
    return {ranks[reference]: result for reference, result in finished_results(ranks, timeout_seconds)}


def finished_results(references: Collection[Any], timeout_seconds: float = 0.0) -> Iterator[tuple[Any, Any]]:
    """Yield each reference whose result is there within a time limit, and the result. Failed ones are left out."""
    ready, _ = ray.wait([*references], num_returns=len(references), timeout=timeout_seconds)
    for reference in ready:
        with suppress(Exception):
            yield reference, ray.get(reference, timeout=1)
