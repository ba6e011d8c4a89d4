"""The error messages that the documentation lists are those that the code has."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

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
    """Give the code spans in a column of all tables of a section."""
    found: list[str] = []
    section, level, cell = False, 0, 0
    tokens = MarkdownIt("commonmark").enable("table").parse((ROOT / page).read_text())
    for number, token in enumerate(tokens):
        if token.type == "heading_open":
            title = tokens[number + 1].content
            if title == heading:
                section, level = True, int(token.tag[1])
            elif int(token.tag[1]) <= level:
                section = False
        elif token.type == "tr_open":
            cell = 0
        elif token.type == "td_open":
            cell += 1
        elif token.type == "inline" and section and cell == column and tokens[number - 1].type == "td_open":
            found += _code_spans(token)
    return found


def _code_spans(token: Token) -> list[str]:
    return [child.content for child in token.children or () if child.type == "code_inline"]


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
        if isinstance(part, ast.Constant):
            return str(part.value)
        if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name):
            return self._constants.get(part.value.id, "\0")
        return "\0"


@cache
def _texts(source: Path) -> str:
    """Give all texts in the code of a module, or of the modules below a folder, one after the other."""
    files = sorted(source.rglob("*.py")) if source.is_dir() else [source]
    return "\n".join(text for file in files for text in _Texts(ast.parse(file.read_text())).found)


MESSAGES = [
    *_messages("docs/operations.md", "Error messages", 1),
    *_messages("docs/operations.md", "A flow run that looks running for ever", 1),
    *_messages("docs/faults.md", "Outcomes", 3),
]


def test_tables_of_messages_are_found() -> None:
    assert len(MESSAGES) > 60
    assert "block … holds a value that is not allowed: …" in MESSAGES


@pytest.mark.parametrize("message", MESSAGES)
def test_message_in_the_documentation_is_one_that_the_code_has(message: str) -> None:
    source = ROOT / "prefect_elastic_train"
    if message in _OF_PREFECT:
        module = importlib.util.find_spec(_OF_PREFECT[message])
        assert module is not None
        assert module.origin is not None
        source = Path(module.origin)
    parts = [part.strip(" .:,;[]()") for part in _VALUE.split(message)]
    assert max(map(len, parts)) >= _TELLING, "too short to be found in the code"
    assert [part for part in parts if part not in _texts(source)] == []
