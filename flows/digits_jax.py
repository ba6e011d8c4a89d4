"""Handwritten digits in JAX: prepare the data, train data-parallel over several processes, evaluate the checkpoint.

The data, their preparation and the report are those of `flows.digits`. The network and its training are plain JAX and
numpy. `python -m flows.digits_jax` runs it in this process, `python -m flows.serve` serves it as a deployment.
Importing this module imports neither jax nor ray: the heavy imports are in the functions that need them.
"""

import itertools
import math
import sys
from functools import partial
from typing import Annotated, Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from pydantic import Field

from flows.digits import (
    DEFAULT_CLUSTER,
    DEFAULT_DATA_DIRECTORY,
    DEFAULT_FAILURES,
    DEFAULT_SCALING,
    DEFAULT_STORAGE,
    Evaluation,
    Storage,
    prepare_digits,
    print_outcome,
    publish_evaluation,
    read_images,
    shift_pixels,
    summarize,
)
from prefect_elastic_train import (
    CheckpointPolicy,
    ElasticScaling,
    FailureBudget,
    RayCluster,
    checkpoint_directory,
    elastic_train,
    loop,
)

LAYERS = (64, 256, 128, 10)  # pixels, two hidden layers, digits; about 51,000 weights
MOMENTUM = 0.9

Arrays = dict[str, Any]  # arrays of numpy or JAX, by name


# ------------------------------------------------------------------------------------------ training


def initial_parameters(seed: int) -> Arrays:
    """Draw the weights of a new network as numpy arrays, the same in every process."""
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
        parameters: Arrays of numpy or JAX. The result is of the same kind.
        images: Images of shape (n, 64).

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

    The global batch of a step is the same for any number of workers. Each process computes its rows of it, and XLA sums
    the gradients over all processes. The number of workers changes only how sums are rounded.

    Args:
        config: `train_path` (Parquet file), `epochs` (of this run), `seed`, `batch_size` (images over all workers) and
            `learning_rate` (of the first step; it decreases linearly to 0).
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("batch",))
    replicated = NamedSharding(mesh, PartitionSpec())
    by_rows = NamedSharding(mesh, PartitionSpec("batch"))
    shared = partial(jax.make_array_from_process_local_data, replicated)

    def loss_of(parameters: Arrays, images: Any, labels: Any, counts: Any) -> Any:
        logits = logits_of(parameters, images)
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]
        right = (logits.argmax(1) == labels) * counts
        return (losses * counts).sum() / counts.sum(), right.sum() / counts.sum()  # over the rows of all processes

    @partial(jax.jit, out_shardings=replicated, donate_argnums=(0, 1))
    def take_step(parameters: Arrays, velocity: Arrays, rate: Any, *batch: Any) -> tuple[Any, ...]:
        (loss, accuracy), gradients = jax.value_and_grad(loss_of, has_aux=True)(parameters, *batch)
        velocity = jax.tree.map(lambda old, new: MOMENTUM * old + new, velocity, gradients)
        return jax.tree.map(lambda old, change: old - rate * change, parameters, velocity), velocity, loss, accuracy

    images, labels = read_images(config["train_path"])
    # A sharded array has equally many rows on each device. Rows beyond a process's share have a count of 0.
    rows = math.ceil(config["batch_size"] / len(jax.devices())) * jax.local_device_count()
    parameters = initial_parameters(config["seed"])
    state = loop.JaxState(
        parameters=jax.tree.map(shared, parameters),
        velocity=jax.tree.map(lambda array: shared(0 * array), parameters),
    )
    per_epoch = math.ceil(len(images) / config["batch_size"])
    plan = {"steps": config["epochs"] * per_epoch, "global_batch": config["batch_size"], "seed": config["seed"]}
    with loop.session(state, save_every=per_epoch, **plan) as session:
        for pixels, digits in session.batches((images, labels)):
            random = np.random.default_rng((config["seed"], session.epoch))
            shifts = random.integers(0, 3, size=(len(images), 2))[session.samples]
            counts = np.full(len(digits), session.weight > 0, "float32")
            local = (shift_pixels(pixels, shifts, images.min()), digits.astype("int32"), counts)
            padded = [np.pad(array, [(0, rows - len(array)), *[(0, 0)] * (array.ndim - 1)]) for array in local]
            batch = [jax.make_array_from_process_local_data(by_rows, array) for array in padded]
            rate = np.float32(config["learning_rate"] * (1 - session.done / session.end))
            state.parameters, state.velocity, loss, accuracy = take_step(state.parameters, state.velocity, rate, *batch)
            session.step({"loss": loss, "train_accuracy": accuracy})


# ---------------------------------------------------------------------------------------- evaluation


@task(name="evaluate digits in jax", cache_policy=NO_CACHE)
def evaluate_digits_jax(checkpoint_uri: str, test_path: str, storage: Storage | None = None) -> Evaluation:
    """Evaluate a checkpoint on the held-out images, and publish its confusion matrix as an artifact.

    Args:
        checkpoint_uri: Directory of the checkpoint, a path or a URI.
        test_path: Parquet file of the held-out images.
        storage: Storage of the checkpoint. Default: the URI with the ambient credentials.

    Returns:
        The accuracy and the confusion matrix.
    """
    state = loop.JaxState(parameters=initial_parameters(0))
    with checkpoint_directory(checkpoint_uri, storage) as directory:
        state.read(str(directory), only_these=True)
        epoch = loop.read_about(directory)["epoch"]
    images, labels = read_images(test_path)
    read = logits_of(state.parameters, images).argmax(1)
    return publish_evaluation("digits-jax-confusion-matrix", checkpoint_uri, epoch, labels, read)


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
        data_dir: Directory for the prepared data. On a cluster, all nodes must mount it.
        storage: Storage of the run and its checkpoints.
        scaling: Number of workers, and their resources.
        failures: Failures that the training may survive.
        cluster: Ray cluster to train on. Default: a local cluster.

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
    evaluation = evaluate_digits_jax(result.checkpoint_uri, data.test_path, storage)
    return summarize(result, evaluation)


def main() -> int:
    """Run the pipeline against the configured Prefect API or a temporary server, and print its outcome.

    Returns:
        The exit code, see `flows.digits.print_outcome`.
    """
    return print_outcome(digits_jax(return_state=True))


if __name__ == "__main__":
    sys.exit(main())
