"""The error messages that the documentation lists are those that the code has."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

from tests.support.processes import ROOT

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


def _messages(page: str, heading: str, column: int) -> list[str]:
    """Return the code spans in a column of all tables of a section."""
    text = (ROOT / page).read_text()
    start = re.search(rf"^(#+) {re.escape(heading)}$", text, re.MULTILINE)
    assert start, heading
    section = re.split(rf"^#{{1,{len(start[1])}}} ", text[start.end() :], maxsplit=1, flags=re.MULTILINE)[0]
    found: list[str] = []
    cell = 0
    for token in MarkdownIt("commonmark").enable("table").parse(section):
        cell = 0 if token.type == "tr_close" else cell + (token.type == "td_open")
        if token.type == "inline" and cell == column:
            found += [child.content for child in token.children or () if child.type == "code_inline"]
    return found


class _Texts(ast.NodeVisitor):
    """Collects the texts of a module, with a NUL wherever a value is put in."""

    def __init__(self, module: ast.Module) -> None:
        self.found: list[str] = []
        self._constants = {
            target.id: str(node.value.value)
            for node in module.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        self.visit(module)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # no docstrings
            self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self.found.append("".join(map(self._text, node.values)))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.found.append(re.sub(r"%[-.\d]*[a-zA-Z]|\{[^{}]*\}", "\0", node.value))

    def _text(self, part: ast.expr) -> str:
        if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name):
            return self._constants.get(part.value.id, "\0")
        return str(part.value) if isinstance(part, ast.Constant) else "\0"


@cache
def _texts(module: str) -> str:
    """Return all texts in the code of a module or a package, one after the other."""
    found = importlib.util.find_spec(module)
    assert found
    assert found.origin
    source = Path(found.origin)
    files = sorted(source.parent.rglob("*.py")) if source.name == "__init__.py" else [source]
    return "\n".join(text for file in files for text in _Texts(ast.parse(file.read_text())).found)


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
