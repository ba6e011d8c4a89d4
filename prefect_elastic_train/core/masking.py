"""Leaving user and password out of URLs, in whatever text people or servers get to see."""

from __future__ import annotations

import re

#: From the scheme, or from ``user:`` without one, to the last ``@`` of the word: passwords may hold ``/``, ``@`` and
#: quotes, as AWS's secret keys do, so that nothing tells an ``@`` of the path apart. Rather too much than too little.
_CREDENTIALS = re.compile(r"(?:(?<=://)|(?<=:/)(?!/)|(?<![^\s\"'])[^\s\"':/@]+:(?!/))\S*@")


def without_credentials(text: str) -> str:
    """Give a text, such as an error or a URL, with asterisks for what may be a user and a password in its URLs."""
    return _CREDENTIALS.sub("***@", text)
