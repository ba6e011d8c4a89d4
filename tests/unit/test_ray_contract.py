"""What this package relies on inside of Ray, so that a change of Ray is found here and not in the middle of a run."""

import ast
import inspect
import os
import re
import textwrap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.dashboard.modules.dashboard_sdk import SubmissionClient
from ray.job_config import JobConfig
from ray.runtime_env import RuntimeEnv
from ray.train import FailureConfig, RunConfig
from ray.train.constants import JAX_DISTRIBUTED_SHUTDOWN_TIMEOUT_S, TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S
from ray.train.torch.config import _TorchBackend
from ray.train.v2._internal import constants
from ray.train.v2._internal.callbacks.preemption_callback import PreemptionCallback
from ray.train.v2._internal.execution import context, scaling_policy
from ray.train.v2._internal.execution.callback import ReportCallback
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.checkpoint.report_handler import ReportCallbackHandler
from ray.train.v2._internal.execution.preemption import PreemptionWatcher
from ray.train.v2._internal.execution.scaling_policy import autoscaling_coordinator_client as client
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.jax.config import _JaxBackend

from prefect_elastic_train import blocks
from prefect_elastic_train.blocks.lookup import Blocks
from prefect_elastic_train.controller import controller, standby, worker_group
from prefect_elastic_train.controller import scaling_policy as our_scaling_policy
from prefect_elastic_train.core.outcomes import AttemptFailedError, ConfigurationError, Outcome
from prefect_elastic_train.core.request import PRINT_PATCH
from prefect_elastic_train.core.version import ray_minor, untested_ray
from prefect_elastic_train.driver import ray_contract, trainer
from prefect_elastic_train.orchestration import arguments
from prefect_elastic_train.runs import layout
from tests.unit.support import REPOSITORY, claim, needs_ray_2_60

PACKAGE = REPOSITORY / "prefect_elastic_train"
TREES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
#: Files that may use Ray's internals. A wrong TPU topology is refused when the form is sent, before controller/ is
#: imported, and the package of a job is made in the supervisor.
ALLOWED = (
    "controller/",
    "worker/",
    "driver/trainer.py",
    "loop/ray_data.py",
    "driver/joining.py",
    "driver/ray_configs.py",
    "core/tpu_slices.py",
    "supervisor/job_client.py",
    "supervisor/cluster_head.py",
    "supervisor/fork_server.py",
    "supervisor/raylet_patches.py",
    "rehearsal/node_cluster.py",
)


def _uses() -> Iterator[tuple[str, str, str]]:
    """Find all imports from Ray in the package, also those inside of functions: file, module and name."""
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ray":
                yield from ((file, str(node.module), alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((file, alias.name, "") for alias in node.names if alias.name.split(".")[0] == "ray")


def test_rays_internals_are_imported_where_that_is_allowed_only_and_each_module_says_why() -> None:
    private = [use for use in _uses() if any(part.startswith("_") for part in f"{use[1]}.{use[2]}".split("."))]
    assert ("controller/callbacks.py", "ray.train.v2._internal.execution.callback", "ControllerCallback") in private
    for file, module, name in private:
        assert file.startswith(ALLOWED), f"{file} imports {module}.{name}"
        assert "Uses ``ray." in (ast.get_docstring(TREES[file]) or ""), file


def test_this_ray_is_tested_and_has_each_name_in_use_with_the_same_parameters() -> None:
    assert not untested_ray()
    later = ["_relax_collectives_during_preemption", "get_reserved_resources"] if ray_minor() < (2, 60) else []
    assert [difference.split()[-1] for difference in ray_contract._missing_attributes()] == later[:1]
    assert [later[1] in difference for difference in ray_contract._changed_functions()] == [True] * bool(later)
    assert [*ray_contract._missing_imports(), *ray_contract._changed_methods()] == []


ATTRIBUTES = {name for names in ray_contract.ATTRIBUTES.values() for name in names.split() if name.startswith("_")}
#: What Ray has only on instances of classes that it does not show, or as an argument; and what is torch's.
_ELSEWHERE = {
    "_replace",  # of named tuples
    "_tick",  # of Ray's coordinator; called before Ray 2.60
    "_base_exc",
    "_traceback_str",
    "_py_driver_sys_path",
    "_is_in_bad_fork",
}


def test_every_private_attribute_of_ray_in_use_is_listed_and_no_other_is() -> None:
    own, found, used = set(), set(), set()
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                own.add(node.target.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own |= {node.attr} if ast.unparse(node.value) == "self" else set()
    for file in (file for file in TREES if file.startswith(ALLOWED)):
        for node in ast.walk(TREES[file]):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                used.add(node.attr)
                if ast.unparse(node.value) not in ("sys", "os") and (
                    node.attr not in own or ast.unparse(node.value) == "super()"
                ):
                    found.add(node.attr)
    assert found - ATTRIBUTES - _ELSEWHERE == set()
    assert ATTRIBUTES - used - own == set()


def test_rays_controller_makes_the_checkpoint_manager_that_its_module_names() -> None:
    assert issubclass(controller.rays_controller.CheckpointManager, CheckpointManager)
    assert "self._checkpoint_manager = CheckpointManager(" in inspect.getsource(
        controller.rays_controller.TrainController.__init__
    )


def test_rays_watcher_of_drains_is_the_one_that_its_module_names_and_looks_again_at_what_was_kept_back() -> None:
    assert "(PreemptionWatcher)" in inspect.getsource(PreemptionCallback.after_worker_group_start)
    (tell,) = _calls(poll := _tree(PreemptionWatcher._poll_once), "_on_drain_change")
    assert f"self._last_drained = {ast.unparse(tell.args[0])}" in ast.unparse(poll)


def test_private_names_that_are_no_attributes_of_a_class_exist() -> None:
    from ray.train.v2._internal.exceptions import UserExceptionWithTraceback

    raised = UserExceptionWithTraceback(ValueError("nan"), traceback_str="Traceback …")
    assert (raised._traceback_str, str(raised._base_exc)) == ("Traceback …", "nan")
    assert "_py_driver_sys_path" in inspect.signature(JobConfig).parameters
    assert {"self._address", "self._verify"} <= set(inspect.getsource(SubmissionClient).split())


@pytest.mark.parametrize(
    ("lacking", "named"),
    [
        (
            "ray.train.v2._internal.execution.callback.ControllerCallback",
            "execution.callback has no ControllerCallback",
        ),
        ("ray.util.tpu.SlicePlacementGroup", "there is no ray.util.tpu:SlicePlacementGroup"),
        ("ray.train.v2.api.data_parallel_trainer.DataParallelTrainer._get_train_func", "has no _get_train_func"),
    ],
)
def test_a_ray_that_is_not_tested_and_lacks_a_name_is_refused_by_that_name(
    monkeypatch: pytest.MonkeyPatch, lacking: str, named: str
) -> None:
    monkeypatch.delattr(lacking)
    ray_contract.check_ray()  # nothing is looked at in a version that is tested
    monkeypatch.setattr(ray_contract, "untested_ray", lambda: "tested, not with 2.99.0")
    with pytest.raises(AttemptFailedError, match=f"not with 2.99.0.*{named}") as refused:
        ray_contract.check_ray()
    assert refused.value.outcome is Outcome.INVALID


@pytest.mark.parametrize(
    ("owner", "name", "named"),
    [
        (StorageContext, "persist_current_checkpoint", r"takes \(self checkpoint other\)"),
        (worker_group.WorkerGroup, "_create_workers", r"takes \(self checkpoint other\)"),
        (ReportCallback, "after_report", "Ray calls no after_report"),
    ],
)
def test_a_method_that_ray_calls_or_takes_otherwise_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, named: str
) -> None:
    def changed(self: Any, checkpoint: Any, other: Any) -> None: ...

    if named.startswith("Ray"):
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, changed)
    differences = [*ray_contract._changed_functions(), *ray_contract._changed_methods()]
    assert [difference for difference in differences if re.search(named, difference)]


@pytest.mark.parametrize("setting", [{"preemption_grace_seconds": 5}, {"relax_collectives_on_preemption": True}])
def test_settings_that_this_ray_does_not_have_are_refused_with_the_version_that_has(
    monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any]
) -> None:
    failures = blocks.FailureBudget(**setting)
    chosen = Blocks(
        blocks.ElasticScaling(),
        failures,
        blocks.CheckpointPolicy(),
        blocks.LocalStorage(path="/r"),
        blocks.RayCluster(),
    )
    monkeypatch.setattr(arguments, "ray_minor", lambda: (2, 59))
    with pytest.raises(ConfigurationError, match=f"{next(iter(setting))} of FailureBudget needs Ray 2.60 or newer"):
        arguments.driver_spec(claim().request, chosen)


def _tree(function):
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def _calls(tree, name):
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if name in (getattr(call.func, "attr", ""), getattr(call.func, "id", ""))]


def test_fit_hands_policy_and_callbacks_by_name_to_the_controller_that_its_module_names() -> None:
    (call,) = _calls(_tree(DataParallelTrainer.fit), "_initialize_and_run_controller")
    assert {keyword.arg for keyword in call.keywords} >= {"scaling_policy", "callbacks", "failure_policy"}
    assert "(TrainController)" in ast.unparse(_tree(DataParallelTrainer._initialize_and_run_controller))
    for name in ("_initialize_and_run_controller", "_create_default_callbacks"):
        assert name in vars(trainer._ElasticTrainerMixin)


def test_the_policy_asks_the_coordinator_as_rays_own_does() -> None:
    call, *_ = _calls(_tree(scaling_policy.ElasticScalingPolicy._get_reserved_resources), "remote")
    assert ast.unparse(call) == "self._autoscaling_coordinator.get_reserved_resources.remote(self._requester_id)"
    (sent,) = _calls(_tree(client.TrainAutoscalingCoordinatorClient.send_resource_request), "remote")
    assert "expire_after_s=AUTOSCALING_REQUESTS_EXPIRE_TIME_S" in ast.unparse(sent)
    assert 2 * client.AUTOSCALING_REQUESTS_INTERVAL_S < our_scaling_policy._RESERVED_SECONDS


def test_ray_writes_its_snapshot_through_the_filesystem_before_it_deletes_checkpoints() -> None:
    tree = _tree(CheckpointManager._save_state_and_delete_old_checkpoints)
    (writes,), deletes = _calls(tree, "_write_state_to_storage"), _calls(tree, "delete_fs_path")
    assert deletes
    assert all(delete.lineno > writes.lineno for delete in deletes)
    (stream,) = _calls(_tree(CheckpointManager._write_state_to_storage), "open_output_stream")
    assert "checkpoint_manager_snapshot_path" in ast.unparse(stream)
    assert constants.CHECKPOINT_MANAGER_SNAPSHOT_FILENAME == layout.SNAPSHOT


def test_ranks_agree_on_a_checkpoints_folder_in_one_place_for_every_way_to_upload() -> None:
    report = _tree(context.TrainContext.report)
    assert len(_calls(report, "_sync_checkpoint_dir_name_across_ranks")) == 1
    assert not _calls(report, "make_default_checkpoint_dir_name")
    (broadcast,) = _calls(_tree(context.TrainContext._sync_checkpoint_dir_name_across_ranks), "remote")
    assert {"data": "checkpoint_dir_name"}.items() <= {k.arg: ast.unparse(k.value) for k in broadcast.keywords}.items()


def test_for_every_way_to_upload_a_report_asks_its_module_once_whether_its_checkpoint_is_in_the_run() -> None:
    assert len(_calls(_tree(context.TrainContext.report), "is_managed_checkpoint")) == 3


def test_ray_says_that_ranks_have_reported_different_folders_in_words_by_which_that_is_known() -> None:
    source = inspect.getsource(ReportCallbackHandler.after_worker_group_poll_status)
    assert all(words in source for words in ("checkpoints are not consistent.", 'checkpoint paths: "'))


def test_the_folder_of_a_checkpoint_is_created_inside_of_the_transfer_hook_in_the_same_thread() -> None:
    blocks = [node for node in ast.walk(_tree(context.TrainContext._upload_checkpoint)) if isinstance(node, ast.With)]
    (block,) = (block for block in blocks if "on_checkpoint_transfer" in ast.unparse(block.items[0]))
    assert _calls(block, "persist_current_checkpoint")
    create, *_ = _calls(_tree(StorageContext.persist_current_checkpoint), "create_dir")
    assert ast.unparse(create) == "self.storage_filesystem.create_dir(checkpoint_fs_path)"


def test_states_decisions_and_workers_carry_what_events_do() -> None:
    assert list(scaling_policy.ResizeDecision.__dataclass_fields__) == ["num_workers", "resources_per_worker"]
    assert "world_rank" in context.DistributedContext.__dataclass_fields__
    assert "distributed_context" in standby.Worker.__dataclass_fields__


def test_workers_need_no_runtime_environment_but_for_what_ray_train_propagates() -> None:
    assert constants.HEALTH_CHECK_INTERVAL_S_ENV_VAR == "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"
    assert constants.ENABLE_PREEMPTION_WATCHER_ENV_VAR == "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"
    assert constants.ENABLE_PRINT_PATCH_ENV_VAR == PRINT_PATCH
    assert PRINT_PATCH in constants.ENV_VARS_TO_PROPAGATE
    assert worker_group.WorkerGroup._get_worker_runtime_env({}) == {"env_vars": {}}
    assert RuntimeEnv(env_vars={}).serialize() == RuntimeEnv().serialize() == "{}"


@needs_ray_2_60
@pytest.mark.parametrize(
    ("asked", "answers", "relaxes"),
    [
        (True, {0: False, 1: False}, True),
        (True, {0: True}, False),
        (True, {}, False),
        (False, {0: False}, False),
    ],
)
def test_survivors_commit_alone_only_if_no_loop_trains_in_a_session(
    monkeypatch: pytest.MonkeyPatch, asked: bool, answers: dict[int, bool], relaxes: bool
) -> None:
    rays, relaxed = controller.rays_controller.TrainController, list[Any]()
    monkeypatch.setattr(rays, "_relax_collectives_during_preemption", lambda self, info: relaxed.append(info))
    monkeypatch.setattr(controller, "query_workers", lambda workers, function: answers)
    made = controller.TrainController.__new__(controller.TrainController)
    made._run_config = RunConfig(failure_config=FailureConfig(relax_collectives_on_preemption=asked))
    made._worker_group = SimpleNamespace(get_workers=list)
    made._relax_collectives_during_preemption("a drain")
    assert relaxed == ["a drain"] * relaxes


def test_the_controller_does_not_wait_long_for_ranks_that_hang_to_part(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S, JAX_DISTRIBUTED_SHUTDOWN_TIMEOUT_S)
    monkeypatch.setattr(os, "environ", {names[1]: "7"})
    controller.limit_process_group_shutdown()
    assert [os.environ[name] for name in names] == ["5", "7"]
    for backend, name in ((_TorchBackend, "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S"), (_JaxBackend, names[1])):
        assert name in inspect.getsource(backend.on_shutdown)  # it is read in the controller, each time
