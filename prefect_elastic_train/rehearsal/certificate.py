"""What a rehearsal has found, and how it is written down: as JSON, as Markdown, as a page."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from prefect_elastic_train.report.markdown import duration

_STYLE = "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}td,th{padding:.2em .8em;"
_STYLE += "text-align:left;vertical-align:top;border-bottom:1px solid #ccc}"


class Played(BaseModel):
    """A fault that was played.

    Attributes:
        seconds: From the fault to the first step that had not been done before.
        redone: Reports that were done again.
        workers: How many went on.
        at_report: How many reports counted before it.
    """

    model_config = ConfigDict(frozen=True)

    kind: str
    what: str
    recovered: bool
    seconds: float
    redone: int
    workers: int
    at_report: int

    @property
    def words(self) -> str:
        """What it has come to."""
        if not self.recovered:
            return "NOT recovered"
        return f"recovered in {self.seconds:g} s with {self.workers} workers, {self.redone} reports done again"


class Finding(BaseModel):
    """What is wrong with a loop, or was not to be found out, and what to do about it."""

    model_config = ConfigDict(frozen=True)

    level: Literal["fail", "warn"]
    #: One of a few words, for programs.
    about: str
    message: str
    remedy: str = ""


class Certificate(BaseModel):
    """Whether a loop recovers from the faults that were rehearsed, as if nothing had happened.

    Attributes:
        passed: Every fault asked for was played and recovered from, and nothing is wrong with the loop.
        compared: What was held against the undisturbed training, in words.
        difference: How far the state was from the undisturbed one at most, relative; None if none could be read.
        metrics, undisturbed_metrics: What was reported last where both trainings have been.
        samples: What the loop's own ledger says of the samples; empty without one.
    """

    model_config = ConfigDict(frozen=True)

    loop: str
    framework: str
    workers: str
    seed: int
    seconds: float
    at: float
    versions: dict[str, str]
    faults: list[Played]
    findings: list[Finding]
    compared: str
    difference: float | None = None
    metrics: dict[str, float] = {}
    undisturbed_metrics: dict[str, float] = {}
    samples: str = ""

    @property
    def passed(self) -> bool:
        return not any(one.level == "fail" for one in self.findings) and all(one.recovered for one in self.faults)

    def markdown(self) -> str:
        """The certificate as people read it."""
        verdict = "recovers" if self.passed else "does NOT recover as it should"
        when = datetime.fromtimestamp(self.at, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        lines = [
            f"# {self.loop} {verdict}",
            f"Rehearsed {when} with {self.workers} workers ({self.framework}), seed {self.seed}, in "
            f"{duration(self.seconds)}; " + ", ".join(f"{name} {one}" for name, one in self.versions.items()) + ".",
            "| fault | what was done | what came of it |\n|---|---|---|\n"
            + "\n".join(f"| {one.kind} | {one.what} | {one.words} |" for one in self.faults),
            f"**Against the undisturbed training:** {self.compared}",
        ]
        if self.metrics:
            rows = (f"| {name} | {self.undisturbed_metrics.get(name)} | {one} |" for name, one in self.metrics.items())
            lines.append("| reported last | undisturbed | disturbed |\n|---|---|---|\n" + "\n".join(rows))
        if self.samples:
            lines.append(f"**Samples:** {self.samples}")
        for one in self.findings:
            lines.append(
                f"**{one.about}** ({one.level}): {one.message}" + (f". *To do:* {one.remedy}" * bool(one.remedy))
            )
        return "\n\n".join(lines) + "\n"

    def save(self, folder: Path) -> list[Path]:
        """Write it as JSON and as a page, named after the loop and the seed; return the files."""
        from markdown_it import MarkdownIt

        folder.mkdir(parents=True, exist_ok=True)
        stem = "".join(letter if letter.isalnum() else "-" for letter in self.loop).strip("-")
        files = [folder / f"rehearsal-{stem}-{self.seed}{suffix}" for suffix in (".json", ".html")]
        files[0].write_text(self.model_dump_json(indent=2) + "\n")
        body = MarkdownIt("commonmark", {"html": False}).enable("table").render(self.markdown())
        head = f'<!doctype html><meta charset="utf-8"><title>Rehearsal of {stem}</title><style>{_STYLE}</style>'
        files[1].write_text(f"{head}\n{body}")
        return files
