"""The public API as text, one fact a line, so that a change of it shows in a diff.

``python -m tests.support.public_api`` (``make api``) renews the snapshot that ``tests/unit/test_public_api.py``
compares with.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterator
from importlib.metadata import distribution
from typing import Any

from prefect.blocks.core import Block
from pydantic import BaseModel

import prefect_elastic_train
from prefect_elastic_train import loop
from prefect_elastic_train.core.result import BestCheckpoint, TimeAccount, WorldSize
from prefect_elastic_train.orchestration.arguments import TrainOptions
from tests.support.processes import ROOT
from tests.support.reference import commands

SNAPSHOT = ROOT / "tests" / "unit" / "public_api.txt"
#: What is no name of the package and yet in a user's hands, as part of a TrainingResult.
_PARTS_OF_RESULTS = {part.__name__: part for part in (BestCheckpoint, TimeAccount, WorldSize)}


def render() -> str:
    """The whole of it."""
    named = {name: getattr(prefect_elastic_train, name) for name in prefect_elastic_train.__all__}
    sections = {
        "Names": (line for name, what in {**named, **_PARTS_OF_RESULTS}.items() for line in _of(name, what)),
        "Options of elastic_train": _options(),
        "Train loops: prefect_elastic_train.loop": (
            line for name in loop.__all__ for line in _of(name, getattr(loop, name))
        ),
        "Entry points": _entry_points(),
    }
    head = "# The public API. Renew with `make api` after a change that is meant; see docs/reference/python.md."
    return "\n".join([head, *(f"\n## {title}\n" + "\n".join(lines) for title, lines in sections.items())]) + "\n"


def listed() -> list[str]:
    """The names that ``docs/reference/python.md`` lists."""
    points = [line.partition(":")[0] for line in _entry_points()]
    names = [*prefect_elastic_train.__all__, *_PARTS_OF_RESULTS, *loop.__all__]
    return [*names, *(name for name, _ in commands()), *points]


def _of(name: str, what: Any) -> Iterator[str]:
    if getattr(what, "__name__", name) != name and inspect.isclass(what):
        yield f"{name} = {what.__name__}"
        return
    if isinstance(what, str):  # the version is another one each time
        yield f"{name}: {type(what).__name__}"
        return
    kind = what if inspect.isclass(what) else type(what)
    if kind is not what:
        yield _signature(name, what)
    else:
        slug = f": block type {what.get_block_type_slug()!r}" if issubclass(what, Block) else ""
        yield f"class {name}({', '.join(base.__name__ for base in what.__bases__)}){slug}"
    if issubclass(kind, BaseModel):
        yield from _fields(f"{name}.", kind)
    elif issubclass(kind, enum.Enum):
        yield from (f"{name}.{member.name} = {member.value!r}" for member in kind)
    elif "__init__" in vars(kind) and kind is what:
        yield _signature(f"{name}.__init__", vars(kind)["__init__"])
    for attribute, value in sorted(vars(kind).items()):
        if isinstance(value, property) and not attribute.startswith("_"):
            yield f"{name}.{attribute}: {inspect.signature(value.fget).return_annotation}"  # type: ignore[arg-type]
        elif inspect.isfunction(value) and not attribute.startswith(("_", "model_")):  # the latter are pydantic's
            yield _signature(f"{name}.{attribute}", value)


def _signature(name: str, function: Callable[..., Any]) -> str:
    """A signature over several lines, so that one changed default is one changed line."""
    signature = inspect.signature(function)
    lines = [f"{name}() -> {signature.return_annotation}"]
    for one in signature.parameters.values():
        keyword = "keyword " if one.kind is inspect.Parameter.KEYWORD_ONLY else ""
        lines += [f"    {keyword}{one}"] if one.name != "self" else []
    return "\n".join(lines)


def _options() -> Iterator[str]:
    for name, annotation in TrainOptions.__annotations__.items():
        yield f"{name}: {annotation.__forward_arg__}"


def _fields(prefix: str, model: type[BaseModel]) -> Iterator[str]:
    """A model's fields, each with its schema, which is what Prefect's forms and an API's users go by."""
    schema = model.model_json_schema()
    for name, field in schema.get("$defs", {}).get(model.__name__, schema)["properties"].items():
        told = {key: value for key, value in sorted(field.items()) if key not in ("title", "description", "position")}
        yield f"{prefix}{name}: {told}"


def _entry_points() -> list[str]:
    points = distribution("prefect-elastic-train").entry_points
    return [f"{point.group}: {point.name} = {point.value}" for point in sorted(points)]


if __name__ == "__main__":
    SNAPSHOT.write_text(render())
    print(f"{SNAPSHOT.relative_to(ROOT)} is renewed: see `git diff` for what has changed")
