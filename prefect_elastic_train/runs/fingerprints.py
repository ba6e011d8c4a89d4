"""Run names, and the fingerprint that identifies a training."""

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

LATEST_RUN = "latest"  # name in ``resume_from`` of the newest earlier run of the same training; no run may have it

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9 ._=,-]{0,126}[A-Za-z0-9._=,-])?")
#: Modules of array types, and of types whose repr shows the whole value unless `_NO_VALUE` matches it.
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
    """A call of a subflow, with its number among the calls of that flow in the calling flow run, from 1."""

    flow_name: str
    number: str


def check_run_name(name: str) -> str:
    """Return the run name, if every storage accepts it as a folder.

    Raise a ConfigurationError with the rule otherwise.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or ".." in name:
        raise ConfigurationError(
            f"run_name {name!r} cannot name a run directory: use 1 to 128 letters, digits, spaces and '._-=,', "
            "beginning with a letter or digit, without '..' or a space at the end"
        )
    return name


def training_name(flow_name: str, flow_run_id: str, ordinal: int, calls: Sequence[Call] = ()) -> str:
    """Return the name of the n-th training of a flow run, by default its run name. Retries have the same name.

    With an empty ``flow_run_id``, the name has no id of a flow run. It then identifies the training in its flow.

    A subflow's own id changes with a retry, so its name has the root's id and the call's number, and deeper subflows
    also a digest of the calls before. 8 characters of the id distinguish runs of a flow: the first ones, or the last
    ones if the id begins with the time, which scheduled runs may share.

    Args:
        flow_name: The flow's name, or the train loop's outside of flows.
        flow_run_id: Id of the flow run, the root's for a subflow; empty: the result contains no id.
        ordinal: 1 for the first training of the flow run.
        calls: The calls of subflows that lead from the root to the flow run; none if it is the root.
    """
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", flow_name).strip("-_") or "training"
    name = name[: 80 if calls else 100]
    if flow_run_id:
        begins_with_time = flow_run_id[14:15] == "7"  # the version of a UUID
        name += f"-{flow_run_id[-8:] if begins_with_time else flow_run_id[:8]}"
    if len(calls) > 1:
        name += f".{hashlib.sha256(json.dumps(calls[:-1]).encode()).hexdigest()[:6]}"
    if calls:
        name += f".{calls[-1].number}"
    return f"{name}-{ordinal}" if ordinal > 1 else name


def train_loop_name(train_loop: Callable[..., Any] | str) -> str:
    """Return the name of the train loop without its module, which may be loaded under different names."""
    if isinstance(train_loop, str):
        return train_loop.rpartition(":")[2]
    return _qualified_name(train_loop).replace("<locals>.", "")


def config_values(config: Any) -> dict[str, Any]:
    """Return the values of a train loop's configuration by name.

    A configuration without names is one value, named ``""``.
    """
    config = config or {}  # as Ray Train does
    if isinstance(config, Mapping | BaseModel):
        return dict(config)
    return (dataclasses.is_dataclass(config) and getattr(config, "__dict__", None)) or {"": config}


def fingerprint(train_loop: Callable[..., Any] | str, framework: str, config: Any) -> Fingerprint:
    """Return the fingerprint of a training: its loop, its framework, and a digest of each value of its configuration.

    A change of the loop's code does not change it.
    """
    opaque: dict[str, str] = {}
    return Fingerprint(
        loop=train_loop_name(train_loop),
        path=train_loop if isinstance(train_loop, str) else _import_path(train_loop),
        framework=framework,
        config={str(name): _digest(str(name), value, opaque) for name, value in config_values(config).items()},
        opaque=opaque,
    )


def _qualified_name(train_loop: Callable[..., Any]) -> str:
    return str(getattr(train_loop, "__qualname__", type(train_loop).__qualname__))


def _digest(name: str, value: Any, opaque: dict[str, str]) -> str:
    """Return the digest of a value of the configuration. Types in it without a stable value are added to ``opaque``.

    The key in ``opaque`` is the value's name.
    """
    unstable: set[str] = set()
    try:
        text = json.dumps(_stable(value, unstable), sort_keys=True)
    except Exception:  # noqa: BLE001 - raised by users' classes, and by values that contain themselves
        text = _full_name(type(value))
        unstable = {text}
    if unstable:
        opaque[name] = ", ".join(sorted(unstable))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _stable(value: Any, unstable: set[str]) -> Any:
    """Return a value of the configuration as JSON that is the same in every process.

    Types in it without such a form are added to ``unstable``.
    """
    stable = functools.partial(_stable, unstable=unstable)
    kind = _full_name(type(value))
    module = type(value).__module__
    content: Any = None
    match value:
        case Enum():
            content = value.name
        case None | str() | int() | float():
            return value
        case PurePath():
            return str(value)
        case Mapping():
            pairs = {key if isinstance(key, str) else json.dumps(stable(key)): stable(value[key]) for key in value}
            assert len(pairs) == len(value), "keys such as 1 and '1'"
            return pairs
        case type() | types.FunctionType() | types.BuiltinFunctionType():
            content = _full_name(value)
        case _ if hasattr(value, "_asdict"):  # a named tuple
            content = value._asdict()
        case tuple() | MutableSequence():
            return [stable(item) for item in value]
        case Set():
            content = sorted(json.dumps(stable(item), sort_keys=True) for item in value)
        case SecretStr():
            content = value.get_secret_value()
        case BaseModel():
            content = dict(value)
        case _ if dataclasses.is_dataclass(value):
            content = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            if getattr(value, "__dict__", {}).keys() - content.keys():  # attributes that are no fields may matter
                unstable.add(kind)
        case _ if module in _VALUE_MODULES and hasattr(value, "__array__"):
            with suppress(TypeError, RuntimeError):  # torch tensors with gradients, in bfloat16, on a GPU
                array = sys.modules["numpy"].asarray(value)
                data = array.tolist() if array.dtype.hasobject else hashlib.sha256(array.tobytes()).hexdigest()
                content = [str(array.dtype), array.shape, data]
        case _ if module in _VALUE_MODULES:
            content = repr(value)
    if content is None or (isinstance(content, str) and _NO_VALUE.search(content)):
        unstable.add(kind)
        return kind
    return {kind: stable(content)}


def _import_path(value: Any) -> str:
    """Return ``<module>:<name>`` of a function or class; empty if other processes cannot import it."""
    module = getattr(value, "__module__", None) or ""
    name = _qualified_name(value)
    # Modules of scripts, and of flow files that Prefect loaded, cannot be imported.
    is_by_value = module in ("", "__main__") or module.startswith("__prefect_loader") or "<locals>" in name
    return "" if is_by_value else f"{module}:{name}"


def _full_name(value: Any) -> str:
    return _import_path(value) or _qualified_name(value)
