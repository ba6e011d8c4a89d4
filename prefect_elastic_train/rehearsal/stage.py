"""Trainings of one loop on a cluster of this machine, one after the other."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect_elastic_train.core import settings
from prefect_elastic_train.core.events import Event
from prefect_elastic_train.core.operator_settings import get_settings
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.records import Owner
from prefect_elastic_train.core.request import DriverSpec, Payload, RunRequest, dump_payload
from prefect_elastic_train.core.storage_settings import LocalStorageSettings
from prefect_elastic_train.rehearsal.course import Course
from prefect_elastic_train.rehearsal.nodes import COMMAND, Nodes
from prefect_elastic_train.runs.identity import fingerprint
from prefect_elastic_train.supervisor.runtime import Runtime, import_path

_KEEP = 20  # checkpoints, to find those of the same progress among
_ALLOWANCE = 3  # failures more than are played


class Enough(BaseException):
    """The training has shown what it was to show."""


class Stage:
    """A cluster with a node for each worker, and the trainings on it, one at a time.

    Args:
        payload: The loop and what it gets.
        scaling: Of the rehearsal; its ``max_workers`` are how many nodes there are.
        folder: Where the runs are; it outlives the stage.
        on_line: Called with each line of the drivers' output: where it came from, and the text.
    """

    def __init__(
        self,
        payload: Payload,
        framework: str,
        scaling: settings.ScalingSettings,
        folder: Path,
        on_line: Callable[[str, str], None],
    ) -> None:
        self._payload, self._framework, self._pickled = payload, framework, dump_payload(payload)
        often = {"resize_check_interval_seconds": 1.0, "stability_delay_seconds": 0.0}
        self._scaling = scaling.model_copy(update=often)
        self._course = Course()
        self._player: Callable[[Course], None] = lambda course: None
        self._runtime = Runtime(get_settings(), self._take, on_line, lambda: self._player(self._course))
        self._devices: dict[str, range] = {}
        #: Where the runs are, and the file that keeps the storage from answering.
        self.folder, self.outage = folder, folder / "outage"
        #: Whether the training goes on while a node is missing.
        self.can_shrink = scaling.min_workers < scaling.max_workers
        self.nodes: Nodes

    def open(self) -> None:
        """Start the cluster."""
        token = uuid.uuid4().hex
        variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}
        # A killed node is noticed in two seconds.
        health = {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "4"}
        process = self._runtime.start_beside(COMMAND, variables | health)
        self.nodes = Nodes(process, head_cpus=int(bool(self._payload.datasets)))
        self._cluster = settings.ClusterSettings(address=self.nodes.address, auth_token=token)

    def close(self) -> None:
        """End everything that was started."""
        self._runtime.close()

    def add_node(self) -> None:
        """Add a node for one worker; one for GPUs has those that no other node has."""
        from prefect_elastic_train.elastic.cluster import resources_per_worker  # it loads Ray

        wanted = dict(resources_per_worker(self._scaling))
        node: dict[str, Any] = {"num_cpus": max(1, wanted.pop("CPU", 0))}
        own = range(gpus := int(wanted.pop("GPU", 0)))
        if gpus:
            while own in [self._devices[one] for one in self.nodes.ids]:
                own = range(own.stop, own.stop + gpus)
            node |= {"num_gpus": gpus, "env_vars": {"CUDA_VISIBLE_DEVICES": ",".join(map(str, own))}}
        self._devices[self.nodes.add(**node, resources=wanted)] = own

    def train(
        self, name: str, failures: int, stall_seconds: float, standby: str, player: Callable[[Course], None]
    ) -> tuple[Course, str]:
        """Train until the loop has returned or the player raises :class:`Enough`; return why it ended else, in words.

        Args:
            name: The run's.
            failures: How many are played.
            stall_seconds: Without a report, after which the workers are started anew.
            standby: As of the scaling, which counts if this is empty.
            player: Called several times a second while it trains.
        """
        while len(self.nodes.ids) < self._scaling.max_workers:
            self.add_node()
        self._course, self._player = Course(), player
        spec, why = self._spec(name, failures, stall_seconds, standby), ""
        try:
            while not why and not self._course.is_complete:
                ended = self._runtime.run_attempt(spec)
                self._course.is_complete = ended.outcome is Outcome.COMPLETED
                why = "" if self._course.is_complete or ended.outcome.retryable else ended.message
                spec = replace(spec, previous_end=ended.message)
        except Enough:
            pass
        except AttemptFailedError as error:
            why = str(error)
        return self._course, why

    def _take(self, event: Event) -> None:
        self._course.handle(event)

    def _spec(self, name: str, failures: int, stall_seconds: float, standby: str) -> DriverSpec:
        payload, allowed = self._payload, failures + _ALLOWANCE
        storage = LocalStorageSettings(path=str(self.folder), preflight=False)
        storage._outage = str(self.outage)
        return DriverSpec(
            request=RunRequest(
                run_name=name,
                owner=Owner(flow_run_id=str(uuid.uuid4())),
                fingerprint=fingerprint(payload.train_loop, self._framework, payload.train_loop_config),
                payload=self._pickled,
                has_datasets=bool(payload.datasets),
            ),
            scaling=self._scaling.model_copy(update={"standby": standby} if standby else {}),
            failures=settings.FailureSettings(
                max_failures=allowed,
                driver_restarts=allowed,
                max_attempts_without_progress=_ALLOWANCE,
                stall_timeout_seconds=stall_seconds,
            ),
            checkpoints=settings.CheckpointSettings(keep=_KEEP),
            storage=storage,
            cluster=self._cluster,
            poll_interval_seconds=get_settings().poll_interval(self._scaling.max_workers),
            sys_path=import_path(),
        )
