"""Runs a rehearsal, from the undisturbed training to the certificate."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact
from prefect.context import FlowRunContext

from prefect_elastic_train.blocks import ElasticScaling
from prefect_elastic_train.core.outcomes import ConfigurationError, ElasticTrainError
from prefect_elastic_train.core.payload import Payload
from prefect_elastic_train.driver.termination_signals import watch_signals
from prefect_elastic_train.orchestration.arguments import check_options
from prefect_elastic_train.runs.fingerprints import train_loop_name
from prefect_elastic_train.runs.run_directory import RunDirectory
from prefect_elastic_train.runs.sample_check import check_samples
from prefect_elastic_train.storage.store import LocalRunStore

from .certificate import Certificate, Problem
from .comparison import RESIZE_TOLERANCE, compare_trainings, diagnose_undisturbed
from .fault_injector import FaultInjector, run_undisturbed
from .sandbox import Sandbox, sandbox_scaling
from .schedule import GROWTH, KINDS, NODE, PlannedFault, schedule_faults
from .trace import Trace

#: Share of the rehearsal for the undisturbed training, and the least time for it.
_UNDISTURBED_SHARE = 0.15
_MIN_UNDISTURBED_SECONDS = 12.0
#: Least stall timeout of the undisturbed training, and of the trainings under faults.
_UNDISTURBED_STALL_SECONDS = 60.0
_MIN_STALL_SECONDS = 15.0
#: Stall timeout of a training under faults, relative to the longest time between two reports.
_STALL_FACTOR = 2.0
_RECOVERY_SECONDS = 120.0
_MAX_TRAININGS = 5
#: A rehearsal is stopped after this many times its ``minutes``.
_MAX_OVERRUN = 3.0


def rehearse(
    train_loop: Callable[..., Any] | str,
    train_loop_config: Any = None,
    *,
    framework: str = "torch",
    scaling: ElasticScaling | str | None = None,
    workers: int = 2,
    faults: Sequence[str] = KINDS,
    minutes: float = 10.0,
    seed: int = 0,
    tolerance: float = RESIZE_TOLERANCE,
    datasets: Any = None,
    torch_config: Any = None,
    jax_config: Any = None,
    save_to: str | Path | None = None,
    tell: Callable[[str], None] | None = None,
    on_line: Callable[[str, str], None] | None = None,
) -> Certificate:
    """Train a loop undisturbed and then under faults, on a cluster of this machine, and compare the two trainings.

    Both stop early, so use a config with which the loop saves several times a minute. Only the certificate is kept. In
    a flow it is also an artifact of the flow run. ``train_loop``, ``train_loop_config``, ``framework``, ``datasets``,
    ``torch_config`` and ``jax_config`` are those of ``elastic_train``.

    Args:
        scaling: The ``ElasticScaling`` block or its name: resources per worker, and ``min_workers``.
        workers: Number of workers of the undisturbed training.
        faults: Kinds of faults to inject: "worker", "driver", "freeze", "storage", "node", "drain", "growth".
        minutes: Approximate duration. After three times that, the rehearsal stops, and the certificate does not pass.
        seed: Random seed of the fault schedule.
        tolerance: Limit for the norm of the state's difference soon after a change of the number of workers. Use 0.01
            for bfloat16, and 0.1 with dropout, which draws other numbers on other ranks.
        save_to: Folder for the certificate as JSON and Markdown, also if the rehearsal fails. None: it is not written.
        tell: Called with each line of progress.
        on_line: Called with source and text of each line of output of the drivers and workers.

    Raises:
        ConfigurationError: The arguments are wrong; nothing was started.
        ElasticTrainError: The cluster does not start, or the loop fails undisturbed.
    """
    watch_signals()
    check_options({"framework": framework, "timeout_seconds": 60 * minutes})
    if not faults or not {*faults} <= {*KINDS} or workers < 1:
        raise ConfigurationError(
            f"faults={list(faults)!r}, workers={workers!r}: give at least one worker, and some of the faults "
            f"{', '.join(KINDS)}"
        )
    block = sandbox_scaling(scaling, workers)
    payload = Payload(train_loop, train_loop_config, datasets, torch_config=torch_config, jax_config=jax_config)
    certificate = Certificate(
        loop=train_loop_name(train_loop),
        framework=framework,
        workers=" to ".join(map(str, sorted({block.min_workers, block.max_workers}))),
        seed=seed,
        at=time.time(),
        versions={package: version(package) for package in ("prefect-elastic-train", "ray", "prefect")},
    )
    try:
        with (
            tempfile.TemporaryDirectory(prefix="rehearsal-") as folder,
            closing(Sandbox(payload, framework, block, Path(folder), on_line or _ignore)) as sandbox,
        ):
            _Rehearsal(certificate, sandbox, 60 * minutes, tolerance, tell or _ignore).run(faults)
    except BaseException as error:  # also KeyboardInterrupt
        certificate.add(Problem("rehearsal incomplete", f"{type(error).__name__} {error}".strip()))
        raise
    finally:
        certificate.seconds = round(time.time() - certificate.at, 1)
        if save_to is not None:
            certificate.save(Path(save_to))
    if FlowRunContext.get():
        create_markdown_artifact(
            certificate.markdown(), key="elastic-train-rehearsal", description=f"rehearsal of {certificate.loop}"
        )
    return certificate


def _ignore(*_: str) -> None:
    """Ignore a line of progress or output: the default of ``tell`` and ``on_line`` of :func:`rehearse`."""


@dataclass
class _Rehearsal:
    """Rehearsal of a train loop: its trainings, undisturbed and under faults, whose results fill in a certificate."""

    certificate: Certificate
    sandbox: Sandbox
    seconds: float
    tolerance: float
    log: Callable[[str], None]

    def run(self, kinds: Sequence[str]) -> None:
        """Train the loop undisturbed, then under faults of these kinds, and record the results in the certificate.

        No fault is injected if a worker fails undisturbed, or if there is no checkpoint to resume from.

        Raises:
            ElasticTrainError: The cluster does not start, or the undisturbed training fails and no worker has failed.
        """
        self.sandbox.ends_at = self.certificate.at + _MAX_OVERRUN * self.seconds
        self.log("starting a cluster")
        self.sandbox.open()
        self.log("training undisturbed")
        seconds = max(_MIN_UNDISTURBED_SECONDS, _UNDISTURBED_SHARE * self.seconds)
        trace = self.sandbox.train(
            "undisturbed", 0, max(_UNDISTURBED_STALL_SECONDS, seconds), partial(run_undisturbed, seconds=seconds)
        )
        self.log(f"undisturbed: {len(trace.reports)} reports, {len(trace.saves)} checkpoints")
        if trace.failure and not trace.worker_failures:
            raise ElasticTrainError(f"the loop fails without any fault: {trace.failure}")
        if problem := diagnose_undisturbed(trace, time.time() > self.sandbox.ends_at):
            self.certificate.add(problem)
            self.certificate.compared = "no fault was injected, since there is no checkpoint to resume from"
            return
        faults = schedule_faults(kinds, self.certificate.seed, self.sandbox.can_shrink)
        self._train_under_faults(trace, faults, _RECOVERY_SECONDS + seconds)

    def _train_under_faults(self, undisturbed: Trace, faults: list[PlannedFault], recovery_seconds: float) -> None:
        """Train the loop under faults, several times if needed, and compare each training with the undisturbed one.

        No other training follows when all faults are injected, the loop does not recover, a training had no fault, or
        the time is up. The results are recorded in the certificate.
        """
        counter = undisturbed.counter()
        target = (undisturbed.reports if undisturbed.is_complete else undisturbed.saves)[-1].progress(counter)
        times = [undisturbed.started_at, *undisturbed.progress_times]
        longest = max(after - before for before, after in pairwise(times))
        stall_timeout = max(_MIN_STALL_SECONDS, _STALL_FACTOR * longest)
        for number in range(1, _MAX_TRAININGS + 1):
            if faults[0].kind == GROWTH:  # the previous training ended between the loss of a node and the growth
                faults.insert(0, faults[0]._replace(kind=NODE))
            self.log(f"training under faults: {', '.join(fault.kind for fault in faults)}")
            injector = FaultInjector(self.sandbox, faults, counter, target, recovery_seconds + stall_timeout, self.log)
            trace = self.sandbox.train(f"disturbed-{number}", len(faults), stall_timeout, injector.inject_faults)
            self.certificate.faults += injector.injected
            if trace.reports:
                self._compare(undisturbed, trace)
            if trace.failure:
                self.certificate.add(Problem("does not recover", trace.failure))
            shutil.rmtree(trace.folder, ignore_errors=True)
            if trace.failure or not faults or not injector.injected or time.time() > self.sandbox.ends_at:
                break
        if faults:
            self.certificate.add(
                Problem(
                    "rehearsal incomplete",
                    f"not injected: {', '.join(fault.kind for fault in faults)}",
                    "give it more minutes, and a config with which the loop trains longer and saves more often",
                )
            )

    def _compare(self, undisturbed: Trace, trace: Trace) -> None:
        """Compare a training under faults with the undisturbed one, and check the samples that it has trained on.

        Add the problems to the certificate. Of several comparisons, record the first one with a problem, or else the
        one with the largest difference.
        """
        comparison, problem = compare_trainings(undisturbed, trace, self.tolerance)
        is_largest = (comparison.difference or 0.0) >= (self.certificate.difference or 0.0)
        if not self.certificate.findings and (problem or is_largest):
            self.certificate.compared = comparison.compared
            self.certificate.difference = comparison.difference
        if problem:
            self.certificate.add(problem)
        check = check_samples(RunDirectory(LocalRunStore(str(trace.folder))))
        if check and not check.unknown:
            self.certificate.samples = self.certificate.samples or check.message
            if check.wrong or not check.exact:
                self.certificate.add(Problem("samples", check.message))
