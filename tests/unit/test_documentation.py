"""The documentation: its code blocks, the tests and the messages that it names, and the README's table of faults."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.doc_blocks import LANGUAGES, DocBlock, blocks_of, markers_of, pages, run_block
from tests.support.processes import ROOT

each_page = pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem.lower())

#: A test, and its file if the name is a link.
_NAMED = re.compile(r"`(test_\w+)`(?:\]\(([^)]+)\))?")
#: What stands for a value in a message of the documentation: an ellipsis, a name in brackets, a number, a quoted text.
#: A colon joins two texts of the code.
_VALUE = re.compile(r"…|<[^>]*>|'[^']*'|\b\d[\d.]*\b|: ")
#: How many characters between two values tell one message from another.
_TELLING = 10
#: Messages of Prefect, and the module that has them.
_OF_PREFECT = {
    "Timed out while attempting to connect to ephemeral Prefect API server": "prefect.server.api.server",
    "attempted to send logs to the API without a flow run id": "prefect.logging.handlers",
}


# tests that are named


def _tests() -> dict[str, dict[str, bool]]:
    """By name and file of each test, whether all its cases run under `make test-all` only."""
    found: dict[str, dict[str, bool]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        is_full = any("pytest.mark.full" in line for line in text.splitlines() if line.startswith("pytestmark"))
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                marks = [ast.unparse(mark) for mark in node.decorator_list]
                only_all = is_full or "pytest.mark.full" in marks
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


@each_page
def test_tests_that_a_page_names_exist(page: Path) -> None:
    named = {name for name, _ in _NAMED.findall(page.read_text())}
    named |= {name for block in blocks_of(page) for name in re.findall(r"\btest_\w+", block.not_run or "")}
    assert named <= {*TESTS, *(Path(file).stem for files in TESTS.values() for file in files)}


# code blocks


@pytest.mark.parametrize(
    ("language", "code"),
    [("python", "raise ValueError('of the block')"), ("bash", "ls\nls /of/the/block\necho not reached")],
)
def test_a_block_that_fails_is_named_with_its_line_and_what_it_said(language: str, code: str, tmp_path: Path) -> None:
    block = DocBlock("docs/page.md", 7, language, code, None)
    with pytest.raises(AssertionError, match=r"(?s)the block at docs/page\.md:7 fails: .*of.the.block") as failure:
        run_block(block, tmp_path, "http://127.0.0.1:9/api")
    assert "not reached" not in str(failure.value)


@each_page
def test_each_block_is_of_a_known_language_and_says_why_it_is_not_run(page: Path) -> None:
    blocks = blocks_of(page)
    for block in blocks:
        assert block.language in LANGUAGES, f"the block at {block} is {block.language!r}; known are {LANGUAGES}"
        block.parse()
    marked = [block for block in blocks if block.not_run is not None]
    assert len(marked) == markers_of(page), "a marker has to stand on the line above the fence of a block"
    for block in marked:
        assert block.is_code, f"the block at {block} would not be run anyway"
        assert len((block.not_run or "").split()) >= 3, f"the block at {block} has no reason"


# messages


def _messages(page: str, heading: str, column: int) -> list[str]:
    """Return the code spans in a column of all tables of a section."""
    text = (ROOT / page).read_text()
    start = re.search(rf"^(#+) {re.escape(heading)}$", text, re.MULTILINE)
    assert start, heading
    section = re.split(rf"^#{{1,{len(start[1])}}} ", text[start.end() :], maxsplit=1, flags=re.MULTILINE)[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [span for row in rows for span in re.findall(r"`([^`]+)`", row[column - 1])]


@cache
def _texts(module: str) -> str:
    """Return the code of a module or a package: no docstrings, each text in one piece, and a NUL for a value in it."""
    found = importlib.util.find_spec(module)
    assert found
    assert found.origin
    source = Path(found.origin)
    files = sorted(source.parent.rglob("*.py")) if source.name == "__init__.py" else [source]
    code = re.sub(r'(?ms)^ *"""\w.*?"""|#:? [^\n]*', "", "\n".join(file.read_text() for file in files))
    joined = re.sub(r'"\s*\n\s*[rf]*"', "", code)
    return re.sub(r"\{[^{}]*\}|%[-.\d]*[a-zA-Z]", "\0", joined)


MESSAGES = [
    *_messages("docs/operations.md", "Error messages", 1),
    *_messages("docs/operations.md", "A flow run that looks running for ever", 1),
    *_messages("docs/faults.md", "Outcomes", 3),
]


def test_messages_in_the_documentation_are_those_that_the_code_has() -> None:
    assert len(MESSAGES) > 60
    assert "block … holds a value that is not allowed: …" in MESSAGES
    for message in MESSAGES:
        parts = [part.strip(" .:,;[]()") for part in _VALUE.split(message)]
        assert max(map(len, parts)) >= _TELLING, f"{message}: too short to be found in the code"
        texts = _texts(_OF_PREFECT.get(message, "prefect_elastic_train"))
        assert [part for part in parts if part not in texts] == [], message
