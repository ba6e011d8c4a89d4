"""The arguments of ``elastic_train``, and what is made from them: the run request and the spec of each driver."""

from __future__ import annotations

import math
import re
import sys
import uuid
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from prefect_elastic_train.blocks import CheckpointPolicy, ElasticScaling, FailureBudget, RayCluster
from prefect_elastic_train.blocks.lookup import Blocks, StorageBlock, saved_name
from prefect_elastic_train.core.operator_settings import get_settings
from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.payload import Payload, dump_payload
from prefect_elastic_train.core.request import DriverSpec, RunRequest
from prefect_elastic_train.core.version import ray_minor
from prefect_elastic_train.driver.user_code import check_loop
from prefect_elastic_train.report.run_report import TOTALS
from prefect_elastic_train.runs import fingerprints
from prefect_elastic_train.supervisor.processes import import_path

from .position import TrainingPosition

FRAMEWORKS = ("torch", "jax", "xgboost", "lightgbm", "none")

TrainLoop = Callable[..., Any] | str
Datasets = dict[str, Any] | Callable[[], dict[str, Any]]


class TrainOptions(TypedDict, total=False):
    """Keyword arguments of ``elastic_train``, ``elastic_train.submit`` and ``aelastic_train``."""

    train_loop_config: Any
    framework: str
    scaling: ElasticScaling | str | None
    failures: FailureBudget | str | None
    checkpoints: CheckpointPolicy | str | None
    storage: StorageBlock | str | Path | None
    cluster: RayCluster | str | None
    datasets: Datasets | None
    run_name: str | None
    resume: bool
    resume_from: str | None
    torch_config: Any
    jax_config: Any
    dataset_config: Any
    validation_config: Any
    worker_runtime_env: dict[str, Any] | None
    timeout_seconds: float | None
    local: bool


def check_options(options: TrainOptions) -> None:
    """Check the options of ``elastic_train`` that are neither blocks nor the user's own objects, such as ``run_name``.

    Raises:
        ConfigurationError: The value of an option is not allowed, or two options do not fit together.
        TypeError: An option does not exist.
    """
    if unknown := sorted(options.keys() - TrainOptions.__annotations__.keys()):
        raise TypeError(f"elastic_train() got an unexpected keyword argument {unknown[0]!r}")
    framework = options.get("framework", "torch")
    run_name = options.get("run_name")
    resume_from = options.get("resume_from")
    timeout_seconds = options.get("timeout_seconds")
    if framework not in FRAMEWORKS:
        raise ConfigurationError(f"framework {framework!r} is unknown; use one of {', '.join(map(repr, FRAMEWORKS))}")
    if timeout_seconds is not None and not timeout_seconds > 0:
        raise ConfigurationError(f"timeout_seconds={timeout_seconds!r} must be above 0, or None for no limit")
    if options.get("resume") and (resume_from or run_name is None):
        raise ConfigurationError(
            "resume=True takes over the run of this run_name, and resume_from starts a new run from another's "
            "checkpoint: pass run_name, and one of them"
        )
    if resume_from:
        fingerprints.check_run_name(resume_from.partition("@")[0])
    if run_name is not None:
        fingerprints.check_run_name(run_name)
    if run_name == fingerprints.LATEST_RUN:
        raise ConfigurationError(
            f"run_name={run_name!r} is what resume_from calls the newest earlier run; give the run another name"
        )


def make_payload(train_loop: TrainLoop, options: TrainOptions) -> Payload:
    """Return the payload of a training: the train loop and the user's objects in the options, such as datasets."""
    ray_data = sys.modules.get("ray.data") if options.get("datasets") else None
    objects: dict[str, Any] = {name: value for name, value in options.items() if name in Payload.__annotations__}
    return Payload(train_loop, **objects, data_context=ray_data and ray_data.DataContext.get_current())


def make_request(
    train_loop: TrainLoop, options: TrainOptions, payload: bytes, position: TrainingPosition
) -> RunRequest:
    """Return the run request of a training from checked options, the pickled payload and the training's position."""
    config = options.get("train_loop_config")
    has_datasets = bool(options.get("datasets"))
    run_name = options.get("run_name")
    flow = position.calls[-1] if position.calls else position.owner
    flow_name = flow.flow_name or fingerprints.train_loop_name(train_loop)
    default_name = fingerprints.training_name(flow_name, position.owner.flow_run_id, position.number, position.calls)
    validation_resources = getattr(options.get("validation_config"), "ray_remote_kwargs", {"num_cpus": 0})
    return RunRequest(
        run_name=run_name or default_name,
        owner=position.owner.model_copy(update={"supervisor": uuid.uuid4().hex}),
        fingerprint=fingerprints.fingerprint(train_loop, options.get("framework", "torch"), config),
        named=run_name is not None,
        resume=options.get("resume", False),
        resume_from=options.get("resume_from") or "",
        training_name=fingerprints.training_name(flow_name, "", position.number, position.calls),
        resumed=position.resumed,
        has_datasets=has_datasets,
        extra_cpus=has_datasets + math.ceil(validation_resources.get("num_cpus", 1)),
        # ``num_steps`` may be anything, such as the length of a roll-out.
        totals={
            name: total
            for name, total in fingerprints.config_values(config).items()
            if name in TOTALS and not name.startswith("num_") and isinstance(total, int | float)
        },
        worker_runtime_env=options.get("worker_runtime_env") or {},
        payload=payload,
    )


def pickle_payload(payload: Payload) -> bytes:
    """Return the payload of a training, pickled for the driver.

    Raises:
        ConfigurationError: The train loop is not valid, a dataset holds data of this process, or an object cannot
            be pickled.
    """
    loop = payload.train_loop
    if isinstance(loop, str):
        if not re.fullmatch(r"[\w.]+:[\w.]+", loop):
            raise ConfigurationError(f"train loop {loop!r} is no import path; write 'package.module:function'")
    else:
        check_loop(loop)
    for name, dataset in payload.datasets.items() if isinstance(payload.datasets, dict) else ():
        if not getattr(dataset, "has_serializable_lineage", lambda: True)():
            raise ConfigurationError(
                f"datasets[{name!r}] holds data of this process, as made by from_items() or materialize(), which the "
                f"driver cannot read. Pass a function that makes the dataset: datasets={{{name!r}: make_dataset}}"
            )
    try:
        return dump_payload(payload)  # now, because the objects may be changed for the next training
    except Exception as error:
        raise ConfigurationError(
            f"train loop {fingerprints.train_loop_name(loop)!r} or its configuration cannot be sent to another "
            f"process: {type(error).__name__}: {error}. Keep locks, open files and connections out of what the loop "
            "refers to"
        ) from error


def driver_spec(request: RunRequest, blocks: Blocks) -> DriverSpec:
    """Return the spec of a driver: the run request and the current values of the blocks.

    Raises:
        ConfigurationError: A block has a setting that the installed Ray does not support.
    """
    for name in ("preemption_grace_seconds", "relax_collectives_on_preemption"):
        if getattr(blocks.failures, name) and ray_minor() < (2, 60):
            raise ConfigurationError(
                f"{name} of FailureBudget needs Ray 2.60 or newer, and {version('ray')} is installed; reset it to its "
                "default, or upgrade Ray"
            )
    return DriverSpec(
        request,
        **{argument: block.plain() for argument, block in blocks._asdict().items()},
        storage_block=saved_name(blocks.storage),
        poll_interval_seconds=get_settings().poll_interval(blocks.scaling.max_workers),
        sys_path=import_path(),
    )
