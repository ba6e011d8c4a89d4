"""A training with a session that tests disturb: in the end every sample counts once, with undisturbed weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from prefect_elastic_train.runs.run_directory import RunDirectory
from prefect_elastic_train.runs.sample_check import check_samples
from prefect_elastic_train.storage.store import LocalRunStore
from tests.support.processes import FlowProcess, Start, read_ledger
from tests.support.session_loops import jax_loop, problems, ray_data_loop, same_weights, torch_loop

LENGTH, GLOBAL_BATCH, STEPS = 200, 20, 800
TWO = {"min_workers": 2, "max_workers": 2, "resources_per_worker": {"CPU": 0.1}}


class SessionTraining:
    """A training with a session, slow until it is let go.

    ``arguments``: those of its flow process. ``disturbances``: further config of the loop, which does not change the
    weights in the end.
    """

    def __init__(
        self,
        start: Start,
        folder: Path,
        framework: str = "torch",
        scaling: dict[str, Any] | str = TWO,
        fsdp: bool = False,
        save_every: int = 15,
        recovery_points: int | str = "off",
        dies_within: dict[str, int] | None = None,
        shards: int = 0,
        sleep: float = 0.2,
        node_strikes: int = 0,
        disturbances: dict[str, Any] | None = None,
        length: int = LENGTH,
        **more: Any,
    ) -> None:
        self._length = length
        self.ledger, self.weights, self._slow = (folder / name for name in ("ledger.jsonl", "weights.npz", "slow"))
        self._slow.touch()
        self._loop = {"torch": torch_loop, "jax": jax_loop, "none": ray_data_loop}[framework]
        self._config = {"steps": STEPS, "length": length, "global_batch": GLOBAL_BATCH, "save_every": save_every}
        self._has_shards = bool(shards)
        if shards:
            self._config |= {"shards": shards, "dropout": 0.1}
        files = {"ledger": str(self.ledger), "weights": str(self.weights), "slow": str(self._slow), "sleep": sleep}
        disturbed = files | {
            "recovery_points": recovery_points,
            "dies_within": dies_within or {},
            **(disturbances or {}),
        }
        self.arguments = dict[str, Any](
            loop=f"tests.support.session_loops:{self._loop.__name__}",
            framework=framework,
            torch_backend="gloo" if framework == "torch" else None,  # GPUs are pretended ones
            config={**self._config, **disturbed, "fsdp": fsdp},
            scaling=scaling,
            failures={
                **dict.fromkeys(("driver_restarts", "max_attempts_without_progress"), 10),
                "max_failures": -1,
                "node_strikes": node_strikes,
            },
            **more,
        )
        self.flow: FlowProcess = start(**self.arguments)

    def group(self, world: int = 2, dead: Iterable[int] = (), steps: int = 8) -> list[dict[str, Any]]:
        """Kill processes, and wait until another group of so many workers trains; return its newest lines by rank.

        ``steps``: how many it must have taken.
        """
        known = {line["group"] for line in read_ledger(self.ledger)}
        for pid in dead:
            psutil.Process(pid).kill()

        def trains() -> list[dict[str, Any]] | None:
            lines = [one for one in read_ledger(self.ledger) if one["world"] == world and one["group"] not in known]
            newest = {one["rank"]: one for one in lines}
            has_trained = len(newest) == world and len({one["step"] for one in lines}) >= steps
            return [newest[rank] for rank in range(world)] if has_trained else None

        return self.flow.wait_for(trains, 120, f"another group of {world} workers") or []

    def end(self, attempts: int, worker_failures: int, preemptions: int = 0) -> list[int]:
        """Let it go, check how it ended, and return the sizes of its worker groups.

        Each sample counts once, also by the ledger of the run itself, and the weights are those of one worker that
        nobody disturbs: bit for bit if there was never more than one, or with shards. Those of Ray Data's
        loop are not compared.
        """
        self._slow.unlink()
        result = self.flow.completed(300)
        counts = (result["attempts"], result["worker_failures"], result["preemptions"])
        assert counts == (attempts, worker_failures, preemptions)
        assert problems(self.ledger, STEPS, self._length) == []
        check = check_samples(RunDirectory(LocalRunStore(str(self.flow.run))))
        assert (check.steps, check.samples, check.wrong, check.exact) == (STEPS, STEPS * GLOBAL_BATCH, [], True)
        sizes = [change["size"] for change in result["world_sizes"]]
        if self._loop is ray_data_loop:
            return sizes
        undisturbed = self.weights.with_name("undisturbed.npz")
        self._loop({**self._config, "weights": str(undisturbed)})
        is_exact = self._has_shards or max(sizes) == 1
        assert same_weights(self.weights, undisturbed, relative=0.0 if is_exact else 1e-5)
        return sizes
