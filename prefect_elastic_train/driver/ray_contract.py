"""The names and signatures of Ray's internals that this package needs. Ray may change them in any minor version.

The driver compares them with the installed Ray before it trains, if that is not a tested version.
"""

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

from prefect_elastic_train.core.outcomes import AttemptFailedError
from prefect_elastic_train.core.version import untested_ray

_PACKAGE = Path(__file__).parents[1]
_EXECUTION = "ray.train.v2._internal.execution"
_COORDINATOR = "ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator:_AutoscalingCoordinatorActor"
#: Private attributes of Ray's classes and modules that this package calls, reads, sets or overrides, and the names that
#: it replaces, by owner.
ATTRIBUTES = {
    "ray": "_private",
    "ray.actor": "ActorClassID",
    "ray._private.node:Node": "_node_id _ray_params _session_dir start_raylet",
    "ray._private.services": "start_api_server",
    "ray._private.state:state": "_connect_and_get_accessor",
    "ray._private.worker:Worker": "get_accelerator_ids_for_accelerator_resource",
    "ray.scripts.scripts": "get_ray_client_dependency_error",
    "ray.data:Dataset": "_logical_plan",
    "ray.train.v2._internal.callbacks.preemption_callback": "PreemptionWatcher",
    "ray.train.v2.api.data_parallel_trainer": "TrainController get_env_vars_to_propagate",
    "ray.dashboard.modules.dashboard_sdk:SubmissionClient": "_do_request _upload_package_if_needed",
    "ray.train:ScalingConfig": "_resources_per_worker_not_none",
    "ray.train:Checkpoint": "_get_temporary_checkpoint_dir",
    f"{_EXECUTION}.checkpoint.checkpoint_manager:CheckpointManager": (
        "_assert_checkpoints_exist _checkpoint_config _checkpoint_results _checkpoint_to_report_index "
        "_get_checkpoint_score _load_state _save_state _storage_context _validated_checkpoints _write_state_to_storage"
    ),
    f"{_EXECUTION}.context": "is_managed_checkpoint",
    f"{_EXECUTION}.context:TrainContext": "_sync_checkpoint_dir_name_across_ranks",
    f"{_EXECUTION}.controller:TrainController": (
        "_health_check_interval_s _make_and_handle_scaling_decision_for_non_running_worker_group _poll_workers "
        "_relax_collectives_during_preemption _run_config _shutdown_worker_group _worker_group"
    ),
    f"{_EXECUTION}.controller.controller": "CheckpointManager",
    f"{_EXECUTION}.controller.state:TrainControllerState": "_state_type",
    f"{_EXECUTION}.preemption:PreemptionWatcher": "_node_to_ranks _on_drain_change",
    f"{_EXECUTION}.scaling_policy:ScalingPolicy": (
        "_autoscaling_coordinator _coordinator_client _maybe_send_resource_request _requester_id _send_resource_request"
    ),
    f"{_EXECUTION}.scaling_policy.autoscaling_coordinator_client": "AUTOSCALING_REQUESTS_EXPIRE_TIME_S",
    f"{_EXECUTION}.worker_group:WorkerGroup": (
        "_assign_worker_ranks _clear_state _create_placement_group _create_workers _get_worker_runtime_env "
        "_poll_workers_and_collect_errors _start _train_run_context _worker_cls _worker_group_context "
        "_worker_group_state"
    ),
    "ray.train.v2.api.data_parallel_trainer:DataParallelTrainer": (
        "_create_default_callbacks _get_train_func _initialize_and_run_controller"
    ),
    "ray.util.tpu:SlicePlacementGroup": "_head_pgs",
}


#: Parameters of the functions of Ray that this package calls or replaces without a subclass. Those of the coordinator
#: are since Ray 2.60.
PARAMETERS = {
    f"{_COORDINATOR}.get_reserved_resources": "self requester_id recompute",
    f"{_EXECUTION}.context:TrainContext._sync_checkpoint_dir_name_across_ranks": "self checkpoint_dir_name",
    f"{_EXECUTION}.preemption:PreemptionWatcher._on_drain_change": "self drained",
    f"{_EXECUTION}.scaling_policy.autoscaling_coordinator_client:TrainAutoscalingCoordinatorClient.__init__": (
        "self requester_id"
    ),
    f"{_EXECUTION}.storage:StorageContext.make_default_checkpoint_dir_name": "",
    "ray.dashboard.modules.dashboard_sdk:SubmissionClient._do_request": "self method endpoint data json_data kwargs",
    "ray.train.v2.api.data_parallel_trainer:DataParallelTrainer._initialize_and_run_controller": (
        "self controller_init_kwargs"
    ),
}


def check_ray() -> None:
    """Check that the installed Ray has what this package needs. Do nothing if it is a tested version.

    Raises:
        AttemptFailedError: Ray lacks a name, or a method has other parameters.
    """
    untested = untested_ray()
    if not untested:
        return
    try:
        differences = find_differences()
    except Exception as error:  # noqa: BLE001 - a name that is used while a module of this package is imported
        differences = [f"{type(error).__name__}: {error}"]
    if differences:
        raise AttemptFailedError(
            f"{untested}, and cannot run with that: {'; '.join(differences)}. Install a tested version of Ray, or a "
            "newer prefect-elastic-train"
        )


def find_differences() -> list[str]:
    """Return the names that Ray lacks; if there are none, the functions with other parameters."""
    return [*_missing_imports(), *_missing_attributes()] or [*_changed_functions(), *_changed_methods()]


def _missing_imports() -> Iterator[str]:
    for file in sorted(_PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "ray":
                yield from (
                    f"{node.module} has no {alias.name}"
                    for alias in node.names
                    if not _has(str(node.module), alias.name)
                )


def _has(module: str, name: str) -> bool:
    """Return False if a module of Ray or a name in it does not exist."""
    try:
        importlib.import_module(module)
        pkgutil.resolve_name(f"{module}.{name}")
    except ModuleNotFoundError as error:
        return not str(error.name).startswith("ray")  # JAX is not installed
    except (ImportError, AttributeError):
        return False
    return True


def _missing_attributes() -> Iterator[str]:
    for owner, names in ATTRIBUTES.items():
        try:
            resolved = pkgutil.resolve_name(owner)
            source = inspect.getsource(importlib.import_module(getattr(resolved, "__module__", "ray")))
        except (ImportError, AttributeError):
            yield f"there is no {owner}"
            continue
        for name in names.split():
            if not hasattr(resolved, name) and not re.search(rf"self\.{name}\b\s*[:=]", source):
                yield f"{owner} has no {name}"


def _changed_functions() -> Iterator[str]:
    for name, expected in PARAMETERS.items():
        actual = " ".join(inspect.signature(pkgutil.resolve_name(name)).parameters)
        if actual != expected:
            yield f"{name} takes ({actual}), not ({expected})"


def _changed_methods() -> Iterator[str]:
    for folder in ("controller", "driver", "worker"):
        for file in (_PACKAGE / folder).glob("[a-z]*.py"):
            try:
                module = importlib.import_module(f"{_PACKAGE.name}.{folder}.{file.stem}")
            except ModuleNotFoundError:  # JAX is not installed
                continue
            for owner in vars(module).values():
                if inspect.isclass(owner) and owner.__module__ == module.__name__:
                    yield from _changed_methods_of(owner)


def _changed_methods_of(owner: type) -> Iterator[str]:
    bases = [base for base in owner.__mro__ if base.__module__.startswith("ray.")]
    for name in vars(owner):
        method = getattr(owner, name)  # a function also if it is a static method
        if not bases or name.startswith("__") or not inspect.isfunction(method):
            continue
        base = next((base for base in bases if name in vars(base)), None)
        if base is None:
            if name.startswith(("before_", "after_", "on_")):
                yield f"Ray calls no {name} ({owner.__name__})"
            continue
        theirs = getattr(base, name)
        if inspect.isfunction(theirs):
            actual = list(inspect.signature(theirs).parameters)
            if list(inspect.signature(method).parameters) != actual:
                yield f"{base.__name__}.{name} takes ({' '.join(actual)})"
            if inspect.iscoroutinefunction(method) != inspect.iscoroutinefunction(theirs):
                yield f"{base.__name__}.{name} is a coroutine in one of them"
