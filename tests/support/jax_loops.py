"""Train loops of the tests that compute in JAX, over all processes of a worker group."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from tests.support.loops import run_known_here, write_ledger

ROWS, INPUTS = 8, 16
PRECISIONS = ("float64", "float32")


def fitting_loop(config: dict[str, Any]) -> None:
    """Fit a small network in two precisions at once; every rank writes each step and a sum over all into the ledger.

    Config: ``steps``; ``checkpoint_every``; ``ledger`` (file); ``sleep`` (seconds a step, by world size).
    """
    import tempfile

    import jax
    import jax.numpy as jnp
    import numpy as np
    import ray.train
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from prefect_elastic_train.loop import resize_requested

    jax.config.update("jax_enable_x64", True)
    rank, world = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    assert (jax.process_index(), jax.process_count()) == (rank, world), "the ranks are joined, and in order"
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    replicated, by_rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("batch"))

    def on_all(array: Any) -> Any:
        return jax.make_array_from_process_local_data(replicated, array)

    def loss_of(weights: dict[str, Any], inputs: Any, targets: Any) -> Any:
        return ((jnp.tanh(inputs @ weights["inner"]) @ weights["outer"] - targets) ** 2).mean()

    @jax.jit
    def take_step(weights: dict[str, Any], inputs: Any, targets: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(weights, inputs, targets)
        return jax.tree.map(lambda old, change: old - 0.05 * change, weights, gradients), loss

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=PartitionSpec("batch"), out_specs=PartitionSpec())
    def sum_over_ranks(numbers: Any) -> Any:
        return jax.lax.psum(numbers.sum(), "batch")

    step, saved = 0, initial_weights()
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            step, saved = read_weights(folder)
    weights = jax.tree.map(on_all, saved)
    resumed_from = step
    own_rows = np.array_split(np.arange(ROWS), world)[rank]
    while step < config["steps"]:
        random = np.random.default_rng(step)  # of the step alone: the same global batch at any world size
        inputs, targets = random.standard_normal((ROWS, INPUTS)), random.standard_normal((ROWS, 1))
        losses = {}
        for precision in PRECISIONS:
            own = [array[own_rows].astype(precision) for array in (inputs, targets)]
            batch = [jax.make_array_from_process_local_data(by_rows, array) for array in own]
            weights[precision], loss = take_step(weights[precision], *batch)
            losses[precision] = float(loss)
        total = float(sum_over_ranks(jax.make_array_from_process_local_data(by_rows, np.array([rank + 1.0]))))
        assert total == sum(range(1, world + 1)), "every rank sees what all of them gave"
        step += 1
        time.sleep(config["sleep"][str(world)])
        line = {"rank": rank, "world": world, "step": step, "resumed_from": resumed_from, "run": run_known_here()}
        write_ledger(config["ledger"], **line, sum=total, **losses)
        if step % config["checkpoint_every"] == 0 or step == config["steps"] or resize_requested():
            with tempfile.TemporaryDirectory() as folder:
                if rank == 0:
                    write_weights(folder, step, weights)
                ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def initial_weights() -> dict[str, dict[str, Any]]:
    """Draw the weights that every training begins with, in each precision."""
    import numpy as np

    random = np.random.default_rng(12345)
    drawn = {"inner": random.standard_normal((INPUTS, 8)) / 4, "outer": random.standard_normal((8, 1)) / 3}
    return {precision: {name: array.astype(precision) for name, array in drawn.items()} for precision in PRECISIONS}


def read_weights(folder: str | Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """Read a checkpoint of the loop: how many steps, and the weights in each precision."""
    import numpy as np

    weights: dict[str, dict[str, Any]] = {precision: {} for precision in PRECISIONS}
    with np.load(os.path.join(folder, "weights.npz")) as file:
        for name in file.files:
            precision, _, part = name.partition("/")
            weights[precision][part] = file[name]
    return json.loads(Path(folder, "step.json").read_text()), weights


def write_weights(folder: str | Path, step: int, weights: dict[str, dict[str, Any]]) -> None:
    """Write a checkpoint of the loop."""
    import numpy as np

    arrays = {f"{precision}/{name}": np.asarray(a) for precision in weights for name, a in weights[precision].items()}
    np.savez(os.path.join(folder, "weights.npz"), **arrays)
    Path(folder, "step.json").write_text(json.dumps(step))
