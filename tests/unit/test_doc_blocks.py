"""Every code block of the documentation is of a language that is known, and is run unless it says why not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.doc_blocks import LANGUAGES, DocBlock, blocks_of, markers_of, pages, run_block
from tests.support.processes import ROOT

#: Names of all tests and of their files.
TESTS = {
    name
    for file in (ROOT / "tests").rglob("test_*.py")
    for name in (file.stem, *re.findall(r"\bdef (test_\w+)\(", file.read_text()))
}

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


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem.lower())
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
        for name in re.findall(r"\btest_\w+", block.not_run or ""):
            assert name in TESTS, f"the block at {block} names a test that is not there"
