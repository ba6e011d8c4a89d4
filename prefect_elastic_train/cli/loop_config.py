"""The config of a train loop from files and from ``--set key=value``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
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
        files: TOML (``.toml``), else YAML 1.2 or JSON. Tables in tables are merged.
        settings: Such as ``optimizer.lr=0.1``: dots nest, and the value is what YAML 1.2 takes it for.

    Raises:
        ConfigurationError: A file or a setting cannot be used, or holds what JSON does not know.
    """
    config: dict[str, Any] = {}
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
            more = tomllib.loads(text) if file.suffix == ".toml" else _yaml(text)
        except (OSError, ValueError, YAMLError) as error:
            raise ConfigurationError(f"config {file} cannot be read: {error}") from error
        _merge(config, more or {}, f"config {file}")
    for setting in settings:
        path, separator, value = setting.partition("=")
        keys = path.strip().split(".")
        if not separator or not all(keys):
            raise ConfigurationError(f"--set {setting}: expected key=value or key.key=value")
        try:
            more = _yaml(value)
        except (ValueError, YAMLError) as error:
            raise ConfigurationError(f"--set {setting}: the value is no YAML; write text in quotes: {error}") from error
        for key in reversed(keys):
            more = {key: more}
        _merge(config, more, f"--set {setting}")
    return config


def _yaml(text: str) -> Any:
    # Not PyYAML, which reads YAML 1.1: 1e-3 is text there, and no and off are booleans.
    return YAML(typ="safe", pure=True).load(text)


def _merge(config: dict[str, Any], more: Any, source: str) -> None:
    if not isinstance(more, dict):
        raise ConfigurationError(f"{source} must be a table of keys and values, got a {type(more).__name__}")
    try:
        # Prefect keeps it with the flow run as JSON. Tables that YAML's anchors share become tables of their own.
        more = json.loads(json.dumps(more, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{source} is no JSON; write dates and the like as text, in quotes: {error}"
        ) from error
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            _merge(config[key], value, source)
        else:
            config[key] = value
