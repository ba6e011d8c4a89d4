"""Every code block of the documentation is of a language that is known, and is run unless it says why not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.doc_blocks import LANGUAGES, DocBlock, blocks_of, markers_of, pages, run_block
from tests.support.processes import ROOT

each_page = pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem.lower())

SAMPLE = """
# A page

<!-- not run: needs several machines -->
```bash
ray start --head
```

<!-- not run: stands too far away -->

```python title="loop.py"
print(1)
```

1. In a list:

   ```console
   $ echo one \\
       two
   one two
   ```

~~~
a diagram
~~~
"""


def test_blocks_are_found_with_language_line_and_the_reason_for_not_running_them() -> None:
    found = blocks_of(ROOT / "docs/page.md", SAMPLE)
    assert [(block.line, block.language, block.not_run) for block in found] == [
        (5, "bash", "needs several machines"),
        (11, "python", None),
        (17, "console", None),
        (23, "", None),
    ]
    assert [block.is_run for block in found] == [False, True, True, False]
    assert str(found[0]) == "docs/page.md:5"
    assert found[2].code == "$ echo one \\\n    two\none two\n"


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
def test_each_block_has_a_known_language_and_is_what_it_says(page: Path) -> None:
    for block in blocks_of(page):
        assert block.language in LANGUAGES, f"the block at {block} is {block.language!r}; known are {LANGUAGES}"
        block.parse()


@each_page
def test_each_block_that_is_not_run_says_why_directly_above_its_fence(page: Path) -> None:
    marked = [block for block in blocks_of(page) if block.not_run is not None]
    assert len(marked) == markers_of(page), "a marker has to stand on the line above the fence of a block"
    for block in marked:
        assert block.is_code, f"the block at {block} would not be run anyway"
        assert len(block.not_run.split()) >= 3, f"the block at {block} has no reason"


@each_page
def test_tests_that_are_named_as_covering_a_block_exist(page: Path) -> None:
    named = {name for block in blocks_of(page) for name in re.findall(r"\btest_\w+(?:\.py)?", block.not_run or "")}
    files = list((ROOT / "tests").rglob("test_*.py"))
    there = {file.name for file in files}
    there |= {name for file in files for name in re.findall(r"\bdef (test_\w+)\(", file.read_text())}
    assert named <= there


def test_what_the_blocks_of_the_readme_import_is_there() -> None:
    blocks = [block for block in blocks_of(ROOT / "README.md") if block.language == "python"]
    assert blocks
    for node in [node for block in blocks for node in ast.walk(ast.parse(block.code))]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            exec(ast.unparse(node), {})
