"""The site of the documentation, built as `make docs` builds it: a broken link or anchor is an error."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.processes import ROOT, call

#: An element that loads something from another host, or a style that does. A link is none.
_LOADED = re.compile(
    r"<(?:script|link|img|iframe|source|video)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*"
    r"|@import[^;]*//[^;]*|url\([\"']?(?:https?:)?//[^)]*"
)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the extra `docs` needs Python 3.11")
def test_the_site_builds_without_warnings_loads_nothing_from_other_hosts_and_all_its_sections_can_be_searched(
    tmp_path: Path,
) -> None:
    call(sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path)
    files = [path for suffix in ("html", "css") for path in tmp_path.rglob(f"*.{suffix}")]
    assert len(files) > 40
    assert [found for path in files for found in _LOADED.findall(path.read_text())] == []

    entries = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    searched = {entry["location"].partition("#")[0] for entry in entries if entry["text"]}
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert len(navigation) == 9
    for section in navigation:
        locations = {re.sub(r"(^|/)index\.md$|\.md$", r"\1", page).rstrip("/") for page in _pages(section)}
        assert locations <= {location.rstrip("/") for location in searched}, section


def _pages(navigation: Any) -> Iterator[str]:
    """Yield the paths of all pages of a part of the navigation."""
    if isinstance(navigation, str):
        yield navigation
        return
    for part in navigation.values() if isinstance(navigation, dict) else navigation:
        yield from _pages(part)
