"""The arguments of ``elastic_train``: checked before anything starts, and made into a request and its blocks.

People name a train loop in a form or a shell by an import path, or by a file and a function in it.
"""

from __future__ import annotations

import math
import os
import re
import sys
import uuid
from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType
from typing import Any

from prefect.exceptions import ScriptError
from prefect.utilities.importtools import load_script_as_module
from pydantic import SecretStr

from prefect_elastic_train.blocks import lookup
from prefect_elastic_train.blocks._common import TrainingBlock
from prefect_elastic_train.core import settings
from prefect_elastic_train.core.operator_settings import default_block_name, get_settings
from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.request import DriverSpec, Payload, RunRequest, dump_payload
from prefect_elastic_train.driver.fit import check_loop, function_in, resolve_loop
from prefect_elastic_train.orchestration.flow_runs import Place, this_training
from prefect_elastic_train.report.run_report import TOTALS
from prefect_elastic_train.runs import identity
from prefect_elastic_train.supervisor.runtime import import_path

FRAMEWORKS = ("torch", "jax", "none")
#: A pattern that both ways to name a loop match.
LOOP_PATTERN = r"^([A-Za-z_][\w.]*|[^:]+\.py):[A-Za-z_][\w.]*$"

#: A block as it was given, or the name of a saved one, which is loaded anew at each attempt.
GivenBlock = TrainingBlock | str


def check_arguments(
    framework: str, run_name: str | None, resume: bool, resume_from: str | None, timeout_seconds: float | None
) -> None:
    """Refuse what is not allowed of those arguments that are neither blocks nor the user's own objects."""
    if framework not in FRAMEWORKS:
        raise ConfigurationError(f"framework {framework!r} is unknown; use one of {', '.join(map(repr, FRAMEWORKS))}")
    if timeout_seconds is not None and not timeout_seconds > 0:
        raise ConfigurationError(f"timeout_seconds={timeout_seconds!r} must be above 0, or None for no bound")
    if resume and (resume_from or run_name is None):
        raise ConfigurationError(
            "resume=True takes over the run that run_name names, and resume_from starts a new run from another's "
            "checkpoint: give run_name, and one of them"
        )
    if resume_from:
        identity.check_run_name(resume_from.partition("@")[0])
    if run_name is not None:
        identity.check_run_name(run_name)
    if run_name == identity.LATEST_RUN:
        raise ConfigurationError(
            f"run_name={run_name!r} is what resume_from calls the newest earlier run; give the run another name"
        )


def make_request(
    payload: Payload,
    framework: str,
    run_name: str | None,
    resume: bool,
    resume_from: str | None,
    worker_runtime_env: dict[str, Any] | None,
) -> tuple[RunRequest, Place]:
    """Make the request of a training whose other arguments were checked, and say which one of its flow run it is."""
    loop, config, pickle = payload.train_loop, payload.train_loop_config, pickled(payload)
    # Last, since it counts the trainings of the flow run: one that is refused is none.
    place = this_training()
    which = (place.number, place.calls)
    flow_name = place.flow_name or identity.loop_name(loop)
    validation = getattr(payload.validation_config, "ray_remote_kwargs", {"num_cpus": 0})
    request = RunRequest(
        run_name=run_name
        or identity.check_run_name(identity.default_run_name(flow_name, place.owner.flow_run_id, *which)),
        owner=place.owner.model_copy(update={"supervisor": uuid.uuid4().hex}),
        fingerprint=identity.fingerprint(loop, framework, config),
        named=run_name is not None,
        resume=resume,
        resume_from=resume_from or "",
        part=identity.training_part(flow_name, *which),
        resumed=place.resumed,
        has_datasets=bool(payload.datasets),
        cpus_beside=bool(payload.datasets) + math.ceil(validation.get("num_cpus", 1)),
        # A ``num_steps`` may be anything, as the length of a roll-out.
        totals={
            name: total
            for name, total in identity.entries(config).items()
            if name in TOTALS and not name.startswith("num_") and isinstance(total, int | float)
        },
        worker_runtime_env=worker_runtime_env or {},
        payload=pickle,
    )
    return request, place


def pickled(payload: Payload) -> bytes:
    """Return the user's objects as the driver gets them; refuse those that no driver can train with."""
    loop = payload.train_loop
    if isinstance(loop, str):
        module, _, function = loop.partition(":")
        if not all(part.isidentifier() for part in [*module.split("."), *function.split(".")]):
            raise ConfigurationError(f"train loop {loop!r} is no import path; write 'package.module:function'")
    elif callable(loop):
        check_loop(loop)
    else:
        raise ConfigurationError(f"the train loop must be a function or an import path, got {type(loop).__name__}")
    for name, dataset in payload.datasets.items() if isinstance(payload.datasets, dict) else ():
        if not getattr(dataset, "has_serializable_lineage", lambda: True)():
            raise ConfigurationError(
                f"datasets[{name!r}] holds data of this process, as made by from_items() or materialize(), which the "
                f"driver cannot read. Give a function that makes the dataset: datasets={{{name!r}: make_dataset}}"
            )
    try:
        return dump_payload(payload)  # now, since the objects may be changed for the next training
    except Exception as error:
        raise ConfigurationError(
            f"train loop {identity.loop_name(loop)!r} or its configuration cannot be sent to another process: "
            f"{type(error).__name__}: {error}. Keep locks, open files and connections out of what the loop refers to"
        ) from error


def given_blocks(**given: GivenBlock | None) -> dict[str, GivenBlock]:
    """Return a training's blocks by argument: as given, else by the name in the settings, else the default."""
    # All are loaded once now, so that a typing error ends nothing later.
    loaded = {argument: load_given(argument, block or "") for argument, block in given.items()}
    return {
        argument: (given[argument] or default_block_name(argument)) if lookup.saved_name(block) else block
        for argument, block in loaded.items()
    }


def load_given(argument: str, given: GivenBlock) -> TrainingBlock:
    """Return a block, loaded if a name or a storage's place was given; refuse one whose secrets are masked."""
    types = lookup.BLOCK_TYPES[argument]
    block = lookup.chosen_block(argument, given) if isinstance(given, str) else given
    if not (type(block) in types if argument == "storage" else isinstance(block, *types)):
        names = " or ".join(kind.__name__ for kind in types)
        raise ConfigurationError(f"{argument}: expected {names} or the name of one, got {type(given).__name__}")
    for field, value in block:
        text = value.get_secret_value() if isinstance(value, SecretStr) else ""
        if text and not text.strip("*"):
            raise ConfigurationError(
                f"{type(block).__name__}.{field} is masked: Prefect stores the secrets of a block that is given inline "
                "as a flow parameter as asterisks. Save the block and pick it by name in the parameter"
            )
    return block


def driver_spec(request: RunRequest, given: Mapping[str, GivenBlock], previous_end: str = "") -> DriverSpec:
    """Return what the driver of the next attempt is told, with the blocks as they are saved now."""
    blocks = {argument: load_given(argument, block) for argument, block in given.items()}
    scaling, storage = settings.plain(settings.ScalingSettings, blocks["scaling"]), blocks["storage"]
    assert isinstance(storage, lookup.StorageBlock)
    return DriverSpec(
        request=request,
        scaling=scaling,
        failures=settings.plain(settings.FailureSettings, blocks["failures"]),
        checkpoints=settings.plain(settings.CheckpointSettings, blocks["checkpoints"]),
        storage=lookup.plain_storage(storage),
        cluster=settings.plain(settings.ClusterSettings, blocks["cluster"]),
        storage_block=lookup.saved_name(storage),
        poll_interval_seconds=get_settings().poll_interval(scaling.max_workers),
        sys_path=import_path(),
        previous_end=previous_end,
    )


def named_loop(name: str) -> Callable[..., Any] | str:
    """Return what ``elastic_train`` takes for a loop that a person names."""
    # Modules are looked for in the current folder too, as by ``python -m``; those that a file imports, in its folder.
    place, _, function = name.rpartition(":")
    if place.endswith(".py"):
        return function_in(_module_of(os.path.abspath(place)), function, name)
    _search(os.getcwd())
    return name


def absolute(name: str) -> str:
    """Return a loop's name as it may be used in any folder of this machine; an import path stays what it is."""
    place, _, function = name.rpartition(":")
    return f"{os.path.abspath(os.path.expanduser(place))}:{function}" if place.endswith(".py") else name


def check_named_loop(name: str) -> None:
    """Refuse a name whose loop is none, which importing it shows."""
    if not re.match(LOOP_PATTERN, name):
        raise ConfigurationError(
            f"train loop {name!r} is neither 'package.module:function' nor 'path/to/file.py:function'"
        )
    loop = named_loop(name)
    check_loop(resolve_loop(loop) if isinstance(loop, str) else loop)


@cache
def _module_of(file: str) -> ModuleType:
    """Run a file as a module, once."""
    _search(os.path.dirname(file))
    try:
        return load_script_as_module(file)
    except (ScriptError, SystemExit) as error:
        cause = error.user_exc if isinstance(error, ScriptError) else error
        raise ConfigurationError(f"{file} cannot be imported: {type(cause).__name__}: {cause}") from error


def _search(folder: str) -> None:
    """Have modules looked for in a folder, here and in the processes of the training."""
    if folder not in map(os.path.abspath, sys.path):
        sys.path.insert(0, folder)
