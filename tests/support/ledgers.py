"""Whether a training came out right by what its loop wrote down itself: shares no code with what it checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: Lines of two groups may have changed places for so long: none has written at the moment it says.
_OVERLAP_SECONDS = 0.5


@dataclass
class Checked:
    """What a ledger says: how many steps count, how many were done again, and what is wrong."""

    steps: int = 0
    redone: int = 0
    problems: list[str] = field(default_factory=list)


def check_ledger(lines: Iterable[Mapping[str, Any]], steps: int, length: int, most_redone: int) -> Checked:
    """Check that each of so many steps counts once, and each of ``length`` samples once an epoch.

    Lines have ``step``, ``rank``, ``world``, ``group`` (the same for all ranks of a worker group) and ``seen``, the
    samples of that step, and maybe ``at``, a time; a step counts as the last group has done it. A group may do
    ``most_redone`` steps again, and ends before the next one trains.
    """
    checked, by_step = Checked(), dict[int, list[Mapping[str, Any]]]()
    reached, group, known, since, late = 0, None, set[Any](), 0.0, set[Any]()
    for line in lines:
        by_step.setdefault(line["step"], []).append(line)
        if line["group"] != group and line["group"] in known and line.get("at", 0.0) > since + _OVERLAP_SECONDS:
            late.add(line["group"])
        if line["group"] != group and line["group"] not in known:
            group, again, since = line["group"], reached + 1 - line["step"], line.get("at", 0.0)
            known.add(group)
            checked.redone += max(0, again)
            if again > most_redone or again < 0:
                checked.problems.append(f"group {group} began with step {line['step']} after step {reached}")
        reached = max(reached, line["step"])
    checked.problems += [f"group {one} trained on beside the one after it" for one in sorted(late)]
    checked.steps = len(by_step)
    if sorted(by_step) != list(range(1, steps + 1)):
        checked.problems.append(f"{len(by_step)} steps up to {reached}, not 1 to {steps}")
    seen: list[int] = []
    for step in sorted(by_step):
        counting = [one for one in by_step[step] if one["group"] == by_step[step][-1]["group"]]
        if sorted(one["rank"] for one in counting) != list(range(counting[0]["world"])):
            checked.problems.append(f"step {step} was not done once by each of {counting[0]['world']} ranks")
        seen += [sample for one in counting for sample in one["seen"]]
    for first in range(0, len(seen), length):
        if len(seen) - first >= length and len({*seen[first : first + length]}) < length:
            checked.problems.append(f"epoch {first // length} has not seen each sample once")
    return checked


def lost_commits(lines: Iterable[Mapping[str, Any]], commits: Iterable[tuple[float, int]]) -> list[str]:
    """Return which worker groups began before a step that had been committed before their loops were called.

    Lines are as above, with ``born``, the time of that call; commits are times and steps.
    """
    known, found, commits = set[Any](), list[str](), list(commits)
    for line in lines:
        if line["group"] not in known:
            known.add(line["group"])
            committed = max((step for at, step in commits if at <= line["born"]), default=0)
            if line["step"] <= committed:
                found.append(f"group {line['group']} began with step {line['step']}, which was committed: {committed}")
    return found
