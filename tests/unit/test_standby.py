"""Which standby workers are booted, and which are taken, as far as that needs no cluster."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import cloudpickle
import psutil
import pytest
import torch.distributed as dist
from ray.exceptions import GetTimeoutError
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2._internal.execution.worker_group.worker import ActorMetadata

from prefect_elastic_train.controller import standby
from prefect_elastic_train.controller.standby import Standby, Standbys
from prefect_elastic_train.core.settings import ScalingSettings
from prefect_elastic_train.loop.context import RunContext
from prefect_elastic_train.worker import standby_process, worker_callbacks
from prefect_elastic_train.worker.worker_callbacks import WorkerHooks

GIB, NODE = 2**30, "ab" * 28


class Actor:
    """An actor that is warm, boots still, or is gone."""

    def __init__(self, name: str, node: str, state: str) -> None:
        self.name, self.node, self.state, self.done = name, node, state, list[Any]()
        self.execute = SimpleNamespace(remote=self._execute)

    def _execute(self, function: Any, *arguments: Any) -> Any:
        self.done.append((function, arguments))
        return SimpleNamespace(actor=self, said=(GIB, _metadata(self.node)))


def _metadata(node: str) -> ActorMetadata:
    return ActorMetadata(hostname=node, node_id=node, node_ip=node, pid=1, accelerator_ids={})


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A cluster that answers at once, and what it has booted and ended."""
    found = SimpleNamespace(booted=[], ended=[], told=[], nodes={}, devices={})

    def get(asked, timeout):
        if asked.actor.state == "gone":
            raise RuntimeError("the actor died")
        if asked.actor.state == "boots":
            raise GetTimeoutError
        return asked.said

    def remote(**how):
        def boot():
            found.booted.append(how)
            return Actor("new", NODE, "boots")

        return lambda kind: SimpleNamespace(remote=boot)

    monkeypatch.setattr(standby, "ray", SimpleNamespace(get=get, kill=found.ended.append, remote=remote))
    monkeypatch.setattr(standby, "query_workers", lambda workers, *_: {})
    monkeypatch.setattr(standby, "placement_group_table", lambda group: {"bundles_to_node_id": found.nodes})
    monkeypatch.setattr(standby, "_bundle_devices", lambda group, indices, resources: found.devices)
    return found


def _parked(*standbys: tuple[str, str, str]) -> Standbys:
    """Those parked of so many nodes, which see so many GPUs, in a state."""
    pool = Standbys("torch", "auto", lambda event: None)
    pool.after_worker_group_training_start(SimpleNamespace(get_workers=list))
    for node, visible, state in standbys:
        actor = Actor(f"{node}/{visible}/{state}", node, state)
        metadata = _metadata(node) if state != "boots" else None
        worker = SimpleNamespace(metadata=_metadata(node))
        pool._parked.append(Standby(actor, worker, visible, actor._execute(None), metadata))
    return pool


def _status(report: object, drain: object = None) -> SimpleNamespace:
    return SimpleNamespace(
        worker_statuses={0: SimpleNamespace(training_report=report)}, get_preemption_info=lambda: drain
    )


def test_warm_workers_are_taken_on_the_nodes_of_the_new_group_and_all_others_are_ended(
    cluster: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = [("a", "gone"), ("a", "warm"), ("a", "warm"), ("a", "boots"), ("b", "gone"), ("c", "warm")]
    pool = _parked(*((node, "", state) for node, state in kinds))
    monkeypatch.setattr(pool, "_collect", lambda: None)  # they die in this moment
    cluster.nodes = {0: "a", 1: "b", 2: "a", 3: "a"}
    taken = pool.assign(None, [0, 1, 2, 3], {"CPU": 1})  # type: ignore[arg-type]
    assert {index: worker.metadata.node_id for index, worker in taken.items()} == {0: "a", 2: "a"}
    assert taken[0].actor is not taken[2].actor
    assert sorted(actor.name for actor in cluster.ended) == ["a//boots", "a//gone", "b//gone", "c//warm"]
    assert pool._parked == []
    assert _parked(("a", "", "boots")).assign(None, [0, 1], {"CPU": 1}) == {}  # type: ignore[arg-type]


def test_a_worker_takes_over_the_devices_of_its_place_and_none_that_sees_others_is_taken(
    cluster: SimpleNamespace,
) -> None:
    pool = _parked(("a", "0,1", "warm"), ("a", "0,1", "warm"), ("b", "3", "warm"))
    cluster.nodes = {0: "a", 1: "a", 2: "b"}
    cluster.devices = {0: {"GPU": ["1"]}, 1: {"GPU": ["0"]}, 2: {"GPU": ["2"]}}
    taken = pool.assign(None, [0, 1, 2], {"GPU": 1})  # type: ignore[arg-type]
    assert sorted(taken) == [0, 1]
    for index, worker in taken.items():
        assert worker.metadata.accelerator_ids == cluster.devices[index]
        assert (standby.set_assigned_devices, (cluster.devices[index],)) in worker.actor.done
    assert [actor.name for actor in cluster.ended] == ["b/3/warm"]


@pytest.mark.parametrize(
    ("free", "mode", "fit"),
    [(10 * GIB, "auto", 2), (0.8 * GIB, "auto", 1), (0.6 * GIB, "auto", 0), (0, "on", 2), (10 * GIB, "off", None)],
)
def test_a_node_gets_as_many_as_it_has_memory_for(
    cluster: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, free: float, mode: str, fit: int | None
) -> None:
    monkeypatch.setattr(
        standby,
        "query_workers",
        lambda workers, *_: dict.fromkeys(range(len(workers)), (free - 0.3 * GIB * len(pool._parked), "8")),
    )
    pool = Standbys("torch", mode, cluster.told.append)
    workers = [SimpleNamespace(rank=rank, metadata=_metadata(NODE)) for rank in range(2)]
    run = SimpleNamespace(run_config=SimpleNamespace(worker_runtime_env={"env_vars": {"A": "b"}}))
    group = SimpleNamespace(
        get_workers=lambda: workers,
        _worker_cls=object,
        _train_run_context=run,
        _get_worker_runtime_env=WorkerGroup._get_worker_runtime_env,
    )
    pool.after_worker_group_training_start(group)
    for status in (_status(None), _status("report", drain="of a node")):
        pool.after_worker_group_poll_status(status)
        assert cluster.booted == []  # the group has only just begun, or will end
    for _ in range(3):
        pool._has_reported = False
        pool.after_worker_group_poll_status(_status("report"))
        for one in pool._parked:
            one.actor.state = "warm"
            assert (standby.warm_up, ("", "torch", "8")) in one.actor.done
    booted = [(how["runtime_env"], how["num_cpus"], how["scheduling_strategy"].node_id) for how in cluster.booted]
    assert booted == [({"env_vars": {"A": "b"}}, 0, NODE)] * (fit or 0)
    told = [(event.parked, event.wanted, event.size_bytes) for event in cluster.told]
    assert told == [] if fit is None else [(fit, 2, GIB if fit else 0)]


def test_those_that_die_are_booted_ever_more_seldom_and_none_stands_by_for_hours_of_waiting(
    cluster: SimpleNamespace,
) -> None:
    pool = _parked(("a", "", "gone"), ("a", "", "gone"), ("a", "", "warm"))
    pool.after_worker_group_poll_status(_status("report"))
    assert pool._next_check - time.monotonic() > 3.9 * standby._CHECK_SECONDS
    pool._pause_seconds, pool._next_check = 1e9, 0.0
    pool.after_worker_group_poll_status(_status("report"))
    assert pool._next_check - time.monotonic() <= standby._MAX_PAUSE_SECONDS
    assert [actor.name for actor in cluster.ended] == ["a//gone"] * 2
    pool.release()
    assert [actor.name for actor in cluster.ended] == ["a//gone"] * 2 + ["a//warm"]


def test_only_where_all_workers_of_a_node_see_its_gpus_are_these_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {
        (accelerator, framework)
        for accelerator in ("cpu", "gpu", "tpu")
        for framework in ("torch", "jax", "none")
        if standby.can_use_standbys(ScalingSettings(accelerator=accelerator), framework)
    }
    assert chosen == {("cpu", "torch"), ("cpu", "jax"), ("cpu", "none"), ("gpu", "torch")}
    monkeypatch.setenv("TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES", "0")
    for unable in (ScalingSettings(accelerator="gpu"), ScalingSettings(resources_per_worker={"neuron_cores": 1})):
        assert not standby.can_use_standbys(unable, "torch")


@pytest.mark.parametrize("devices", [{"GPU": ["0"]}, {}])
def test_a_worker_with_devices_waits_for_the_end_of_those_before_it_on_its_node_however_it_was_started(
    monkeypatch: pytest.MonkeyPatch, devices: dict[str, list[str]]
) -> None:
    before, elsewhere = [subprocess.Popen(["sleep", duration]) for duration in ("1", "60")]
    try:
        callback = WorkerHooks(RunContext("run", "", 1, "", ""))
        workers = [("n0", before.pid), ("n1", elsewhere.pid)]
        callback.begin_group(0)
        callback.previous = workers
        context = SimpleNamespace(get_node_id=lambda: "n0", get_accelerator_ids=lambda: {"GPU": [], **devices})
        monkeypatch.setattr(standby_process.ray, "get_runtime_context", lambda: context)
        sent = cloudpickle.loads(cloudpickle.dumps(callback))  # as to each worker
        monkeypatch.setattr(worker_callbacks, "set_gloo_interface", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sent.after_init_train_context()
        assert [psutil.pid_exists(one.pid) for one in (before, elsewhere)] == [not devices, True]
    finally:
        for process in (before, elsewhere):
            process.kill()
            process.wait()


def test_gloo_uses_the_interface_of_the_nodes_address_unless_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    name, address = next((name, one.address) for name, all_of_it in psutil.net_if_addrs().items() for one in all_of_it)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: address)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    worker_callbacks.set_gloo_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == name
    assert dist.ProcessGroupGloo.create_device(interface=name) is not None  # torch accepts it
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    worker_callbacks.set_gloo_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"


WARM_UP = """
import os, sys
from prefect_elastic_train.worker import standby_process as warming
warming.process_state = lambda: (1, None)
assert warming.warm_up("", sys.argv[1], "2") == (1, None)
if sys.argv[1] == "torch":
    import torch
    assert torch.get_num_threads() == min(2, os.cpu_count())
else:
    from jax._src import xla_bridge
    assert not xla_bridge.backends_are_initialized()
"""


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_warm_process_is_as_a_new_one_but_for_what_it_has_imported(framework: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # from Ray
    subprocess.run([sys.executable, "-c", WARM_UP, framework], env=environment, check=True, timeout=120)
