"""What a run is called, and what makes it the same training as before."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import sys
import types
from collections.abc import Callable, Mapping, MutableSequence, Sequence, Set
from contextlib import suppress
from enum import Enum
from pathlib import PurePath
from typing import Any, NamedTuple

from pydantic import BaseModel, SecretStr

from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.records import Fingerprint

LATEST_RUN = "latest"  # what ``resume_from`` calls the newest earlier run of the same training; no run can be named so

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9 ._=,-]{0,126}[A-Za-z0-9._=,-])?")
#: Modules whose types are arrays, or have a repr that stands for the value unless `_NO_VALUE` matches it.
_VALUE_MODULES = (
    "builtins",
    "datetime",
    "decimal",
    "fractions",
    "uuid",
    "numpy",
    "numpy.dtypes",
    "torch",
    "jaxlib._jax",
    "jaxlib.xla_extension",
)
_NO_VALUE = re.compile(r" at 0x|<locals>|<lambda>|^<|\.\.\.")


class Call(NamedTuple):
    """A call of a subflow, and which of its calls in the calling flow run that is, counted from 1."""

    flow_name: str
    number: str


def check_run_name(name: str) -> str:
    """Return the name if every store can hold it as a folder, else refuse it with the rule."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or ".." in name:
        raise ConfigurationError(
            f"run_name {name!r} cannot name a run directory: use 1 to 128 letters, digits, spaces and '._-=,', "
            "beginning with a letter or digit, without '..' or a space at the end"
        )
    return name


def default_run_name(flow_name: str, flow_run_id: str, ordinal: int, calls: Sequence[Call] = ()) -> str:
    """Return the run name of the n-th training of a flow run.

    It stays over retries. Of a subflow, whose own id does not stay, it holds the root's id and the call's number; of a
    subflow in a subflow, also a digest of the calls that lead there. 8 characters of the id tell runs of one flow
    apart: the first, unless the id begins with the time, as those of scheduled runs do, many at once.

    Args:
        flow_name: The flow's name, or the train loop's outside of flows.
        flow_run_id: Id of the flow run, the root's for a subflow.
        ordinal: 1 for the first training of the flow run.
        calls: The calls of subflows that lead from the root to the flow run; none if it is the root.
    """
    slug, place = _parts(flow_name, ordinal, calls)
    begins_with_the_time = flow_run_id[14:15] == "7"  # the version of a UUID
    return f"{slug}-{flow_run_id[-8:] if begins_with_the_time else flow_run_id[:8]}{place}"


def training_part(flow_name: str, ordinal: int, calls: Sequence[Call] = ()) -> str:
    """Return which training of its flow run a training is: its default name without what tells flow runs apart."""
    return "".join(_parts(flow_name, ordinal, calls))


def _parts(flow_name: str, ordinal: int, calls: Sequence[Call]) -> tuple[str, str]:
    """Return what stands before and after the flow run's id in a default name."""
    slug = re.sub(r"[^A-Za-z0-9_-]+", "-", flow_name).strip("-_") or "training"
    place = f"-{ordinal}" if ordinal > 1 else ""
    if calls:
        outer = json.dumps([tuple(call) for call in calls[:-1]])
        digest = f".{hashlib.sha256(outer.encode()).hexdigest()[:6]}" if len(calls) > 1 else ""
        place = f"{digest}.{calls[-1].number}{place}"
    return slug[: 80 if calls else 100], place


def loop_name(train_loop: Callable[..., Any] | str) -> str:
    """Return a name of the train loop that stays when its module is loaded under another name."""
    if isinstance(train_loop, str):
        return train_loop.rpartition(":")[2]
    return _qualified_name(train_loop).replace("<locals>.", "")


def entries(config: Any) -> dict[str, Any]:
    """Return the values of a loop's configuration by name; one without named values is a single value."""
    config = config or {}  # as in Ray Train
    if isinstance(config, Mapping | BaseModel):
        return dict(config)
    return (dataclasses.is_dataclass(config) and getattr(config, "__dict__", None)) or {"": config}


def fingerprint(train_loop: Callable[..., Any] | str, framework: str, config: Any) -> Fingerprint:
    """Return what makes a training the same: its loop's name, framework and config; the code may have been mended."""
    opaque: dict[str, str] = {}
    return Fingerprint(
        loop=loop_name(train_loop),
        path=train_loop if isinstance(train_loop, str) else _import_path(train_loop),
        framework=framework,
        config={str(name): _digest(str(name), value, opaque) for name, value in entries(config).items()},
        opaque=opaque,
    )


def _qualified_name(train_loop: Callable[..., Any]) -> str:
    return str(getattr(train_loop, "__qualname__", type(train_loop).__qualname__))


def _digest(name: str, value: Any, opaque: dict[str, str]) -> str:
    """Return the digest of a named value, and put the types in it that are digested by their names into `opaque`."""
    unstable: set[str] = set()
    try:
        text = json.dumps(_stable(value, unstable), sort_keys=True)
    except Exception:  # noqa: BLE001 - of the user's classes, and of values that contain themselves
        text = _full_name(type(value))
        unstable = {text}
    if unstable:
        opaque[name] = ", ".join(sorted(unstable))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _stable(value: Any, unstable: set[str]) -> Any:
    """Return a value as JSON that is the same in every process, with the names of types that have no such form."""
    stable = functools.partial(_stable, unstable=unstable)
    kind, module = _full_name(type(value)), type(value).__module__
    content: Any = None
    if value is None or (isinstance(value, str | int | float) and not isinstance(value, Enum)):
        return value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        pairs = {key if isinstance(key, str) else json.dumps(stable(key)): stable(one) for key, one in value.items()}
        assert len(pairs) == len(value), "keys such as 1 and '1'"
        return pairs
    if isinstance(value, tuple | MutableSequence) and not hasattr(value, "_fields"):
        return [stable(one) for one in value]
    if isinstance(value, Set):
        content = sorted(json.dumps(stable(one), sort_keys=True) for one in value)
    elif isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        content = _full_name(value)
    elif isinstance(value, Enum):
        content = value.name
    elif isinstance(value, SecretStr):
        content = value.get_secret_value()
    elif isinstance(value, BaseModel):
        content = dict(value)
    elif dataclasses.is_dataclass(value):
        content = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if getattr(value, "__dict__", {}).keys() - content.keys():  # what is no field may be a part of the value
            unstable.add(kind)
    elif hasattr(value, "_fields"):
        content = value._asdict()
    elif module in _VALUE_MODULES and hasattr(value, "__array__"):
        with suppress(TypeError, RuntimeError):  # of torch: with gradients, in bfloat16, on a GPU
            array = sys.modules["numpy"].asarray(value)
            data = array.tolist() if array.dtype.hasobject else hashlib.sha256(array.tobytes()).hexdigest()
            content = [str(array.dtype), array.shape, data]
    elif module in _VALUE_MODULES:
        content = repr(value)
    if content is None or (isinstance(content, str) and _NO_VALUE.search(content)):
        unstable.add(kind)
        return kind
    return {kind: stable(content)}


def _import_path(value: Any) -> str:
    """Return ``<module>:<name>`` of a function or class; empty if other processes cannot import it by that."""
    module, name = getattr(value, "__module__", None) or "", _qualified_name(value)
    # A script's, or of a flow's file that Prefect has loaded, is imported from nowhere.
    is_by_value = module in ("", "__main__") or module.startswith("__prefect_loader") or "<locals>" in name
    return "" if is_by_value else f"{module}:{name}"


def _full_name(value: Any) -> str:
    return _import_path(value) or _qualified_name(value)
