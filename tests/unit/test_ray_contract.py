"""What this package relies on inside of Ray, so that a change of Ray is found here and not in the middle of a run."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import ray
from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator as coordinator
from ray.job_config import JobConfig
from ray.train import ScalingConfig
from ray.train._internal import autoscaling_coordinator_client
from ray.train.v2._internal import constants
from ray.train.v2._internal.execution import context, failure_handling, scaling_policy
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.controller.state import TrainControllerStateType
from ray.train.v2._internal.execution.scaling_policy import autoscaling_coordinator_client as client
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.worker_group.worker import ActorMetadata, Worker
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from prefect_elastic_train.elastic import callbacks, loop_callback, policy, trainers
from prefect_elastic_train.runs import layout
from tests.unit.support import REPOSITORY

PACKAGE = REPOSITORY / "prefect_elastic_train"


class Use(NamedTuple):
    """A symbol of Ray that a module of ours imports."""

    file: str
    module: str
    name: str

    @property
    def is_private(self) -> bool:
        return any(part.startswith("_") for part in [*self.module.split("."), self.name])


def _uses() -> Iterator[Use]:
    """Find all imports from Ray in the package, also those inside of functions."""
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "ray":
                for alias in node.names:
                    yield Use(file, node.module, alias.name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == "ray":
                        yield Use(file, alias.name, "")


USES = list(_uses())
PRIVATE = [use for use in USES if use.is_private]
#: Importing these imports torch and jax, which takes seconds.
FRAMEWORKS = ("ray.train.torch", "ray.train.v2.jax")


def test_the_scan_finds_what_is_known_to_be_in_use() -> None:
    known = {
        ("elastic/policy.py", "ray.train.v2._internal.execution.scaling_policy", "ElasticScalingPolicy"),
        ("elastic/callbacks.py", "ray.train.v2._internal.execution.callback", "ControllerCallback"),
        ("elastic/callbacks.py", "ray.train.v2._internal.execution.worker_group.poll", "_is_preempted_actor"),
    }
    assert known <= set(PRIVATE)


def test_rays_internals_are_imported_in_elastic_and_where_settings_are_checked_only() -> None:
    # A wrong TPU topology is refused when the form is sent, long before anything of elastic/ is imported; the package
    # of a job is made in the supervisor.
    allowed = ("elastic/", "core/slices.py", "supervisor/job_client.py")
    assert [use for use in PRIVATE if not use.file.startswith(allowed)] == []


def test_every_module_that_uses_rays_internals_says_why_the_public_api_does_not_do() -> None:
    for file in sorted({use.file for use in PRIVATE}):
        docstring = ast.get_docstring(ast.parse((PACKAGE / file).read_text())) or ""
        assert "Uses ``ray." in docstring, file


@pytest.mark.parametrize(
    "use", [use for use in USES if use.module not in FRAMEWORKS], ids=lambda use: f"{use.file}:{use.module}.{use.name}"
)
def test_every_symbol_of_ray_in_use_exists(use: Use) -> None:
    module = importlib.import_module(use.module)
    if use.name and not hasattr(module, use.name):
        importlib.import_module(f"{use.module}.{use.name}")


def test_this_is_the_version_of_ray_that_the_internals_were_read_in() -> None:
    assert ray.__version__.startswith("2.60.")


OURS = [
    policy.RunScalingPolicy,
    callbacks.RunCallback,
    loop_callback.LoopCallback,
    loop_callback.NoDatasetsCallback,
]


def _parameters(function: Callable[..., Any]) -> list[str]:
    return [parameter.name for parameter in inspect.signature(function).parameters.values()]


def _ray_base_with(owner: type, name: str) -> Any:
    for base in owner.__mro__[1:]:
        if base.__module__.startswith("ray.") and name in vars(base):
            return vars(base)[name]
    return None


@pytest.mark.parametrize("owner", OURS)
def test_every_hook_of_ours_is_one_that_ray_calls_with_the_same_arguments(owner: type) -> None:
    hooks = 0
    for name, method in vars(owner).items():
        if not inspect.isfunction(method) or name.startswith("__"):
            continue
        theirs = _ray_base_with(owner, name)
        if name.startswith(("before_", "after_", "on_")):
            assert theirs is not None, f"Ray does not call {owner.__name__}.{name}"
            hooks += 1
        if theirs is not None and inspect.isfunction(theirs):
            assert _parameters(method) == _parameters(theirs), f"{owner.__name__}.{name}"
            assert inspect.iscoroutinefunction(method) == inspect.iscoroutinefunction(theirs)
    assert hooks


SIGNATURES: list[tuple[Callable[..., Any], list[str]]] = [
    (scaling_policy.ElasticScalingPolicy.__init__, ["self", "scaling_config"]),
    (scaling_policy.ElasticScalingPolicy._get_reserved_resources, ["self"]),
    (scaling_policy.ElasticScalingPolicy._count_possible_workers, ["self", "reserved_resources"]),
    (scaling_policy.ElasticScalingPolicy.make_decision_for_non_running_worker_group, ["self"]),
    (
        scaling_policy.ElasticScalingPolicy.make_decision_for_running_worker_group,
        ["self", "worker_group_state", "worker_group_status"],
    ),
    (scaling_policy.ElasticScalingPolicy.after_controller_start, ["self", "train_run_context"]),
    (scaling_policy.ElasticScalingPolicy._send_resource_request, ["self"]),
    (client.TrainAutoscalingCoordinatorClient.__init__, ["self", "requester_id"]),
    (
        coordinator._AutoscalingCoordinatorActor.get_reserved_resources
        if inspect.isclass(coordinator._AutoscalingCoordinatorActor)
        else coordinator._AutoscalingCoordinatorActor.__ray_metadata__.modified_class.get_reserved_resources,
        ["self", "requester_id", "recompute"],
    ),
    (DataParallelTrainer._initialize_and_run_controller, ["self", "controller_init_kwargs"]),
    (DataParallelTrainer._create_default_callbacks, ["self"]),
    (CheckpointManager.__init__, ["self", "checkpoint_config", "storage_context"]),
    (context.TrainContext._sync_checkpoint_dir_name_across_ranks, ["self", "checkpoint_dir_name"]),
    (StorageContext.make_default_checkpoint_dir_name, []),
    (StorageContext.persist_current_checkpoint, ["self", "checkpoint", "checkpoint_dir_name"]),
]


@pytest.mark.parametrize(("function", "parameters"), SIGNATURES, ids=lambda value: getattr(value, "__qualname__", ""))
def test_what_we_call_and_override_takes_these_arguments(function: Callable[..., Any], parameters: list[str]) -> None:
    assert _parameters(function) == parameters


def _tree(function: Callable[..., Any]) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def _calls(tree: ast.AST, name: str) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name
    ]


def test_fit_hands_policy_and_callbacks_to_its_controller_by_name() -> None:
    call, *more = _calls(_tree(DataParallelTrainer.fit), "_initialize_and_run_controller")
    assert not more
    assert {keyword.arg for keyword in call.keywords} >= {"scaling_policy", "callbacks", "failure_policy"}


def test_the_policy_asks_the_coordinator_as_rays_own_does() -> None:
    call, *_ = _calls(_tree(scaling_policy.ElasticScalingPolicy._get_reserved_resources), "remote")
    assert ast.unparse(call.func) == "self._autoscaling_coordinator.get_reserved_resources.remote"
    assert [ast.unparse(argument) for argument in call.args] == ["self._requester_id"]


def test_a_reservation_outlives_a_driver_by_three_minutes_unless_its_id_is_known() -> None:
    assert client.AUTOSCALING_REQUESTS_EXPIRE_TIME_S == 180
    assert hasattr(autoscaling_coordinator_client, "build_train_resource_request")


def test_our_reservation_is_rays_with_a_shorter_life_and_two_renewals_in_it() -> None:
    own, rays = (
        _calls(_tree(of.send_resource_request), "remote")[0]
        for of in (policy._Reservation, client.TrainAutoscalingCoordinatorClient)
    )
    assert ast.unparse(own.func) == ast.unparse(rays.func)
    assert {keyword.arg for keyword in own.keywords} == {keyword.arg for keyword in rays.keywords}
    assert 2 * client.AUTOSCALING_REQUESTS_INTERVAL_S < policy._RESERVED_SECONDS < 180


def test_ray_writes_its_snapshot_before_it_deletes_checkpoints() -> None:
    tree = _tree(CheckpointManager._save_state_and_delete_old_checkpoints)
    (writes,) = _calls(tree, "_write_state_to_storage")
    deletes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "delete_fs_path"
    ]
    assert deletes
    assert all(delete.lineno > writes.lineno for delete in deletes)


def test_ray_writes_its_snapshot_through_an_output_stream_of_the_filesystem() -> None:
    (stream,) = _calls(_tree(CheckpointManager._write_state_to_storage), "open_output_stream")
    assert "checkpoint_manager_snapshot_path" in ast.unparse(stream)
    assert constants.CHECKPOINT_MANAGER_SNAPSHOT_FILENAME == layout.SNAPSHOT


def test_ranks_agree_on_a_checkpoints_folder_in_one_place_for_every_way_to_upload() -> None:
    report = _tree(context.TrainContext.report)
    assert len(_calls(report, "_sync_checkpoint_dir_name_across_ranks")) == 1
    assert not _calls(report, "make_default_checkpoint_dir_name")
    (broadcast,) = _calls(_tree(context.TrainContext._sync_checkpoint_dir_name_across_ranks), "remote")
    assert {"data": "checkpoint_dir_name"}.items() <= {k.arg: ast.unparse(k.value) for k in broadcast.keywords}.items()


def test_the_folder_of_a_checkpoint_is_created_inside_of_the_transfer_hook_in_the_same_thread() -> None:
    tree = _tree(context.TrainContext._upload_checkpoint)
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.With) and "on_checkpoint_transfer" in ast.unparse(node.items[0])
    ]
    assert len(blocks) == 1
    assert _calls(blocks[0], "persist_current_checkpoint")
    create, *_ = _calls(_tree(StorageContext.persist_current_checkpoint), "create_dir")
    assert ast.unparse(create) == "self.storage_filesystem.create_dir(checkpoint_fs_path)"


def test_states_and_decisions_have_the_names_that_events_carry() -> None:
    names = {state.state_name for state in TrainControllerStateType}
    assert {"INITIALIZING", "SCHEDULING", "RUNNING", "PREEMPTING", "RESTARTING", "RESIZING"} <= names
    assert failure_handling.FailureDecision.RETRY is not None
    assert {"num_workers", "resources_per_worker"} <= set(scaling_policy.ResizeDecision.__dataclass_fields__)


def test_workers_carry_what_log_lines_are_tagged_by() -> None:
    assert {"node_ip", "pid"} <= set(ActorMetadata.__dataclass_fields__)
    assert "world_rank" in context.DistributedContext.__dataclass_fields__
    assert {"metadata", "distributed_context"} <= set(Worker.__dataclass_fields__)


def test_the_poll_interval_is_read_from_this_variable() -> None:
    assert constants.HEALTH_CHECK_INTERVAL_S_ENV_VAR == "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"


def test_the_private_names_outside_of_imports_exist() -> None:
    assert "_py_driver_sys_path" in inspect.signature(JobConfig).parameters
    assert ScalingConfig(num_workers=1)._resources_per_worker_not_none == {"CPU": 1}


def test_our_trainer_is_in_front_of_rays() -> None:
    mixin = trainers._ElasticTrainerMixin
    for name in ("_initialize_and_run_controller", "_create_default_callbacks"):
        assert name in vars(mixin)
        assert name in vars(DataParallelTrainer)
