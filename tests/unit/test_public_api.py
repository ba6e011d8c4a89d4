"""What users rely on changes only when somebody means it to, and is listed in the documentation."""

from __future__ import annotations

import pytest

from tests.support.processes import ROOT
from tests.support.public_api import SNAPSHOT, listed, render


def test_the_public_api_is_what_the_snapshot_says() -> None:
    """If the change is meant: `make api`, and tell it in the changelog."""
    assert render().splitlines() == SNAPSHOT.read_text().splitlines()


@pytest.mark.parametrize("page", sorted(listed()))
def test_a_page_lists_what_belongs_there(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    assert [name for name in listed()[page] if f"`{name}" not in text] == []
