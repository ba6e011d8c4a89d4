"""Certificate of a rehearsal, as JSON and as Markdown."""

import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, computed_field

from prefect_elastic_train.report.formats import clock, duration
from prefect_elastic_train.report.markdown import table


class InjectedFault(BaseModel, frozen=True):
    """Fault that a rehearsal has injected, and its cost.

    Attributes:
        what: Description of the fault.
        seconds: Longest time without new progress from the fault to the recovery.
        redone: Number of reports that were repeated.
        workers: Number of workers after the recovery.
    """

    kind: str
    what: str
    recovered: bool
    seconds: float
    redone: int
    workers: int

    @property
    def outcome(self) -> str:
        """Sentence that states if the training recovered from this fault, after how many seconds, and at which cost."""
        if not self.recovered:
            return f"NOT recovered in {self.seconds:g} s"
        return f"recovered after {self.seconds:g} s; workers: {self.workers}, repeated reports: {self.redone}"


@dataclass(frozen=True)
class Problem:
    """Problem of the train loop or of the rehearsal, for the certificate.

    Attributes:
        about: Title, one of the table in docs/rehearsal.md.
        remedy: Advice for the user; empty if there is none.
    """

    about: str
    message: str
    remedy: str = ""

    @property
    def markdown(self) -> str:
        """Paragraph in Markdown with the problem and the advice for the user."""
        remedy = f". *To do:* {self.remedy}" if self.remedy else ""
        return f"**{self.about}**: {self.message}{remedy}"


class Comparison(BaseModel):
    """Result of the comparison of a training under faults with the undisturbed one.

    Attributes:
        compared: Summary of the comparison.
        difference: Largest relative difference of the state from the undisturbed training's; None if no state could be
            read.
    """

    compared: str = "nothing was reported"
    difference: float | None = None


class Certificate(Comparison):
    """Result of a rehearsal: the injected faults, and the comparison with an undisturbed training.

    Attributes:
        at: Start of the rehearsal, in seconds since the epoch.
        samples: Result of the sample check; empty if the loop uses no session.
    """

    loop: str
    framework: str
    workers: str
    seed: int
    at: float
    versions: dict[str, str]
    seconds: float = 0.0
    faults: list[InjectedFault] = []
    findings: list[Problem] = []
    samples: str = ""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """True if the loop recovered from every requested fault and no problem was found."""
        return not self.findings and all(fault.recovered for fault in self.faults)

    def add(self, problem: Problem) -> None:
        """Add a problem to the certificate. Of several problems with one title, only the first is kept."""
        if problem.about not in [known.about for known in self.findings]:
            self.findings.append(problem)

    def markdown(self) -> str:
        """Return the certificate of the rehearsal as Markdown text."""
        versions = ", ".join(f"{package} {version}" for package, version in self.versions.items())
        faults = [(fault.kind, fault.what, fault.outcome) for fault in self.faults]
        paragraphs = [
            f"# {self.loop} {'recovers from faults' if self.passed else 'does NOT pass the rehearsal'}",
            f"Rehearsed on {clock(self.at)} UTC with {self.workers} workers ({self.framework}), seed {self.seed}, in "
            f"{duration(self.seconds)}; {versions}.",
            *(problem.markdown for problem in self.findings),
            table(("fault", "injected", "outcome"), faults) if faults else "",
            f"**Compared with the undisturbed training:** {self.compared}",
            f"**Samples:** {self.samples}" if self.samples else "",
        ]
        return "\n\n".join(filter(None, paragraphs)) + "\n"

    def save(self, folder: Path) -> None:
        """Write the certificate to ``folder`` as JSON and as Markdown.

        The files are named after the train loop and the random seed of the fault schedule.
        """
        folder.mkdir(parents=True, exist_ok=True)
        stem = folder / f"rehearsal-{re.sub(r'[^A-Za-z0-9]+', '-', self.loop).strip('-')}-{self.seed}"
        stem.with_suffix(".json").write_text(self.model_dump_json(indent=2) + "\n")
        stem.with_suffix(".md").write_text(self.markdown())
