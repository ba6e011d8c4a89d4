"""The reference pages of the documentation are those that the code renders."""

import inspect
import re

import pytest

from prefect_elastic_train.orchestration import prefect_events
from tests.support.reference import FOLDER, pages

PAGES = pages()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_renders(name: str) -> None:
    """After a change of the code: `make reference`."""
    assert (FOLDER / name).read_text().splitlines() == PAGES[name].splitlines()


def test_there_are_no_other_pages_but_the_one_that_the_site_fills_from_docstrings() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*PAGES, "python.md"}


def test_each_event_that_is_sent_to_prefect_is_on_the_page() -> None:
    sent = re.findall(r'(?:yield|yield \(|else)\s+"([a-z-]+)"', inspect.getsource(prefect_events._payloads))
    assert sent
    assert [name for name in sent if f"`{name}`" not in PAGES["events.md"]] == []


def test_every_row_has_a_meaning() -> None:
    for page in ("blocks.md", "settings.md", "outcomes.md", "cli.md"):
        assert [line for line in PAGES[page].splitlines() if line.endswith("|  |")] == []
