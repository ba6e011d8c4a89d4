"""Trainings of one loop on a cluster of this machine, one after the other."""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect_elastic_train import blocks
from prefect_elastic_train.core.operator_settings import get_settings
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.records import Owner
from prefect_elastic_train.core.request import FORK_SERVER_VARIABLE, Payload, RunRequest
from prefect_elastic_train.driver.interruptions import interruptions
from prefect_elastic_train.orchestration.arguments import driver_spec, pickled
from prefect_elastic_train.rehearsal.course import Course
from prefect_elastic_train.rehearsal.nodes import COMMAND, Nodes
from prefect_elastic_train.runs.identity import fingerprint
from prefect_elastic_train.supervisor.runtime import Runtime

Looks = Generator[None, None, None]
OnLine = Callable[[str, str], None]  # source and text
_ALLOWANCE = 3  # failures more than are played


class Enough(BaseException):
    """The training has shown what it was to show."""


class Stage:
    """A cluster with a node for each of the ``max_workers``, and the trainings on it, whose runs are in ``folder``."""

    def __init__(
        self, payload: Payload, framework: str, scaling: blocks.ElasticScaling, folder: Path, on_line: OnLine
    ) -> None:
        self.folder, self._scaling = folder, scaling
        self._request = RunRequest(
            run_name="",
            owner=Owner(flow_run_id=str(uuid.uuid4())),
            fingerprint=fingerprint(payload.train_loop, framework, payload.train_loop_config),
            payload=pickled(payload),
            has_datasets=bool(payload.datasets),
        )
        self._course = Course()
        self._looks: Looks
        self._runtime = Runtime(get_settings(), lambda event: self._course.handle(event), on_line, self._look)
        self._interruptions = interruptions()
        self._devices: dict[str, int] = {}  # the first GPU of each node
        self.outage = folder / "outage"  # the storage does not answer while this file is there
        #: Whether the training goes on while a node is missing.
        self.can_shrink = scaling.min_workers < scaling.max_workers
        self.nodes: Nodes
        self.ends_at = math.inf  # seconds since the epoch at which a training is cut off

    def open(self) -> None:
        """Start the cluster."""
        token = uuid.uuid4().hex
        variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}
        # A killed node is noticed in two seconds.
        health = {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "4"}
        if self._scaling.accelerator == "cpu" and not self._request.has_datasets:
            variables[FORK_SERVER_VARIABLE] = str(self.folder / "fork")
        nodes = self._runtime.start_beside((*COMMAND, self._request.framework), variables | health)
        self.nodes = Nodes(nodes, int(self._request.has_datasets))
        self._cluster = blocks.RayCluster(address=self.nodes.address, auth_token=token)

    def close(self) -> None:
        """End everything that was started."""
        self._runtime.close()

    def add_node(self) -> None:
        """Add a node for one worker; one for GPUs has those that no other node has."""
        from prefect_elastic_train.elastic.cluster import resources_per_worker  # it loads Ray

        wanted = dict(resources_per_worker(self._scaling))
        node: dict[str, Any] = {"num_cpus": math.ceil(wanted.pop("CPU", 0)) or 1}
        first, gpus = 0, math.ceil(wanted.pop("GPU", 0))
        if gpus:
            while first in [self._devices[one] for one in self.nodes.ids]:
                first += gpus
            seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(first + gpus)))
            visible = ",".join(seen.split(",")[first : first + gpus])
            node |= {"num_gpus": gpus, "env_vars": {"CUDA_VISIBLE_DEVICES": visible}}
        self._devices[self.nodes.add(**node, resources=wanted)] = first

    def train(
        self, name: str, failures: int, stall_seconds: float, play: Callable[[Course], Looks]
    ) -> tuple[Course, str]:
        """Train until the loop has returned or the play is over; return why it ended else, in words.

        So many failures are played, which is gone on with several times a second; where there are none, no standby
        worker is needed.
        """
        while len(self.nodes.ids) < self._scaling.max_workers:
            self.add_node()
        allowed, why = failures + _ALLOWANCE, ""
        often: dict[str, Any] = {"resize_check_interval_seconds": 1.0, "stability_delay_seconds": 0.0}
        often |= {} if failures else {"standby": "off"}
        given = {
            "scaling": self._scaling.model_copy(update=often),
            "failures": blocks.FailureBudget(
                max_failures=allowed,
                driver_restarts=allowed,
                max_attempts_without_progress=_ALLOWANCE,
                stall_timeout_seconds=stall_seconds,
            ),
            "checkpoints": blocks.CheckpointPolicy(),  # all are kept, to find those of the same progress among
            "storage": blocks.LocalStorage(path=str(self.folder), preflight=False),
            "cluster": self._cluster,
        }
        spec = driver_spec(replace(self._request, run_name=name), given)
        spec.storage._outage = str(self.outage)
        self._course = course = Course()
        self._looks = play(course)
        try:
            while not why and not course.is_complete:
                ended = self._runtime.run_attempt(spec)
                course.is_complete = ended.outcome is Outcome.COMPLETED
                why = "" if course.is_complete or ended.outcome.retryable else ended.message
                spec = replace(spec, previous_end=ended.message)
        except Enough:
            pass
        except AttemptFailedError as error:
            why = str(error)
        finally:
            self._looks.close()
        return course, why

    def _look(self) -> None:
        if interruptions() > self._interruptions:  # an import of a Cython module drops the exception of the handler
            raise KeyboardInterrupt
        if next(self._looks, Enough) is Enough or time.time() > self.ends_at:
            raise Enough
