"""A rehearsal from its first training to its certificate."""

from __future__ import annotations

import glob
import math
import os
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
from prefect_elastic_train.core.request import Payload
from prefect_elastic_train.driver.interruptions import notice_interruptions
from prefect_elastic_train.orchestration.arguments import GivenBlock, check_arguments, load_given
from prefect_elastic_train.rehearsal import judging
from prefect_elastic_train.rehearsal.certificate import Certificate
from prefect_elastic_train.rehearsal.course import Course
from prefect_elastic_train.rehearsal.judging import Comparison
from prefect_elastic_train.rehearsal.players import Disturber, undisturbed
from prefect_elastic_train.rehearsal.schedule import GROWTH, KINDS, NODE, Fault, every_kind
from prefect_elastic_train.rehearsal.stage import Stage
from prefect_elastic_train.runs.identity import loop_name
from prefect_elastic_train.runs.model import RunDirectory
from prefect_elastic_train.runs.samples import check_samples
from prefect_elastic_train.storage.store import LocalRunStore

_SHARE, _LEAST_SECONDS = 0.15, 12.0  # of the time, for the undisturbed training
_FIRST_STALL_SECONDS, _LEAST_STALL_SECONDS, _GAPS = 60.0, 15.0, 2.0
_MOST_TRAININGS, _PATIENCE_SECONDS = 5, 120.0
_LATER = 3.0  # times the duration, within which faults that are left are played; then all is cut off
#: Device files: one for each NVIDIA GPU; and those of GPUs that are not counted here (other makes, parts of a GPU).
_GPUS = "/dev/nvidia[0-9]*"
_UNCOUNTED = ("/dev/dxg", "/dev/kfd", "/dev/dri/render*", "/dev/nvidia-caps/*cap[3-9]", "/dev/nvidia-caps/*cap[0-9]?*")


def rehearse(
    train_loop: Callable[..., Any] | str,
    train_loop_config: Any = None,
    *,
    framework: str = "torch",
    scaling: GivenBlock | None = None,
    workers: int = 2,
    faults: Sequence[str] = KINDS,
    minutes: float = 10.0,
    seed: int = 0,
    tolerance: float = judging.NOISE_OF_RESIZES,
    datasets: Any = None,
    torch_config: Any = None,
    jax_config: Any = None,
    save_to: str | Path | None = None,
    tell: Callable[[str], None] | None = None,
    on_line: Callable[[str, str], None] | None = None,
) -> Certificate:
    """Train a loop undisturbed and then under faults, on a cluster of this machine, and compare the two.

    The loop trains as with ``elastic_train``, undisturbed for a share of the time, and is cut off there if it is not
    done: give it a config with which it saves several times in a minute. Only the certificate is kept; in a flow it is
    an artifact of the flow run, too.

    Args:
        train_loop, train_loop_config, framework, datasets, torch_config, jax_config: As of ``elastic_train``.
        scaling: The ``ElasticScaling`` block, or the name of one, for what a worker gets and how few may go on.
        workers: How many train undisturbed.
        faults: Which are played: some of "worker", "driver", "freeze", "storage", "node", "drain" and "growth".
        minutes: Duration of the rehearsal if starts are quick. After three times that, the rest is cut off and the
            certificate is not passed. Recovery from a fault may take two minutes, and more if the loop reports rarely.
        seed: Of the schedule.
        tolerance: How far the state may be from the undisturbed one's soon after the number of workers has changed,
            relative to its norm. Dropout, whose random numbers are others on other ranks, needs 0.1, bfloat16 0.01.
        save_to: Folder for the certificate as JSON and as a page, also if the rehearsal fails or is interrupted.
            None: it is not written.
        tell: Called with each line of progress.
        on_line: Called with each line of output of the drivers and workers: source and text.

    Returns:
        The certificate; its ``passed`` is for a team's CI.

    Raises:
        ConfigurationError: Bad arguments; nothing was started.
        ElasticTrainError: The cluster does not start, or the loop fails undisturbed.
    """
    notice_interruptions()
    check_arguments(framework, None, False, None, 60 * minutes)
    if not faults or not {*faults} <= {*KINDS} or workers < 1:
        told = f"faults={list(faults)!r}, workers={workers!r}"
        raise ConfigurationError(f"{told}: give at least one worker, and some of the faults {', '.join(KINDS)}")
    wanted = _scaling(scaling, workers)
    certificate = Certificate(
        loop=loop_name(train_loop),
        framework=framework,
        workers=f"{wanted.min_workers} to {workers}" if wanted.min_workers < workers else str(workers),
        seed=seed,
        at=time.time(),
        versions={name: version(name) for name in ("prefect-elastic-train", "ray", "prefect")},
    )
    payload = Payload(train_loop, train_loop_config, datasets, None, torch_config, jax_config)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="rehearsal-") as folder,
            closing(Stage(payload, framework, wanted, Path(folder), on_line or (lambda source, line: None))) as stage,
        ):
            _Rehearsal(certificate, stage, 60 * minutes, tolerance, tell or (lambda line: None)).run(faults)
    except BaseException as error:
        certificate.add(judging.fail(about="not all rehearsed", message=f"{type(error).__name__} {error}".strip()))
        raise
    finally:
        certificate.seconds = round(time.time() - certificate.at, 1)
        if save_to is not None:
            certificate.save(Path(save_to))
    if FlowRunContext.get() is not None:
        told = f"rehearsal of {certificate.loop}"
        create_markdown_artifact(certificate.markdown(), key="elastic-train-rehearsal", description=told)
    return certificate


@dataclass
class _Rehearsal:
    """The trainings of a rehearsal, whose certificate is filled in."""

    certificate: Certificate
    stage: Stage
    seconds: float
    tolerance: float
    tell: Callable[[str], None]

    def run(self, kinds: Sequence[str]) -> None:
        """Train undisturbed, and if that has gone well, under faults."""
        self.stage.ends_at = self.certificate.at + _LATER * self.seconds
        self.tell("starting a cluster")
        self.stage.open()
        self.tell("training undisturbed")
        play, stall = partial(undisturbed, seconds=self._share), max(_FIRST_STALL_SECONDS, self._share)
        course, why = self.stage.train("undisturbed", 0, stall, play)
        self.tell(f"undisturbed: {len(course.reports)} reports, {len(course.commits)} checkpoints")
        if why and not course.failures:
            raise ElasticTrainError(f"the loop fails undisturbed, so there is nothing to rehearse: {why}")
        self.certificate.add(*judging.of_undisturbed(course))
        if not course.commits or course.failures:
            self.certificate.compared = "there was nothing to resume from"
            return
        faults = every_kind(kinds, self.certificate.seed, min(5.0, course.save_seconds()), self.stage.can_shrink)
        self._disturb(course, faults)

    @property
    def _share(self) -> float:
        """Seconds of the undisturbed training."""
        return max(_LEAST_SECONDS, _SHARE * self.seconds)

    def _disturb(self, before: Course, faults: list[Fault]) -> None:
        """Train under faults until each is played, or time or sense runs out; the worst that came out counts."""
        counter, folder = before.counter(), self.stage.folder
        far = before.progress(len(before.reports) - 1 if before.is_complete else before.commits[-1], counter)
        times = [before.started_at, *(one.at for one in before.reports)]
        stall = max(_LEAST_STALL_SECONDS, _GAPS * max(after - one for one, after in pairwise(times)))
        patience, found, certificate = _PATIENCE_SECONDS + stall + self._share, list[Comparison](), self.certificate

        def enough(course: Course) -> bool:
            return bool(course.commits) and course.progress(course.commits[-1], counter) >= far

        for number in range(1, _MOST_TRAININGS + 1):
            if faults[0].kind == GROWTH:  # the training before was far enough between the two
                faults.insert(0, faults[0]._replace(kind=NODE))
            self.tell(f"training under faults: {', '.join(fault.kind for fault in faults)}")
            name, player = f"disturbed-{number}", Disturber(self.stage, faults, enough, patience, self.tell)
            course, why = self.stage.train(name, len(faults), stall, player.play)
            certificate.faults += player.played
            if why:
                certificate.add(judging.fail(about="does not go on", message=why))
            if course.reports:
                found.append(judging.compare(before, course, folder / "undisturbed", folder / name, self.tolerance))
                certificate.add(*found[-1].findings)
                check = check_samples(RunDirectory(LocalRunStore(str(folder / name))))
                if check is not None and not check.unknown:
                    certificate.samples = certificate.samples or check.words
                    if check.wrong or not check.exact:
                        certificate.add(judging.fail(about="samples", message=check.words))
            shutil.rmtree(folder / name, ignore_errors=True)
            if why or not faults or not player.played or time.time() > self.stage.ends_at:
                break
        if faults:
            told = f"not played: {', '.join(fault.kind for fault in faults)}"
            remedy = "give it more minutes, and a config with which the loop trains longer and saves more often"
            certificate.add(judging.fail(about="not all rehearsed", message=told, remedy=remedy))
        if worst := max(found, key=lambda one: (bool(one.findings), one.difference or 0.0), default=None):
            certificate.compared, _, certificate.difference = worst[:3]
            certificate.metrics, certificate.undisturbed_metrics = worst[3:]


def _scaling(given: GivenBlock | None, workers: int) -> ElasticScaling:
    """Return what the workers of a rehearsal get: nodes of this machine, as many as there are workers."""
    block = load_given("scaling", given or "")
    assert isinstance(block, ElasticScaling)
    if block.accelerator == "tpu":
        raise ConfigurationError("a TPU host cannot be divided into nodes; rehearse the loop with accelerator 'cpu'")
    gpus = workers * math.ceil(block.resources_per_worker.get("GPU", block.accelerator == "gpu"))
    if gpus > _gpus_here():
        raise ConfigurationError(
            f"{workers} workers need {gpus} GPUs, and this machine has {_gpus_here()}; give fewer workers"
        )
    return block.model_copy(
        update={
            "max_workers": workers,
            "min_workers": min(block.min_workers, workers),
            "wait_for_max_seconds": 30.0,
            "label_selector": {},
            "placement_strategy": "PACK",
        }
    )


def _gpus_here() -> float:
    """Return how many GPUs this machine has at most, of those that this process may see."""
    count = math.inf if any(map(glob.glob, _UNCOUNTED)) else len(glob.glob(_GPUS))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return count if visible is None else min(count, len([one for one in visible.split(",") if one not in ("", "-1")]))
