"""Handwritten digits in JAX: prepare the data, train data-parallel over several processes, evaluate the checkpoint.

The data, their preparation and the report are those of `flows.digits`; the network, its training and its checkpoint
are plain JAX and numpy. `python -m flows.digits_jax` runs it here and now, `python -m flows.serve` as a deployment.
Importing this module imports neither jax nor ray: the heavy imports are in the functions that need them.
"""

import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from pydantic import Field

from flows.digits import (
    DEFAULT_CLUSTER,
    DEFAULT_DATA_DIRECTORY,
    DEFAULT_FAILURES,
    DEFAULT_SCALING,
    DEFAULT_STORAGE,
    DigitsSummary,
    Evaluation,
    Storage,
    confusion_report,
    prepare_digits,
    print_outcome,
)
from prefect_elastic_train import (
    CheckpointPolicy,
    ElasticScaling,
    FailureBudget,
    RayCluster,
    checkpoint_directory,
    elastic_train,
)

if TYPE_CHECKING:
    import numpy as np

LAYERS = (64, 256, 128, 10)  # pixels, two hidden layers, digits; about 51,000 weights
MOMENTUM = 0.9
WEIGHTS_FILE = "weights.npz"  # parameters and velocities
PROGRESS_FILE = "progress.json"  # steps taken, and the sums of the epoch that they are in

Arrays = dict[str, Any]  # name to array, of numpy or of JAX


# ---------------------------------------------------------------------------------------------- data


def read_arrays(path: str) -> "tuple[np.ndarray, np.ndarray]":
    """Read one Parquet file that `prepare_digits` wrote.

    Args:
        path: The Parquet file.

    Returns:
        Images, float32 of shape (n, 64), and labels, int32 of shape (n,).
    """
    import pandas as pd

    table = pd.read_parquet(path)
    labels = table.pop("label").to_numpy("int32")
    return table.to_numpy("float32"), labels


def shift_pixels(images: "np.ndarray", shifts: "np.ndarray") -> "np.ndarray":
    """Move each image by up to one pixel in both directions; what comes into view is background.

    Args:
        images: Shape (n, 64).
        shifts: Integers from 0 to 2 of shape (n, 2), down and across; 1 leaves the image where it is.

    Returns:
        The shifted images, of the same shape.
    """
    import numpy as np

    padded = np.pad(images.reshape(-1, 8, 8), ((0, 0), (1, 1), (1, 1)), constant_values=images.min())
    span = np.arange(8)
    rows, columns = shifts[:, 0, None] + span, shifts[:, 1, None] + span
    shifted: np.ndarray = padded[np.arange(len(images))[:, None, None], rows[:, :, None], columns[:, None, :]]
    return shifted.reshape(images.shape)


# ------------------------------------------------------------------------------------------ training


def initial_parameters(seed: int) -> Arrays:
    """Draw the weights of a new network, as numpy arrays: the same on every process."""
    import numpy as np

    random = np.random.default_rng(seed)
    parameters: Arrays = {}
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(LAYERS)):
        scale = (2 / inputs) ** 0.5  # He et al. 2015, for layers that are followed by a ReLU
        parameters[f"weights_{layer}"] = (scale * random.standard_normal((inputs, outputs))).astype("float32")
        parameters[f"biases_{layer}"] = np.zeros(outputs, "float32")
    return parameters


def logits_of(parameters: Arrays, images: Any) -> Any:
    """Apply the network.

    Args:
        parameters: Arrays of numpy or of JAX; the result is of the same kind.
        images: Shape (n, 64).

    Returns:
        Unnormalised log-probabilities of shape (n, 10).
    """
    values = images
    last = len(LAYERS) - 2
    for layer in range(last + 1):
        values = values @ parameters[f"weights_{layer}"] + parameters[f"biases_{layer}"]
        if layer < last:
            values = values * (values > 0)
    return values


def train_loop(config: dict[str, Any]) -> None:
    """Train the network data-parallel over all devices of all workers (a Ray Train loop).

    Elastic: order and shifts of an epoch depend on (seed, epoch) and nothing else, and each step takes the same
    global batch whatever the number of workers. Each process computes its rows of it, and XLA sums the gradients
    over all of them. The number of workers changes only how sums are rounded.

    Resumable: a checkpoint holds the whole state, also in the middle of an epoch, and knows nothing of the number of
    processes that wrote it. When the workers are about to become more, or a node is drained, the loop saves at once.

    Args:
        config: `train_path` (Parquet file), `epochs`, `seed`, `batch_size` (images over all workers) and
            `learning_rate` (of the first step; it falls to 0 along a line).
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    import ray.train
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from prefect_elastic_train.loop import resize_requested

    mesh = Mesh(np.array(jax.devices()), ("batch",))
    replicated, by_rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("batch"))

    def loss_of(parameters: Arrays, images: Any, labels: Any, counts: Any) -> Any:
        logits = logits_of(parameters, images)
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]
        correct = (logits.argmax(1) == labels) * counts
        sums = jnp.stack([(losses * counts).sum(), correct.sum()])  # over the rows of all processes
        return sums[0] / counts.sum(), sums

    def take_step(state: Arrays, rate: Any, images: Any, labels: Any, counts: Any) -> Arrays:
        gradients, sums = jax.grad(loss_of, has_aux=True)(state["parameters"], images, labels, counts)
        velocity = jax.tree.map(lambda old, new: MOMENTUM * old + new, state["velocity"], gradients)
        parameters = jax.tree.map(lambda old, change: old - rate * change, state["parameters"], velocity)
        return {"parameters": parameters, "velocity": velocity, "sums": state["sums"] + sums}

    compiled_step = jax.jit(take_step, out_shardings=replicated, donate_argnums=0)

    images, labels = read_arrays(config["train_path"])
    # A sharded array has as many rows for each device; rows beyond the batch count for nothing.
    rows = -(-config["batch_size"] // len(jax.devices())) * len(jax.devices())
    own_rows = np.array_split(np.arange(rows), jax.process_count())[jax.process_index()]
    steps_per_epoch = -(-len(images) // config["batch_size"])
    steps = config["epochs"] * steps_per_epoch

    parameters = initial_parameters(config["seed"])
    saved: Arrays = {"parameters": parameters, "velocity": {name: 0 * array for name, array in parameters.items()}}
    progress: dict[str, Any] = {"step": 0, "sums": [0.0, 0.0]}
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as directory:
            with np.load(Path(directory) / WEIGHTS_FILE) as file:
                saved = {part: {name: file[f"{part}/{name}"] for name in parameters} for part in saved}
            progress = json.loads((Path(directory) / PROGRESS_FILE).read_text())
    saved["sums"] = np.array(progress["sums"], "float32")
    state = jax.tree.map(lambda array: jax.make_array_from_process_local_data(replicated, array), saved)

    epoch_of_order = -1
    for step in range(progress["step"], steps):
        epoch, batch_of_epoch = divmod(step, steps_per_epoch)
        if epoch != epoch_of_order:
            random = np.random.default_rng((config["seed"], epoch))
            order = random.permutation(len(images))
            epoch_images = shift_pixels(images, random.integers(0, 3, size=(len(images), 2)))
            epoch_of_order = epoch
        batch = order[batch_of_epoch * config["batch_size"] :][: config["batch_size"]]
        part = np.append(batch, np.zeros(rows - len(batch), int))[own_rows]
        local = (epoch_images[part], labels[part], (own_rows < len(batch)).astype("float32"))
        shards = [jax.make_array_from_process_local_data(by_rows, array) for array in local]
        rate = np.float32(config["learning_rate"] * (1 - step / steps))
        state = compiled_step(state, rate, *shards)

        epoch_ends = batch_of_epoch + 1 == steps_per_epoch
        if epoch_ends or resize_requested():
            sums = np.asarray(state["sums"], "float64")
            seen = len(images) if epoch_ends else (batch_of_epoch + 1) * config["batch_size"]
            loss, accuracy = (sums / seen).tolist()
            metrics = {"epoch": epoch + epoch_ends, "epochs": config["epochs"], "step": step + 1}
            metrics |= {"loss": loss, "train_accuracy": accuracy}
            if epoch_ends:
                state["sums"] = 0 * state["sums"]
            with tempfile.TemporaryDirectory() as directory:
                if jax.process_index() == 0:
                    save(Path(directory), step + 1, state)
                    checkpoint = ray.train.Checkpoint.from_directory(directory)
                else:
                    checkpoint = None
                ray.train.report(metrics, checkpoint=checkpoint)


def save(directory: Path, step: int, state: Arrays) -> None:
    """Write a checkpoint.

    Args:
        directory: Where to; it must exist.
        step: Steps taken so far.
        state: What the training holds, the same on all processes.
    """
    import numpy as np

    parts = {f"{part}/{name}": array for part in ("parameters", "velocity") for name, array in state[part].items()}
    np.savez(directory / WEIGHTS_FILE, **{name: np.asarray(array) for name, array in parts.items()})
    progress = {"step": step, "sums": np.asarray(state["sums"]).tolist()}
    (directory / PROGRESS_FILE).write_text(json.dumps(progress))


# ---------------------------------------------------------------------------------------- evaluation


@task(name="evaluate digits in jax", cache_policy=NO_CACHE)
def evaluate_digits_jax(checkpoint_uri: str, test_path: str, epoch: int, storage: Storage | None = None) -> Evaluation:
    """Let a checkpoint read the held-out images, and publish its confusion matrix as an artifact.

    Needs numpy only: a checkpoint of plain arrays can be read anywhere.

    Args:
        checkpoint_uri: Directory of the checkpoint, a path or a URI.
        test_path: Parquet file of the held-out images.
        epoch: Epoch after which the checkpoint was written, from 1.
        storage: The storage that the checkpoint is in; by default the URI with the ambient credentials.

    Returns:
        The accuracy and the confusion matrix.
    """
    import numpy as np

    with checkpoint_directory(checkpoint_uri, storage) as directory, np.load(directory / WEIGHTS_FILE) as file:
        prefix = "parameters/"
        parameters = {name.removeprefix(prefix): file[name] for name in file.files if name.startswith(prefix)}
    images, labels = read_arrays(test_path)
    confusion = np.zeros((10, 10), "int64")
    np.add.at(confusion, (labels, logits_of(parameters, images).argmax(1)), 1)

    accuracy = float(confusion.trace() / len(labels))
    evaluation = Evaluation(epoch=epoch, accuracy=accuracy, confusion=confusion.tolist())
    create_markdown_artifact(
        key="digits-jax-confusion-matrix",
        markdown=confusion_report(evaluation, checkpoint_uri),
        description=f"{evaluation.accuracy:.1%} of {len(labels)} held-out images read correctly",
    )
    get_run_logger().info("test accuracy %.4f after epoch %d", evaluation.accuracy, evaluation.epoch)
    return evaluation


# ---------------------------------------------------------------------------------------------- flow


@flow(name="digits-jax")
def digits_jax(
    epochs: Annotated[int, Field(ge=1, le=1000)] = 30,
    seed: Annotated[int, Field(ge=0)] = 0,
    data_dir: str = DEFAULT_DATA_DIRECTORY,
    storage: Storage = DEFAULT_STORAGE,
    scaling: ElasticScaling = DEFAULT_SCALING,
    failures: FailureBudget = DEFAULT_FAILURES,
    cluster: RayCluster = DEFAULT_CLUSTER,
) -> dict[str, Any]:
    """Prepare handwritten digits, train a small network on them elastically in JAX, and evaluate it.

    Args:
        epochs: Passes over the training images; 30 give a test accuracy of about 0.98.
        seed: Seed of the initial weights, the order of the images and their shifts.
        data_dir: Directory for the prepared data; on a cluster, one that all nodes mount.
        storage: Where the run and its checkpoints are kept.
        scaling: How many workers train, and on what.
        failures: How many failures the training may survive.
        cluster: Where the training runs; by default a local cluster.

    Returns:
        The fields of `DigitsSummary`, JSON-safe.
    """
    data = prepare_digits(data_dir)
    result = elastic_train(
        train_loop,
        train_loop_config={
            "train_path": data.train_path,
            "epochs": epochs,
            "seed": seed,
            "batch_size": 64,
            "learning_rate": 0.1,
        },
        framework="jax",
        scaling=scaling,
        failures=failures,
        checkpoints=CheckpointPolicy(keep=3),
        storage=storage,
        cluster=cluster,
    )
    evaluation = evaluate_digits_jax(result.checkpoint_uri, data.test_path, result.metrics["epoch"], storage)
    summary = DigitsSummary(
        accuracy=evaluation.accuracy,
        train_accuracy=result.metrics.get("train_accuracy"),
        loss=result.metrics.get("loss"),
        epochs=evaluation.epoch,
        run_name=result.run_name,
        run_uri=result.run_uri,
        checkpoint_uri=result.checkpoint_uri,
        attempts=result.attempts,
        worker_failures=result.worker_failures,
        world_sizes=[change.size for change in result.world_sizes],
    )
    return summary.model_dump(mode="json")


def main() -> int:
    """Run the pipeline against the configured Prefect API, or a temporary server, and print what came out.

    Returns:
        The exit code, see `flows.digits.print_outcome`.
    """
    return print_outcome(digits_jax(return_state=True))


if __name__ == "__main__":
    sys.exit(main())
