"""The reference pages of the documentation are those that the code renders."""

from __future__ import annotations

import pytest

from tests.support.public_api import listed
from tests.support.reference import FOLDER, pages

PAGES = pages()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_renders(name: str) -> None:
    """After a change of the code: `make reference`."""
    assert (FOLDER / name).read_text().splitlines() == PAGES[name].splitlines()


def test_there_are_no_other_pages() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(PAGES)


@pytest.mark.parametrize("page", ["events.md", "settings.md"])
def test_a_page_lists_all_of_the_public_api(page: str) -> None:
    assert [name for name in listed()[f"reference/{page}"] if f"`{name}`" not in PAGES[page]] == []


def test_every_row_has_a_meaning() -> None:
    for page in ("blocks.md", "settings.md", "outcomes.md", "cli.md"):
        assert [line for line in PAGES[page].splitlines() if line.endswith("|  |")] == []
