"""Trainings of one loop, one after the other, on a Ray cluster of this machine."""

import math
import time
import uuid
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect_elastic_train import blocks
from prefect_elastic_train.blocks.lookup import Blocks, load_block
from prefect_elastic_train.core.events import Event
from prefect_elastic_train.core.operator_settings import get_settings
from prefect_elastic_train.core.outcomes import AttemptFailedError, ConfigurationError, Outcome
from prefect_elastic_train.core.payload import Payload
from prefect_elastic_train.core.records import Owner
from prefect_elastic_train.core.request import FORK_SERVER_VARIABLE, RunRequest
from prefect_elastic_train.driver.termination_signals import count_signals
from prefect_elastic_train.orchestration.arguments import driver_spec, pickle_payload
from prefect_elastic_train.runs.fingerprints import fingerprint
from prefect_elastic_train.supervisor.devices import visible_gpus
from prefect_elastic_train.supervisor.follower import Follower
from prefect_elastic_train.supervisor.training_processes import TrainingProcesses

from .node_cluster import COMMAND, NodeCluster
from .trace import Trace

#: A generator that the sandbox continues several times a second during a training. Its end stops the training.
Scenario = Generator[None, None, None]
#: Failures that a training survives in addition to the injected faults.
_SPARE_FAILURES = 3


def sandbox_scaling(scaling: blocks.ElasticScaling | str | None, workers: int) -> blocks.ElasticScaling:
    """Load the ``ElasticScaling`` block, and return a copy adapted to the cluster of a rehearsal.

    That cluster runs on this machine and has one node for each worker.

    Raises:
        ConfigurationError: The block cannot be loaded, is for TPUs, or needs more GPUs than this process may use.
    """
    block: blocks.ElasticScaling = load_block("scaling", scaling)
    if block.accelerator == "tpu":
        raise ConfigurationError("a TPU host cannot be divided into nodes; rehearse the loop with accelerator 'cpu'")
    gpus = workers * math.ceil(block.resources_per_worker.get("GPU", block.accelerator == "gpu"))
    available = visible_gpus()
    if available and gpus > len(available):
        raise ConfigurationError(
            f"{workers} workers need {gpus} GPUs, and this process may use {len(available)}; use fewer workers"
        )
    return block.model_copy(
        update={
            "max_workers": workers,
            "min_workers": min(block.min_workers, workers),
            "wait_for_max_seconds": 30.0,
            "resize_check_interval_seconds": 1.0,
            "stability_delay_seconds": 0.0,
            "label_selector": {},
            "placement_strategy": "PACK",
        }
    )


class StopTraining(BaseException):
    """Raised by the sandbox to stop a training whose scenario has ended or whose time is up."""


class Sandbox(Follower):
    """Sandbox of a rehearsal: a Ray cluster with one node for each of ``max_workers``, and the trainings on it.

    Attributes:
        folder: Folder with the run directories of the trainings.
        outage: Path of a file. While it exists, the storage does not respond.
        can_shrink: True if the training continues while a node is missing.
        ends_at: Time at which a training is stopped, in seconds since the epoch.
    """

    nodes: NodeCluster

    def __init__(
        self,
        payload: Payload,
        framework: str,
        scaling: blocks.ElasticScaling,
        folder: Path,
        on_line: Callable[[str, str], None],
    ) -> None:
        self.folder = folder
        self.outage = folder / "outage"
        self.can_shrink = scaling.min_workers < scaling.max_workers
        self.ends_at = math.inf
        self._scaling = scaling
        self._request = RunRequest(
            run_name="",
            owner=Owner(flow_run_id=str(uuid.uuid4())),
            fingerprint=fingerprint(payload.train_loop, framework, payload.train_loop_config),
            payload=pickle_payload(payload),
            has_datasets=bool(payload.datasets),
        )
        self.on_line = on_line  # type: ignore[assignment]
        self._runtime = TrainingProcesses(get_settings(), self)
        self._signals = count_signals()
        self._gpus: dict[str, list[str]] = {}  # of each node, by the id of the node

    def open(self) -> None:
        """Start the rehearsal's Ray cluster, with its head only. :meth:`train` adds the nodes for workers."""
        token = uuid.uuid4().hex
        variables = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": token,
            "RAY_USAGE_STATS_ENABLED": "0",
            # Ray detects a killed node within two seconds.
            "RAY_health_check_period_ms": "500",
            "RAY_health_check_failure_threshold": "4",
        }
        if self._scaling.accelerator == "cpu":
            variables[FORK_SERVER_VARIABLE] = str(self.folder / "fork")
        process = self._runtime.start_helper_process((*COMMAND, self._request.framework), variables)
        self.nodes = NodeCluster(process, int(self._request.has_datasets))
        self._cluster = blocks.RayCluster(address=self.nodes.address, auth_token=token)

    def close(self) -> None:
        """Kill all processes that the sandbox has started: the Ray cluster and the drivers."""
        self._runtime.close()

    def add_node(self) -> None:
        """Add a node with the resources of one worker to the Ray cluster. Its GPUs are those that no other node has."""
        from prefect_elastic_train.driver.ray_configs import resources_per_worker  # imports Ray

        resources = resources_per_worker(self._scaling)
        node: dict[str, Any] = {"num_cpus": math.ceil(resources.pop("CPU", 0)) or 1}
        gpus = math.ceil(resources.pop("GPU", 0))
        taken = [gpu for node_id in self.nodes.ids for gpu in self._gpus[node_id]]
        own = [gpu for gpu in visible_gpus() if gpu not in taken][:gpus]
        if gpus:
            node |= {"num_gpus": gpus, "env_vars": {"CUDA_VISIBLE_DEVICES": ",".join(own)}}
        self._gpus[self.nodes.add(**node, resources=resources)] = own

    def train(
        self, name: str, fault_count: int, stall_timeout_seconds: float, start_scenario: Callable[[Trace], Scenario]
    ) -> Trace:
        """Train the loop on the Ray cluster until it returns, the scenario ends or the training fails.

        It keeps all checkpoints. Return its trace.

        Args:
            name: Name of the run.
            fault_count: Number of faults that the scenario injects.
            stall_timeout_seconds: As in ``FailureBudget``.
            start_scenario: Returns the scenario for the trace of the training.
        """
        while len(self.nodes.ids) < self._scaling.max_workers:
            self.add_node()
        chosen = Blocks(
            scaling=self._scaling,
            failures=blocks.FailureBudget(
                max_failures=fault_count + _SPARE_FAILURES,
                driver_restarts=fault_count + _SPARE_FAILURES,
                max_attempts_without_progress=_SPARE_FAILURES,
                stall_timeout_seconds=stall_timeout_seconds,
            ),
            checkpoints=blocks.CheckpointPolicy(),
            storage=blocks.LocalStorage(path=str(self.folder), preflight=False),
            cluster=self._cluster,
        )
        spec = driver_spec(replace(self._request, run_name=name), chosen)
        spec.storage._outage = str(self.outage)
        self._trace = trace = Trace(folder=self.folder / name)
        self._scenario = start_scenario(trace)
        try:
            while (ended := self._runtime.run_attempt(spec)).outcome.retryable:
                pass  # the next attempt has a new driver
            trace.is_complete = ended.outcome is Outcome.COMPLETED
            if not trace.is_complete:
                trace.failure = ended.message
        except StopTraining:
            pass
        except AttemptFailedError as error:
            trace.failure = str(error)
        finally:
            self._scenario.close()
        return trace

    def on_event(self, event: Event, replayed: bool) -> None:
        self._trace.handle(event)

    def check_stop(self) -> None:
        """Continue the training's scenario.

        Raise StopTraining if the scenario has ended or the rehearsal's time is up, and KeyboardInterrupt after a
        termination signal. It is called several times a second during a training.
        """
        if count_signals() > self._signals:  # an import of a Cython module can drop the handler's exception
            raise KeyboardInterrupt
        if next(self._scenario, StopTraining) is StopTraining or time.time() > self.ends_at:
            raise StopTraining
