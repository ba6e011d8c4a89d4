"""The documentation: its links, its code blocks, the tests and messages that it names, and its tables of faults."""

import ast
import importlib.util
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.support.doc_blocks import LANGUAGES, DocBlock, blocks_of, markers_of, page_id, pages, run_block
from tests.support.processes import ROOT

each_page = pytest.mark.parametrize("page", pages(), ids=page_id)

PACKAGE = ROOT / "prefect_elastic_train"
#: A test, and the mark of one that runs under `make test-all` only.
_NAMED = re.compile(r"`(test_\w+)`( \*\(all\)\*)?")
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


def _tests() -> dict[str, list[bool]]:
    """Return for each test, one entry a file, if all its cases run under `make test-all` only."""
    tests: dict[str, list[bool]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        is_full = any("pytest.mark.full" in line for line in text.splitlines() if line.startswith("pytestmark"))
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                marks = [ast.unparse(mark) for mark in node.decorator_list]
                tests.setdefault(node.name, []).append(is_full or "pytest.mark.full" in marks)
    return tests


TESTS = _tests()
#: The sections of `docs/faults.md` that have tables of faults.
GROUPS = ["Worker", "Driver", "Flow process", "Storage", "Capacity", "Mistakes"]


def _fault_rows() -> list[list[str]]:
    """Return the cells of the rows of all tables of faults."""
    rows = [row for group in GROUPS for row in _rows_of("docs/faults.md", group)]
    return [row for row in rows if row[-1] != "tests"]


def _rows_of(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the rows of all tables of a section, with their headings."""
    text = (ROOT / page).read_text()
    start = re.search(rf"^(#+) {re.escape(heading)}$", text, re.MULTILINE)
    assert start, heading
    section = re.split(rf"^#{{1,{len(start[1])}}} ", text[start.end() :], maxsplit=1, flags=re.MULTILINE)[0]
    rows = [line.strip("|").strip() for line in section.splitlines() if line.startswith("| ")]
    return [re.split(r"(?<!\\) \| ", row) for row in rows]


def test_all_groups_of_faults_have_rows() -> None:
    assert all(len(_rows_of("docs/faults.md", group)) > 3 for group in GROUPS)


@pytest.mark.parametrize("row", _fault_rows(), ids=lambda row: row[0][:40])
def test_a_fault_names_tests_that_exist_and_marks_those_of_make_test_all(row: list[str]) -> None:
    fault, tests = row[0], row[-1]
    named = _NAMED.findall(tests)
    assert named or tests == "–", f"{fault}: no test"
    for name, mark in named:
        assert name in TESTS, f"{fault}: there is no {name}"
        assert bool(mark) == all(TESTS[name]), f"{fault}: *(all)* is wrong at {name}"
    if "scripted driver:" in tests:
        assert "on Ray:" in tests, f"{fault}: a real test stands behind a scripted one"


def test_the_readme_is_short_and_the_costs_of_its_faults_are_measured() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 120
    measured = set(re.findall(r"\d+\.\d+", (ROOT / "docs" / "benchmarks.md").read_text()))
    rows = _rows_of("README.md", "Faults")[1:]
    assert len(rows) == 10
    for _, _, cost in rows:
        assert set(re.findall(r"\d+\.\d+", cost)) <= measured, cost


@each_page
def test_tests_and_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    named = {name for name, _ in _NAMED.findall(text)}
    named |= {name for block in blocks_of(page) for name in re.findall(r"\btest_\w+", block.not_run or "")}
    assert named <= {*TESTS, *(path.stem for path in (ROOT / "tests").rglob("test_*.py"))}
    files = re.findall(r"`((?!my_project/)[a-z_]+/[\w/]*\.py)`", text)
    assert [name for name in files if not any((folder / name).exists() for folder in (ROOT, PACKAGE))] == []


# links


def _anchors(text: str) -> set[str]:
    """Return the anchors of a page as GitHub makes them of its headings, and those that it sets itself."""
    anchors = set(re.findall(r'<a id="([^"]+)">', text))
    seen: Counter[str] = Counter()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        anchors.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return anchors


def _prose(page: Path) -> str:
    return re.sub(r"(?ms)^```.*?^```$", "", page.read_text())


@pytest.mark.parametrize("page", [*pages(), ROOT / "CHANGELOG.md"], ids=page_id)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(((?!\w+:)[^)\s]+)\)", re.sub(r"`[^`\n]*`", "", _prose(page))):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in _anchors(_prose(file)), f"{page.name}: {target}"


def test_each_page_can_be_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    pages_left = [ROOT / "README.md"]
    while pages_left:
        current = pages_left.pop()
        reached.add(current)
        links = re.findall(r"\]\(([^)\s#:]+\.md)", current.read_text())
        pages_left += {(current.parent / link).resolve() for link in links} - reached
    assert {*pages()} <= reached


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
        if block.not_run is not None:
            assert block.is_code, f"the block at {block} would not be run anyway"
            assert len(block.not_run.split()) >= 3, f"the block at {block} has no reason"
    marked = sum(block.not_run is not None for block in blocks)
    assert marked == markers_of(page), "a marker has to stand on the line above the fence of a block"


# messages


def _messages(page: str, heading: str, column: int) -> list[str]:
    """Return the code spans in a column of all tables of a section."""
    return [span for row in _rows_of(page, heading) for span in re.findall(r"`([^`]+)`", row[column - 1])]


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
    *_messages("docs/runbook.md", "Messages", 1),
    *_messages("docs/runbook.md", "Answers of resume", 1),
    *_messages("docs/guide/gcs_azure.md", "Common errors", 1),
    *_messages("docs/faults.md", "Outcomes", 3),
]


def test_messages_in_the_documentation_are_those_that_the_code_has() -> None:
    assert len(MESSAGES) > 100
    assert "block … holds a value that is not allowed: …" in MESSAGES
    for message in MESSAGES:
        parts = [part.strip(" .:,;[]()") for part in _VALUE.split(message)]
        assert max(map(len, parts)) >= _TELLING, f"{message}: too short to be found in the code"
        texts = _texts(_OF_PREFECT.get(message, "prefect_elastic_train"))
        capitalized = {part for part in parts if part[:1].lower() + part[1:] in texts}  # where a line begins
        assert [part for part in parts if part not in texts and part not in capitalized] == [], message


# what a job needs


def test_a_driver_imports_only_what_the_documentation_lists_for_the_image_of_a_job() -> None:
    page = (ROOT / "docs/clusters.md").read_text()
    (listed,) = re.findall(r"Its requirements are not: (.+?), the framework", page, re.DOTALL)
    brought = {"ray", "fsspec", "numpy", "pydantic_core", "typing_extensions"}  # the last four by Ray and pydantic
    # Not loaded by drivers, or only with an extra.
    elsewhere = {"s3.py", "pictures.py", "operator_settings.py"}
    elsewhere |= {"jax_state.py", "torch_state.py", "shard_gradients.py", "replays.py"}
    folders = ("driver", "controller", "worker", "runs", "storage", "report", "core", "loop")
    files = [file for folder in folders for file in (PACKAGE / folder).glob("*.py") if file.name not in elsewhere]
    imported: set[str] = set()
    for node in (node for file in files for node in ast.parse(file.read_text()).body):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported.add(node.module.partition(".")[0])
    assert imported - sys.stdlib_module_names - {PACKAGE.name} - brought == {*re.findall(r"`(\w+)`", listed)}
