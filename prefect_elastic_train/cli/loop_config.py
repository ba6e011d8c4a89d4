"""The config of a train loop from files and from ``--set key=value``."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from prefect_elastic_train.core.outcomes import ConfigurationError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import toml as tomllib


def loop_config(files: Sequence[Path], settings: Sequence[str]) -> dict[str, Any]:
    """Put a config together: the files one after the other, then the settings; what comes later counts.

    Args:
        files: JSON, YAML or TOML files, see :func:`read_config`. Tables in tables are merged.
        settings: Such as ``optimizer.lr=0.1``: dots nest, and the value is what YAML 1.2 takes it for.

    Raises:
        ConfigurationError: A file or a setting cannot be used.
    """
    config: dict[str, Any] = {}
    for file in files:
        _merge(config, read_config(file))
    for setting in settings:
        _set(config, setting)
    return config


def read_config(file: Path) -> dict[str, Any]:
    """Read a config file: JSON, YAML 1.2 or TOML by its suffix (``.json``, ``.yaml``, ``.yml``, ``.toml``).

    Raises:
        ConfigurationError: It cannot be read, or holds something else than a table of what JSON knows.
    """
    parse = _PARSERS.get(file.suffix.lower())
    if parse is None:
        raise ConfigurationError(f"config {file}: its name must end in one of {', '.join(_PARSERS)}")
    try:
        config = parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"config {file} cannot be read: {error.strerror}") from error
    except (ValueError, YAMLError) as error:
        raise ConfigurationError(f"config {file} cannot be read: {error}") from error
    if config is None:  # an empty YAML file
        return {}
    if not isinstance(config, dict):
        raise ConfigurationError(f"config {file} must be a table of keys and values, got a {type(config).__name__}")
    _check(config, f"config {file}")
    # Tables that YAML's anchors share become tables of their own, which settings change one at a time.
    copy: dict[str, Any] = json.loads(json.dumps(config))
    return copy


def _yaml(text: str) -> Any:
    # Not PyYAML, which reads YAML 1.1: 1e-3 is text there, and no and off are booleans.
    return YAML(typ="safe", pure=True).load(text)


_PARSERS: dict[str, Callable[[str], Any]] = {
    ".json": json.loads,
    ".yaml": _yaml,
    ".yml": _yaml,
    ".toml": tomllib.loads,
}


def _merge(config: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            _merge(config[key], value)
        else:
            config[key] = value


def _set(config: dict[str, Any], setting: str) -> None:
    path, separator, text = setting.partition("=")
    keys = path.strip().split(".")
    if not separator or not all(keys):
        raise ConfigurationError(f"--set {setting}: expected key=value or key.key=value")
    for depth, key in enumerate(keys[:-1], start=1):
        config = config.setdefault(key, {})
        if not isinstance(config, dict):
            raise ConfigurationError(f"--set {setting}: {'.'.join(keys[:depth])} is no table, but {config!r}")
    config[keys[-1]] = value = _value(setting, text.strip())
    _check(value, f"--set {setting}")


def _value(setting: str, text: str) -> Any:
    try:
        value = _yaml(text)
    except (ValueError, YAMLError) as error:
        problem = getattr(error, "problem", None) or str(error).strip() or "it cannot be read"
        raise ConfigurationError(
            f"--set {setting}: the value is no YAML or JSON: {problem}; write text in quotes"
        ) from error
    if value is None and text.startswith(("#", "-")):  # a comment, or the beginning of a document
        raise ConfigurationError(f"--set {setting}: the value is nothing in YAML; write text in quotes")
    return value


def _check(value: Any, source: str, path: str = "") -> None:
    """Refuse what JSON does not know: Prefect keeps the config with the flow run, and a retry reads it from there."""
    where = f"{source}: {path or 'the value'}"
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ConfigurationError(f"{where} has the key {key!r}, a {type(key).__name__}; write it in quotes")
            _check(inner, source, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _check(inner, source, f"{path}[{number}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigurationError(f"{where} is {value}, which JSON has no number for; write text in quotes")
    elif not isinstance(value, str | int | float | None):
        raise ConfigurationError(f"{where} is a {type(value).__name__} ({value}); write it in quotes, as text")
