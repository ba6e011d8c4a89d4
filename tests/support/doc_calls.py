"""What the functions of a documentation's block would do that nobody calls there: its names, imports and arguments."""

from __future__ import annotations

import ast
import builtins
import dis
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

from prefect_elastic_train import aelastic_train, elastic_train

__all__ = ["check_functions"]


def check_functions(code: str, names: Mapping[str, Any]) -> None:
    """Check the bodies of all functions of a block, without calling them.

    Args:
        code: The block.
        names: The globals that its run has left.

    Raises:
        AssertionError: A name is nowhere defined, something imported is not there, or a call does not fit its callee.
    """
    for function in ast.walk(ast.parse(code)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            _check_function(function, names)


def _check_function(function: ast.FunctionDef | ast.AsyncFunctionDef, names: Mapping[str, Any]) -> None:
    known = {**vars(builtins), **names}
    compiled = compile(ast.Module([function], []), "<block>", "exec")
    undefined = {name for inner in _code_within(compiled) for name in _globals_of(inner)} - set(known)
    assert not undefined, f"{function.name}() uses {', '.join(sorted(undefined))}, which the block does not define"
    # What a parameter or an assignment names is not known before the function runs.
    for name in _assigned(function):
        known.pop(name, None)
    for node in ast.walk(function):
        if isinstance(node, ast.Import | ast.ImportFrom):
            known.update(_imported(node))
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and callable(called := _resolved(node.func, known)):
            _check_call(node, called)


def _code_within(code: CodeType) -> Iterator[CodeType]:
    """Give the code of all functions in a piece of code, and of those within them."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _code_within(constant)


def _globals_of(code: CodeType) -> set[str]:
    return {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}


def _assigned(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    arguments = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    return arguments | {
        node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _imported(node: ast.Import | ast.ImportFrom) -> dict[str, Any]:
    """Carry out an import, and give what it names."""
    found: dict[str, Any] = {}
    exec(compile(ast.Module([node], []), "<block>", "exec"), found)
    return found


def _resolved(expression: ast.expr, known: Mapping[str, Any]) -> Any:
    """Give what a dotted name stands for; None if only a run could tell."""
    if isinstance(expression, ast.Name):
        return known.get(expression.id)
    if not isinstance(expression, ast.Attribute):
        return None
    owner = _resolved(expression.value, known)
    if owner is None:
        return None
    if inspect.ismodule(owner) and not hasattr(owner, expression.attr):
        importlib.import_module(f"{owner.__name__}.{expression.attr}")
    return getattr(owner, expression.attr)


def _check_call(call: ast.Call, called: Callable[..., Any]) -> None:
    if called in (aelastic_train, elastic_train.submit):  # which hand all that they get to this
        called = elastic_train
    try:
        signature = inspect.signature(called)
    except (ValueError, TypeError):  # a function of C
        return
    positional = [argument for argument in call.args if not isinstance(argument, ast.Starred)]
    keywords = [keyword.arg for keyword in call.keywords if keyword.arg is not None]
    is_whole = len(positional) == len(call.args) and len(keywords) == len(call.keywords)
    bind = signature.bind if is_whole else signature.bind_partial
    try:
        bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        shown = textwrap.shorten(ast.unparse(call), 80)
        raise AssertionError(f"the call {shown} does not fit {ast.unparse(call.func)}{signature}: {error}") from error
