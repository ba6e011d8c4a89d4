"""Handwritten digits, from data to report: prepare the data, train elastically, evaluate the checkpoint.

The data are the 1,797 real 8 x 8 images that come with scikit-learn, so the pipeline needs no download.
`python -m flows.digits` (or `make demo`) runs it in this process, `python -m flows.serve` serves it as a deployment.
Importing this module imports neither torch nor ray: the heavy imports are in the functions that need them.
"""

import base64
import io
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from pydantic import BaseModel, Field

from prefect_elastic_train import (
    CheckpointPolicy,
    ElasticScaling,
    FailureBudget,
    FsspecStorage,
    LocalStorage,
    RayCluster,
    S3Storage,
    TrainingResult,
    checkpoint_directory,
    elastic_train,
    loop,
)

if TYPE_CHECKING:
    import numpy as np
    import torch
    from prefect.states import State

Storage = LocalStorage | S3Storage | FsspecStorage

REQUIRED_ACCURACY = 0.95  # share of test images; the demo exits with an error below it
TEST_SHARE = 0.2  # share of all images; 360 of 1,797
SPLIT_SEED = 0  # the same split for every run, so that accuracies of different seeds can be compared

DEMO_DIRECTORY = Path(".demo").resolve()
DEFAULT_DATA_DIRECTORY = str(DEMO_DIRECTORY / "data")
DEFAULT_STORAGE = LocalStorage(path=str(DEMO_DIRECTORY / "runs"))
DEFAULT_SCALING = ElasticScaling(min_workers=1, max_workers=2)
DEFAULT_FAILURES = FailureBudget()
DEFAULT_CLUSTER = RayCluster()


class DigitsData(BaseModel):
    """The files of the prepared data.

    Attributes:
        train_path: Parquet file of the training images; absolute.
        test_path: Parquet file of the held-out images; absolute.
    """

    train_path: str
    test_path: str


class Evaluation(BaseModel):
    """The accuracy of a checkpoint on held-out images.

    Attributes:
        epoch: Epoch after which the checkpoint was written, from 1.
        accuracy: Share of images read correctly, 0 to 1.
        confusion: Number of images by written digit (row) and by digit read (column).
    """

    epoch: int
    accuracy: float
    confusion: list[list[int]]


class DigitsSummary(BaseModel):
    """The result of the `digits` flow.

    Attributes:
        accuracy: Share of held-out images read correctly, 0 to 1.
        train_accuracy: Share of training images read correctly during the last epoch, 0 to 1.
        loss: Mean cross-entropy of the last epoch, in nats per image.
        epochs: Epochs behind the evaluated checkpoint.
        run_name: Name of the training run.
        run_uri: Directory of the training run.
        checkpoint_uri: The evaluated checkpoint.
        attempts: Number of drivers that were started; 1 if none was lost.
        worker_failures: Worker failures that the training survived.
        world_sizes: Number of workers of each worker group.
    """

    accuracy: float
    train_accuracy: float | None
    loss: float | None
    epochs: int
    run_name: str
    run_uri: str
    checkpoint_uri: str
    attempts: int
    worker_failures: int
    world_sizes: list[int]


# ---------------------------------------------------------------------------------------------- data


@task(name="prepare digits", cache_policy=NO_CACHE)
def prepare_digits(data_dir: str) -> DigitsData:
    """Split the digits into training and test images, normalise them and write both as Parquet.

    The split is stratified and always the same, and the files are replaced atomically. So the task can be repeated (by
    a retry, or by another flow run) while a training reads them.

    Args:
        data_dir: Directory to write `train.parquet` and `test.parquet` to; created if missing.

    Returns:
        Paths of the two files.
    """
    import pandas as pd
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    train_pixels, test_pixels, train_labels, test_labels = train_test_split(
        pixels, labels, test_size=TEST_SHARE, stratify=labels, random_state=SPLIT_SEED
    )
    mean = train_pixels.mean()  # test images are normalised by the statistics of the training images
    deviation = train_pixels.std()
    directory = Path(data_dir).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    splits = {"train": (train_pixels, train_labels), "test": (test_pixels, test_labels)}
    for name, (split_pixels, split_labels) in splits.items():
        normalised = ((split_pixels - mean) / deviation).astype("float32")
        table = pd.DataFrame(normalised, columns=[f"pixel_{index}" for index in range(normalised.shape[1])])
        table.insert(0, "label", split_labels.astype("int64"))
        partial = directory / f".{name}.{os.getpid()}.parquet"
        table.to_parquet(partial, index=False)
        partial.replace(directory / f"{name}.parquet")

    get_run_logger().info("%d training and %d test images in %s", len(train_labels), len(test_labels), directory)
    return DigitsData(train_path=str(directory / "train.parquet"), test_path=str(directory / "test.parquet"))


def read_images(path: str) -> "tuple[np.ndarray, np.ndarray]":
    """Read one Parquet file that `prepare_digits` wrote.

    Args:
        path: The Parquet file.

    Returns:
        Images, float32 of shape (n, 64), and labels, int64 of shape (n,).
    """
    import pandas as pd

    table = pd.read_parquet(path)
    labels = table.pop("label").to_numpy()
    return table.to_numpy(), labels


def shift_pixels(images: "np.ndarray", shifts: "np.ndarray", background: float) -> "np.ndarray":
    """Shift each image by up to one pixel in both directions, and fill the border with background.

    Args:
        images: Images of shape (n, 64).
        shifts: Integers from 0 to 2 of shape (n, 2), down and across; 1 is no shift.
        background: Value of a background pixel.

    Returns:
        The shifted images, of the same shape.
    """
    import numpy as np

    padded = np.pad(images.reshape(-1, 8, 8), ((0, 0), (1, 1), (1, 1)), constant_values=background)
    span = np.arange(8)
    image = np.arange(len(images))[:, None, None]
    row = (shifts[:, 0, None] + span)[:, :, None]
    column = (shifts[:, 1, None] + span)[:, None, :]
    shifted: np.ndarray = padded[image, row, column]
    return shifted.reshape(images.shape)


# ------------------------------------------------------------------------------------------ training


def build_model() -> "torch.nn.Module":
    """Build the network: three convolutions and two linear layers, about 90,000 weights.

    It has no dropout and no batch norm, so that the result does not depend on how workers divide a batch.
    """
    from torch import nn

    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train_loop(config: dict[str, Any]) -> None:
    """Train the network data-parallel, with a checkpoint after each epoch (a Ray Train loop).

    An interrupted training ends with the same weights: on CPUs bit for bit, if the number of workers is the same, or
    at any number of workers with `shards`. The session restores the state and divides each global batch, and the shift
    of an image depends only on seed, epoch and image.

    Args:
        config: `train_path` (Parquet file), `epochs` (of this run), `seed`, `batch_size` (images over all workers),
            `learning_rate`, and `shards` of a batch (default: 0, none).
    """
    import numpy as np
    import ray.train.torch
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(config["seed"])
    images, labels = read_images(config["train_path"])
    device = ray.train.torch.get_device()
    shards = config.get("shards", 0)
    # With shards, the session sums the gradients itself.
    model = build_model().to(device) if shards else ray.train.torch.prepare_model(build_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=config["learning_rate"])
    state = loop.TorchState(model=model, optimizer=optimizer)
    per_epoch = math.ceil(len(images) / config["batch_size"])
    plan = {"steps": config["epochs"] * per_epoch, "global_batch": config["batch_size"], "seed": config["seed"]}
    with loop.session(state, save_every=per_epoch, shards=shards, **plan) as session:
        for pixels, digits in session.batches((images, labels)):
            random = np.random.default_rng((config["seed"], session.epoch))
            shifts = random.integers(0, 3, size=(len(images), 2))[session.samples]
            logits = model(torch.tensor(shift_pixels(pixels, shifts, images.min()), device=device))
            loss = torch.nn.functional.cross_entropy(logits, torch.tensor(digits, device=device))
            optimizer.zero_grad()
            session.backward(loss * session.weight)  # the weight is right for shares of unequal size
            if not session.is_last_part:
                continue
            optimizer.step()
            metrics = {"loss": loss}
            if (session.done + 1) % per_epoch == 0:
                metrics["train_accuracy"] = accuracy_of(model, session, images, labels)
            session.step(metrics)  # also saves each step that reports the score


def accuracy_of(model: "torch.nn.Module", session: loop.Session, images: "np.ndarray", labels: "np.ndarray") -> float:
    """Evaluate the current weights on all ranks together.

    Args:
        model: The network, on this rank's device.
        session: The session, which divides the images among the ranks.
        images: Images of shape (n, 64).
        labels: Labels of shape (n,).

    Returns:
        The share of the images that are read correctly, the same on all ranks.
    """
    import torch
    import torch.distributed as dist

    device = next(model.parameters()).device
    accuracy = torch.zeros((), device=device)
    with torch.inference_mode():
        for pixels, digits in session.once((images, labels), 512):
            right = model(torch.tensor(pixels, device=device)).argmax(1) == torch.tensor(digits, device=device)
            accuracy += right.float().mean() * session.weight  # batches and shares may differ in size
    if dist.is_initialized():
        dist.all_reduce(accuracy)
        accuracy /= session.world_size
    return accuracy.item()


# ---------------------------------------------------------------------------------------- evaluation


@task(name="evaluate digits", cache_policy=NO_CACHE)
def evaluate_digits(checkpoint_uri: str, test_path: str, storage: Storage | str | None = None) -> Evaluation:
    """Evaluate a checkpoint on the held-out images, and publish its confusion matrix as an artifact.

    Args:
        checkpoint_uri: Directory of the checkpoint, a path or a URI.
        test_path: Parquet file of the held-out images.
        storage: Storage of the checkpoint, or the name of its block. Default: the URI with the ambient credentials.

    Returns:
        The accuracy and the confusion matrix.
    """
    import torch

    model = build_model()
    with checkpoint_directory(checkpoint_uri, storage) as directory:
        loop.TorchState(model=model).read(str(directory), only_these=True)
        epoch = loop.read_about(directory)["epoch"]
    images, labels = read_images(test_path)
    with torch.inference_mode():
        read = model.eval()(torch.tensor(images)).argmax(1).numpy()
    return publish_evaluation("digits-confusion-matrix", checkpoint_uri, epoch, labels, read)


def publish_evaluation(
    key: str, checkpoint_uri: str, epoch: int, labels: "np.ndarray", read: "np.ndarray"
) -> Evaluation:
    """Publish the confusion matrix of a checkpoint as an artifact, with precision and recall of each digit.

    Args:
        key: Key of the artifact.
        checkpoint_uri: The evaluated checkpoint.
        epoch: Epoch after which it was written.
        labels: The written digits.
        read: The digits that were read.

    Returns:
        The accuracy and the confusion matrix.
    """
    from sklearn.metrics import classification_report, confusion_matrix

    confusion = confusion_matrix(labels, read, labels=range(10))
    accuracy = float((labels == read).mean())
    summary = f"{accuracy:.1%} of {len(labels)} held-out images read correctly"
    markdown = f"""# Handwritten digits

**{summary}**, by the checkpoint of epoch {epoch}: `{checkpoint_uri}`

![Confusion matrix]({confusion_picture(confusion)})

```
{classification_report(labels, read, zero_division=0)}
```
"""
    create_markdown_artifact(key=key, markdown=markdown, description=summary)
    get_run_logger().info("test accuracy %.4f after epoch %d", accuracy, epoch)
    return Evaluation(epoch=epoch, accuracy=accuracy, confusion=confusion.tolist())


def confusion_picture(confusion: "np.ndarray") -> str:
    """Draw a confusion matrix.

    Args:
        confusion: Number of images by written digit (row) and by digit read (column).

    Returns:
        The picture as an SVG data URI, which Prefect's UI shows in markdown.
    """
    from matplotlib.figure import Figure
    from sklearn.metrics import ConfusionMatrixDisplay

    figure = Figure(figsize=(6.4, 6.4), layout="constrained", facecolor="white")
    display = ConfusionMatrixDisplay(confusion).plot(ax=figure.add_subplot(), cmap="Blues", colorbar=False)
    display.ax_.set(xlabel="digit read by the network", ylabel="digit written")
    picture = io.BytesIO()
    figure.savefig(picture, format="svg")
    return f"data:image/svg+xml;base64,{base64.b64encode(picture.getvalue()).decode('ascii')}"


# ---------------------------------------------------------------------------------------------- flow


@flow(name="digits")
def digits(
    epochs: Annotated[int, Field(ge=1, le=1000)] = 12,
    seed: Annotated[int, Field(ge=0)] = 0,
    shards: Annotated[int, Field(ge=0)] = 0,
    data_dir: str = DEFAULT_DATA_DIRECTORY,
    storage: Storage = DEFAULT_STORAGE,
    scaling: ElasticScaling = DEFAULT_SCALING,
    failures: FailureBudget = DEFAULT_FAILURES,
    cluster: RayCluster = DEFAULT_CLUSTER,
) -> dict[str, Any]:
    """Prepare handwritten digits, train a small network on them elastically, and evaluate it.

    Args:
        epochs: Passes over the training images; 12 give a test accuracy of about 0.99.
        seed: Seed of the initial weights, the order of the images and their shifts.
        shards: Parts of each batch of 64 images, such as 8: then the weights are bitwise identical with any number of
            workers. 0: no shards.
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
            "learning_rate": 0.002,
            "shards": shards,
        },
        framework="torch",
        scaling=scaling,
        failures=failures,
        checkpoints=CheckpointPolicy(keep=3, score_attribute="train_accuracy"),
        storage=storage,
        cluster=cluster,
    )
    evaluation = evaluate_digits(result.checkpoint_uri, data.test_path, storage)
    return summarize(result, evaluation)


def summarize(result: TrainingResult, evaluation: Evaluation) -> dict[str, Any]:
    """Return the fields of `DigitsSummary`, JSON-safe.

    Args:
        result: Result of the training.
        evaluation: Evaluation of its last checkpoint.
    """
    summary = DigitsSummary(
        accuracy=evaluation.accuracy,
        train_accuracy=result.metrics.get("train_accuracy"),
        loss=result.metrics.get("loss"),
        epochs=evaluation.epoch,
        **result.model_dump(include={"run_name", "run_uri", "checkpoint_uri", "attempts", "worker_failures"}),
        world_sizes=[change.size for change in result.world_sizes],
    )
    return summary.model_dump(mode="json")


def ui_hint(flow_run_id: str) -> str:
    """Return the address of a flow run's page in the UI.

    Args:
        flow_run_id: Id of the flow run.

    Returns:
        The address. Without a configured server, also the command that starts one on the same database.
    """
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME
    from prefect.utilities.urls import url_for

    if PREFECT_API_URL.value():
        return url_for("flow-run", flow_run_id) or f"flow run {flow_run_id}"
    page = f"http://127.0.0.1:4200/runs/flow-run/{flow_run_id}"
    return f"run `prefect server start` (the run is kept in {PREFECT_HOME.value()}), then open {page}"


def print_outcome(state: "State[Any]") -> int:
    """Print how a run of the pipeline ended.

    Args:
        state: The flow run's final state; its result is a `DigitsSummary` as a dict.

    Returns:
        The exit code: 0 if the flow run completed with an accuracy of at least `REQUIRED_ACCURACY`, else 1.
    """
    print(f"\nstate          {state.name}")
    passed = False
    if state.is_completed():
        summary = DigitsSummary.model_validate(state.result())
        passed = summary.accuracy >= REQUIRED_ACCURACY
        print(f"test accuracy  {summary.accuracy:.4f} (required: {REQUIRED_ACCURACY})")
        print(f"run directory  {summary.run_uri}")
    else:
        print(f"reason         {state.message}")
    print(f"UI             {ui_hint(str(state.state_details.flow_run_id))}")
    return 0 if passed else 1


def main() -> int:
    """Run the pipeline against the configured Prefect API or a temporary server, and print its outcome.

    Returns:
        The exit code, see `print_outcome`.
    """
    return print_outcome(digits(return_state=True))


if __name__ == "__main__":
    sys.exit(main())
