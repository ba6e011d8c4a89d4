"""What users rely on changes only when somebody means it to, and is listed in the documentation."""

from tests.support.processes import ROOT
from tests.support.public_api import SNAPSHOT, listed, render


def test_the_public_api_is_what_the_snapshot_says() -> None:
    """If the change is meant: `make api`, and tell it in the changelog."""
    assert render().splitlines() == SNAPSHOT.read_text().splitlines()


def test_the_page_about_the_api_lists_all_of_it() -> None:
    text = (ROOT / "docs" / "reference" / "python.md").read_text()
    assert [name for name in listed() if f"`{name}" not in text] == []
