"""A rehearsal from its first training to its certificate."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prefect_elastic_train.blocks.lookup import chosen_block
from prefect_elastic_train.core import settings
from prefect_elastic_train.core.outcomes import ConfigurationError, ElasticTrainError
from prefect_elastic_train.core.request import Payload
from prefect_elastic_train.orchestration.arguments import GivenBlock, check_arguments, load_given
from prefect_elastic_train.rehearsal import judging
from prefect_elastic_train.rehearsal.certificate import Certificate, Finding, Played
from prefect_elastic_train.rehearsal.course import Course
from prefect_elastic_train.rehearsal.players import Disturber, Undisturbed
from prefect_elastic_train.rehearsal.schedule import KINDS, every_kind
from prefect_elastic_train.rehearsal.stage import Stage
from prefect_elastic_train.runs import identity
from prefect_elastic_train.runs.model import RunDirectory
from prefect_elastic_train.runs.samples import check_samples
from prefect_elastic_train.storage.store import LocalRunStore

_SHARE, _LEAST_SECONDS = 0.15, 12.0  # of the time, for each undisturbed training
_LEAST_STALL_SECONDS, _STALLS = 15.0, 4.0
_MOST_TRAININGS = 5


def rehearse(
    train_loop: Callable[..., Any] | str,
    train_loop_config: dict[str, Any] | None = None,
    *,
    framework: str = "torch",
    scaling: GivenBlock | None = None,
    workers: int = 2,
    faults: Sequence[str] = KINDS,
    minutes: float = 10.0,
    seed: int = 0,
    datasets: Any = None,
    torch_config: Any = None,
    jax_config: Any = None,
    save_to: str | Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
    on_line: Callable[[str, str], None] = lambda source, line: None,
) -> Certificate:
    """Train a loop undisturbed and then under faults, on a cluster of this machine, and compare the two.

    The loop trains as with ``elastic_train``, for a share of the time each; it is cut off at a checkpoint if it is not
    done by then, so give it a config with which it saves several times in a minute. Nothing of it is kept but the
    certificate. In a flow the certificate is an artifact of the flow run, too.

    Args:
        train_loop, train_loop_config, framework, datasets, torch_config, jax_config: As of ``elastic_train``.
        scaling: The ``ElasticScaling`` block, or the name of one, for what a worker gets; default: one CPU.
        workers: How many train undisturbed; at most the scaling's ``max_workers`` if one is given.
        faults: Which are played: some of "worker", "driver", "freeze", "storage", "node", "drain" and "growth".
        minutes: For all of it, roughly; what was not played by then is told.
        seed: Of the schedule.
        save_to: Folder for the certificate as JSON and as a page; None: it is not written.
        tell: Called with each line of progress.
        on_line: Called with each line of output of the drivers and workers: source and text.

    Returns:
        The certificate; its ``passed`` is for a team's CI.

    Raises:
        ConfigurationError: Bad arguments; nothing was started.
        ElasticTrainError: The loop fails undisturbed.
    """
    kinds, chosen = _checked(faults, minutes, workers, framework), _scaling(scaling, workers)
    payload = Payload(train_loop, train_loop_config, datasets, None, torch_config, jax_config)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        stage = Stage(payload, framework, chosen, Path(folder), on_line)
        try:
            tell(f"starting a cluster of {chosen.max_workers} nodes")
            stage.open()
            found = _Rehearsal(stage, kinds, seed, 60 * minutes, tell).run()
        finally:
            stage.close()
    least = "" if chosen.min_workers == chosen.max_workers else f"{chosen.min_workers} to "
    certificate = Certificate(
        loop=identity.loop_name(train_loop),
        framework=framework,
        workers=f"{least}{chosen.max_workers}",
        seed=seed,
        seconds=round(time.monotonic() - began, 1),
        at=time.time(),
        versions={name: version(name) for name in ("prefect-elastic-train", "ray", "prefect")},
        **found,
    )
    if save_to is not None:
        certificate.save(Path(save_to))
    _show(certificate)
    return certificate


class _Rehearsal:
    """The trainings of a rehearsal on an open stage."""

    def __init__(
        self, stage: Stage, kinds: Sequence[str], seed: int, seconds: float, tell: Callable[[str], None]
    ) -> None:
        self._stage, self._kinds, self._seed, self._tell = stage, kinds, seed, tell
        self._share = max(_LEAST_SECONDS, _SHARE * seconds)
        self._until = time.monotonic() + seconds
        self._findings: list[Finding] = []

    def run(self) -> dict[str, Any]:
        """Return the fields of the certificate that are found out."""
        self._tell("training undisturbed")
        player = Undisturbed(self._share)
        undisturbed, why = self._stage.train("undisturbed", 0, max(60.0, self._share), "off", player)
        if why and not undisturbed.failures:
            raise ElasticTrainError(f"the loop fails undisturbed, so there is nothing to rehearse: {why}")
        self._add(judging.of_undisturbed(undisturbed, self._share))
        if not undisturbed.commits or undisturbed.failures:
            return {"faults": [], "findings": self._findings, "compared": "there was nothing to resume from"}
        played, comparison = self._disturbed(undisturbed)
        samples = check_samples(RunDirectory(LocalRunStore(str(self._stage.folder / "disturbed-1"))))
        if samples is not None and not samples.unknown and (samples.wrong or not samples.exact):
            self._add([Finding(level="fail", about="samples", message=samples.words)])
        return {
            "faults": played,
            "findings": self._findings,
            "compared": comparison.words,
            "difference": comparison.difference,
            "undisturbed_metrics": comparison.metrics[0],
            "metrics": comparison.metrics[1],
            "samples": samples.words if samples is not None and not samples.unknown else "",
        }

    def _disturbed(self, undisturbed: Course) -> tuple[list[Played], judging.Comparison]:
        """Train under faults until each is played, or time or sense runs out."""
        commits, reports = undisturbed.commits, undisturbed.reports
        counter = undisturbed.counter()
        far = max(undisturbed.by_progress(counter)) if undisturbed.is_complete else _progress(undisturbed, counter)
        between = (reports[commits[-1]].at - undisturbed.started_at) / len(commits)
        faults = every_kind(self._kinds, self._seed, min(5.0, between), self._stage.can_shrink)
        stall = max(_LEAST_STALL_SECONDS, _STALLS * undisturbed.longest_gap)
        played: list[Played] = []
        worst: judging.Comparison | None = None

        def enough(course: Course) -> bool:
            return bool(course.commits) and _progress(course, counter) >= far

        for number in range(1, _MOST_TRAININGS + 1):
            self._tell(f"training under faults: {', '.join(fault.kind for fault in faults)}")
            gap = undisturbed.longest_gap
            player = Disturber(self._stage, faults, enough, gap, self._until, self._tell)
            course, why = self._stage.train(f"disturbed-{number}", len(faults), stall, "", player)
            player.end(course)
            played += player.played
            folders = (self._stage.folder / "undisturbed", self._stage.folder / f"disturbed-{number}")
            if why:
                self._add([Finding(level="fail", about="does not go on", message=why)])
            comparison = judging.compare(undisturbed, course, *folders) if course.reports else None
            if comparison is not None:
                self._add(comparison.findings)
                worst = comparison if worst is None or comparison.findings else worst
            if why or not faults or not player.played or time.monotonic() > self._until:
                break
        if faults:
            told = f"not played: {', '.join(fault.kind for fault in faults)}"
            remedy = "give it more minutes, and a config with which the loop trains longer and saves more often"
            self._add([Finding(level="fail", about="not all rehearsed", message=told, remedy=remedy)])
        return played, worst or judging.Comparison("nothing was reported")

    def _add(self, findings: Sequence[Finding]) -> None:
        known = {one.about for one in self._findings}
        self._findings += [one for one in findings if one.about not in known]


def _progress(course: Course, counter: str) -> float:
    place = course.commits[-1]
    return float(course.reports[place].metrics.get(counter, place + 1))


def _checked(faults: Sequence[str], minutes: float, workers: int, framework: str) -> list[str]:
    check_arguments(framework, None, False, None, 60 * minutes)
    wrong = [kind for kind in faults if kind not in KINDS]
    if wrong or not faults:
        raise ConfigurationError(f"faults {', '.join(wrong) or 'none'}: choose some of {', '.join(KINDS)}")
    if workers < 1:
        raise ConfigurationError(f"workers={workers}: a rehearsal needs at least 1")
    return list(dict.fromkeys(faults))


def _scaling(given: GivenBlock | None, workers: int) -> settings.ScalingSettings:
    block = chosen_block("scaling") if given is None else load_given("scaling", given)
    scaling = settings.plain(settings.ScalingSettings, block)
    if scaling.accelerator == "tpu":
        raise ConfigurationError("a TPU host cannot be divided into nodes; rehearse the loop with accelerator 'cpu'")
    most = workers if given is None else max(scaling.min_workers, min(scaling.max_workers, workers))
    nodes = {"label_selector": {}, "placement_strategy": "PACK", "wait_for_max_seconds": 30.0}
    return scaling.model_copy(update={"max_workers": most, "min_workers": min(scaling.min_workers, most), **nodes})


def _show(certificate: Certificate) -> None:
    """Show the certificate with the flow run, if this is in one."""
    from prefect.artifacts import create_markdown_artifact
    from prefect.context import FlowRunContext

    if FlowRunContext.get() is not None:
        told = f"rehearsal of {certificate.loop}"
        create_markdown_artifact(certificate.markdown(), key="rehearsal", description=told)
