"""Rehearsals of loops that are right, and of loops with one thing wrong."""

import json
import os
import secrets
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prefect_elastic_train.rehearsal.certificate import Certificate
from prefect_elastic_train.rehearsal.runner import rehearse
from prefect_elastic_train.rehearsal.schedule import KINDS
from tests.support.processes import carrying, wait_for
from tests.support.rehearsal_loops import FLAWS


def _rehearse(folder: Path, loop: str, config: dict[str, Any], **more: Any) -> Certificate:
    # A rehearsal ends a loop that is far enough: it must not end by itself before a node has booted.
    with (folder / "log").open("a") as log:
        tell = partial(print, file=log, flush=True)
        return rehearse(loop, config, tell=tell, on_line=tell, save_to=folder, **more)


@pytest.mark.full
@pytest.mark.parametrize(
    ("loop", "config"),
    [
        ("tests.support.rehearsal_loops:train", {"steps": 2000}),
        ("flows.lightning_net:train_loop", {"max_epochs": 400}),
        ("flows.transformers_lm:train_loop", {"max_steps": 3000, "eval_steps": 25, "save_every": 50}),
    ],
)
def test_loops_that_are_right_pass_with_trainers_of_others_too(
    tmp_path: Path, loop: str, config: dict[str, Any]
) -> None:
    certificate = _rehearse(tmp_path, loop, config, minutes=3, seed=1)
    assert certificate.passed, certificate.markdown()
    assert {one.kind for one in certificate.faults} == set(KINDS)
    assert certificate.difference < 1e-3


@pytest.mark.full
@pytest.mark.parametrize("flaw", FLAWS)
def test_what_is_wrong_with_a_loop_is_found_and_nothing_else(tmp_path: Path, flaw: str) -> None:
    faults = ["worker", "node"] if flaw == "world" else ["worker"]
    config = {"flaw": flaw, "steps": 2000}
    minutes = 4 if flaw == "unequal" else 1.5  # a rehearsal must not be cut off before the loop counts as hung
    certificate = _rehearse(tmp_path, "tests.support.rehearsal_loops:train", config, minutes=minutes, faults=faults)
    assert [one.about for one in certificate.findings] == [FLAWS[flaw]], certificate.markdown()
    assert not certificate.passed


def test_a_rehearsal_that_is_told_to_end_leaves_a_certificate_that_is_not_passed_and_nothing_else(
    tmp_path: Path,
) -> None:
    log, scratch, mark = tmp_path / "log", tmp_path / "scratch", secrets.token_hex(8)
    scratch.mkdir()
    command = [str(Path(sys.executable).parent / "elastic-train"), "rehearse", "tests.support.rehearsal_loops:train"]
    environment = {**os.environ, "TMPDIR": str(scratch), "TESTS_REHEARSAL": mark}
    with log.open("w") as lines:
        process = subprocess.Popen([*command, "--out", tmp_path], stderr=lines, stdout=lines, env=environment)
    try:
        wait_for(lambda: "training undisturbed" in log.read_text(), 120, "the first training")
        process.terminate()
        process.wait(180)
    finally:
        process.kill()
    [certificate] = [json.loads(file.read_text()) for file in tmp_path.glob("*.json")]
    assert (certificate["passed"], certificate["findings"][0]["about"]) == (False, "rehearsal incomplete")
    assert [*scratch.glob("rehearsal-*")] == []
    wait_for(lambda: not carrying(f"TESTS_REHEARSAL={mark}"), 20, "the end of its processes")
