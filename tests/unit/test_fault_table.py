"""The README's table of faults, and all other pages, name tests that exist, and the table says where they run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.doc_blocks import pages
from tests.support.processes import ROOT

#: A test, and its file if the name is a link.
_NAMED = re.compile(r"`(test_\w+)`(?:\]\(([^)]+)\))?")


def _tests() -> dict[str, dict[str, bool]]:
    """By name and file of each test, whether all its cases run under `make test-all` only."""
    found: dict[str, dict[str, bool]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        is_full = any("pytest.mark.full" in line for line in text.splitlines() if line.startswith("pytestmark"))
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                marks = [ast.unparse(mark) for mark in node.decorator_list]
                only_all = is_full or "pytest.mark.full" in marks or "pytest.mark.soak" in marks
                found.setdefault(node.name, {})[str(path.relative_to(ROOT))] = only_all
    return found


TESTS = _tests()


def _rows() -> list[list[str]]:
    """The cells of the rows of the table."""
    _, _, after = (ROOT / "README.md").read_text().partition("| fault | what happens | shown by | runs in |\n")
    rows = after.partition("\n\n")[0].splitlines()[1:]
    return [re.split(r"(?<!\\) \| ", row.removeprefix("| ").removesuffix(" |")) for row in rows]


@pytest.mark.parametrize("row", _rows(), ids=lambda row: row[0][:40])
def test_a_row_names_tests_that_exist_and_says_where_they_run(row: list[str]) -> None:
    fault, _, shown_by, where = row
    named = _NAMED.findall(shown_by)
    assert named, f"{fault}: no test"
    only_all = {TESTS[name][file] if file else any(TESTS[name].values()) for name, file in named}
    if "scripted driver:" in shown_by:
        assert "on Ray:" in shown_by, f"{fault}: a real test stands behind a scripted one"
    assert where == ("both" if len(only_all) == 2 else "`make test-all`" if True in only_all else "`make test`")


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem.lower())
def test_tests_that_a_page_names_exist(page: Path) -> None:
    assert {name for name, _ in _NAMED.findall(page.read_text())} <= set(TESTS)
