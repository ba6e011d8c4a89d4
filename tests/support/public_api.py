"""The public API as text, one fact a line, so that a change of it shows in a diff.

``python -m tests.support.public_api`` (``make api``) renews the snapshot that ``tests/unit/test_public_api.py``
compares with.
"""

from __future__ import annotations

import ast
import enum
import inspect
from collections.abc import Callable, Iterator
from importlib.metadata import distribution
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from prefect.blocks.core import Block
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

import prefect_elastic_train
from prefect_elastic_train import loop
from prefect_elastic_train.cli import app
from prefect_elastic_train.core.events import LoopWarned
from prefect_elastic_train.core.operator_settings import ElasticTrainSettings
from prefect_elastic_train.core.result import BestCheckpoint, TimeAccount, WorldSize
from prefect_elastic_train.orchestration import prefect_events
from prefect_elastic_train.orchestration.cancellation import End
from tests.support.processes import ROOT

SNAPSHOT = ROOT / "tests" / "unit" / "public_api.txt"

_HEAD = "# The public API. Renew with `make api` after a change that is meant; see docs/api.md."
#: What is no name of the package and yet in a user's hands, as part of a TrainingResult.
_PARTS_OF_RESULTS = (BestCheckpoint, TimeAccount, WorldSize)


def render() -> str:
    """Give the whole of it."""
    sections = {
        "Names": _names(),
        "Train loops: prefect_elastic_train.loop": (_signature(name, getattr(loop, name)) for name in loop.__all__),
        "Commands": _commands(),
        "Events": sorted(_events()),
        "Settings": _settings(),
        "Entry points": _entry_points(),
    }
    return "\n".join([_HEAD, *(f"\n## {title}\n" + "\n".join(lines) for title, lines in sections.items())]) + "\n"


def listed() -> dict[str, list[str]]:
    """Give the names of what each page of the documentation lists."""
    names = [*prefect_elastic_train.__all__, *(part.__name__ for part in _PARTS_OF_RESULTS), *loop.__all__]
    commands = [line for line in _commands() if not line.startswith(" ")]
    points = [point.group for point in distribution("prefect-elastic-train").entry_points]
    return {
        "api.md": [*names, *commands, *points],
        "events.md": sorted(name.removeprefix(prefect_events.PREFIX) for name in _events()),
        "operations.md": [line.partition(":")[0] for line in _settings()],
    }


def _names() -> Iterator[str]:
    for name in prefect_elastic_train.__all__:
        yield from _of(name, getattr(prefect_elastic_train, name))
    for part in _PARTS_OF_RESULTS:
        yield from _of(part.__name__, part)


def _of(name: str, what: Any) -> Iterator[str]:
    if isinstance(what, str):  # the version is another one each time
        yield f"{name}: {type(what).__name__}"
    elif inspect.isclass(what):
        yield f"class {name}({', '.join(base.__name__ for base in what.__bases__ if base.__module__ != 'typing')})"
        yield from _members(name, what)
    else:
        yield _signature(name, what)
        for method, function in _methods(type(what)) if not inspect.isfunction(what) else ():
            yield _signature(f"{name}.{method}", function)


def _members(name: str, what: type[Any]) -> Iterator[str]:
    if issubclass(what, Block):
        yield f"{name}: block type {what.get_block_type_slug()!r}"
    if issubclass(what, BaseModel):
        yield from (_field(f"{name}.{field}", info) for field, info in what.model_fields.items())
    elif issubclass(what, enum.Enum):
        yield from (f"{name}.{member.name} = {member.value!r}" for member in what)
    elif "__init__" in vars(what):
        yield _signature(f"{name}.__init__", vars(what)["__init__"])
    for attribute, value in sorted(vars(what).items()):
        if isinstance(value, property) and not attribute.startswith("_"):
            yield f"{name}.{attribute}: {inspect.signature(value.fget).return_annotation}"  # type: ignore[arg-type]
    for method, function in _methods(what):
        yield _signature(f"{name}.{method}", function)


def _methods(what: type[Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, value in sorted(vars(what).items()):
        if inspect.isfunction(value) and not name.startswith(("_", "model_")):  # the latter are pydantic's
            yield name, value


def _signature(name: str, function: Callable[..., Any]) -> str:
    """Give a signature over several lines, so that one changed default is one changed line."""
    signature = inspect.signature(function)
    parameters = [_parameter(one) for one in signature.parameters.values() if one.name != "self"]
    return "\n".join([f"{name}() -> {signature.return_annotation}", *parameters])


def _parameter(parameter: inspect.Parameter) -> str:
    kinds = {inspect.Parameter.KEYWORD_ONLY: "keyword ", inspect.Parameter.VAR_KEYWORD: "**"}
    told = f"    {kinds.get(parameter.kind, '')}{parameter.name}: {parameter.annotation}"
    return told if parameter.default is inspect.Parameter.empty else f"{told} = {parameter.default!r}"


def _field(name: str, field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True, validated_data={})
    told = f"{name}: {_type(field.annotation)}"
    if default is PydanticUndefined:
        return told
    return f"{told} = {type(default).__name__ + '()' if isinstance(default, BaseModel) else repr(default)}"


def _type(annotation: Any) -> str:
    """Give a type as one writes it, the same with every Python, without what validates it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if origin in (Union, UnionType):
        return " | ".join(map(_type, arguments))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_type, arguments))}]"
    return "None" if annotation is NoneType else getattr(annotation, "__name__", str(annotation))


def _commands(command: Any = None, name: str = "elastic-train") -> Iterator[str]:
    command = command or typer.main.get_command(app)
    if hasattr(command, "commands"):
        for part in sorted(command.commands):
            yield from _commands(command.commands[part], f"{name} {part}")
        return
    yield name
    for parameter in command.params:
        # Of an option its spellings, of an argument its place in the usage.
        spelt = " ".join([*parameter.opts, *parameter.secondary_opts])
        if not spelt.startswith("-"):
            spelt = parameter.metavar or parameter.name.upper()
        need = " (required)" if parameter.required else f" = {parameter.default!r}"
        yield f"    {spelt}{need}{' (repeatable)' if parameter.multiple or parameter.nargs == -1 else ''}"


def _events() -> set[str]:
    """Give the names of the events, read from where they are told."""
    named = set()
    for pair in ast.walk(ast.parse(inspect.getsource(prefect_events._Payloads))):
        if isinstance(pair, ast.Tuple) and len(pair.elts) == 2 and isinstance(pair.ctx, ast.Load):
            first = pair.elts[0]
            either = (first.body, first.orelse) if isinstance(first, ast.IfExp) else (first,)
            named |= {name.value for name in either if isinstance(name, ast.Constant)}
    named |= set(get_args(LoopWarned.model_fields["problem"].annotation))
    ends = {end.value.replace(" ", "-") for end in End} - {"left-to-its-job"}  # which is no end
    return {f"{prefect_events.PREFIX}{name}" for name in named | ends}


def _settings() -> Iterator[str]:
    prefix = str(ElasticTrainSettings.model_config["env_prefix"])
    for name, field in ElasticTrainSettings.model_fields.items():
        yield _field(f"{prefix}{name}".upper(), field)


def _entry_points() -> Iterator[str]:
    for point in sorted(distribution("prefect-elastic-train").entry_points):
        yield f"{point.group}: {point.name} = {point.value}"


def main(snapshot: Path = SNAPSHOT) -> None:
    """Write the snapshot."""
    snapshot.write_text(render())
    print(f"{snapshot.relative_to(ROOT)} is renewed: see `git diff` for what has changed")


if __name__ == "__main__":
    main()
