"""What a rehearsal has found, as JSON, as Markdown and as a page."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, computed_field

from prefect_elastic_train.report.markdown import duration, table

_STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}td,th{padding:.2em .8em;"
    "text-align:left;vertical-align:top;border-bottom:1px solid #ccc}"
)


class Played(BaseModel, frozen=True):
    """A fault that was played.

    Attributes:
        seconds: The longest time from the fault on without a report that was further than any before.
        redone: Reports that were done again.
        workers: How many went on.
    """

    kind: str
    what: str
    recovered: bool
    seconds: float
    redone: int
    workers: int

    @property
    def words(self) -> str:
        """What it has come to."""
        if not self.recovered:
            return f"NOT recovered in {self.seconds:g} s"
        went_on = f"{self.workers} worker{'s' * (self.workers != 1)} went on after {self.seconds:g} s"
        return f"{went_on}, {self.redone} report{'s' * (self.redone != 1)} done again"


class Finding(BaseModel, frozen=True):
    """What is wrong with a loop, or was not to be found out, and what to do; ``about`` is one of a few titles."""

    level: Literal["fail", "warn"]
    about: str
    message: str
    remedy: str = ""

    @property
    def words(self) -> str:
        """All of it."""
        return f"**{self.about}** ({self.level}): {self.message}" + f". *To do:* {self.remedy}" * bool(self.remedy)


class Certificate(BaseModel):
    """Whether a loop recovers from the faults that were rehearsed, as if nothing had happened.

    Attributes:
        compared: What was held against the undisturbed training, in words.
        difference: How far the state was from the undisturbed one at most, relative; None if none could be read.
        metrics, undisturbed_metrics: What was reported last where both trainings have been.
        samples: What the loop's own ledger says of the samples; empty without one.
    """

    loop: str
    framework: str
    workers: str
    seed: int
    at: float
    versions: dict[str, str]
    seconds: float = 0.0
    faults: list[Played] = []
    findings: list[Finding] = []
    compared: str = "nothing was reported"
    difference: float | None = None
    metrics: dict[str, float] = {}
    undisturbed_metrics: dict[str, float] = {}
    samples: str = ""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """Whether every fault asked for was played and recovered from, and nothing is wrong with the loop."""
        return all(one.recovered for one in self.faults) and not any(one.level == "fail" for one in self.findings)

    def add(self, *findings: Finding) -> None:
        """Add what was found, each thing once."""
        self.findings += [one for one in findings if one.about not in [known.about for known in self.findings]]

    def markdown(self) -> str:
        """The certificate as people read it."""
        when = datetime.fromtimestamp(self.at, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        versions = ", ".join(f"{name} {one}" for name, one in self.versions.items())
        rows = [(one.kind, one.what, one.words) for one in self.faults]
        last = [(name, str(self.undisturbed_metrics.get(name)), str(one)) for name, one in self.metrics.items()]
        parts = [
            f"# {self.loop} {'recovers' if self.passed else 'does NOT recover as it should'}",
            f"Rehearsed {when} with {self.workers} workers ({self.framework}), seed {self.seed}, in "
            f"{duration(self.seconds)}; {versions}.",
            *(one.words for one in self.findings),
            table(("fault", "what was done", "what came of it"), rows) if rows else "",
            f"**Against the undisturbed training:** {self.compared}",
            table(("reported last", "undisturbed", "disturbed"), last) if last else "",
            f"**Samples:** {self.samples}" if self.samples else "",
        ]
        return "\n\n".join(filter(None, parts)) + "\n"

    def save(self, folder: Path) -> None:
        """Write it as JSON and as a page, named after the loop and the seed."""
        from markdown_it import MarkdownIt

        folder.mkdir(parents=True, exist_ok=True)
        stem = folder / f"rehearsal-{re.sub(r'[^A-Za-z0-9]+', '-', self.loop).strip('-')}-{self.seed}"
        stem.with_suffix(".json").write_text(self.model_dump_json(indent=2) + "\n")
        body = MarkdownIt("commonmark", {"html": False}).enable("table").render(self.markdown())
        head = f'<!doctype html><meta charset="utf-8"><title>{stem.name}</title><style>{_STYLE}</style>'
        stem.with_suffix(".html").write_text(f"{head}\n{body}")
