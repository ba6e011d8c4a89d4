"""The settings in force, and where each of them stands."""

from __future__ import annotations

from collections.abc import Iterator

from prefect_elastic_train.core.operator_settings import (
    PROFILE,
    get_settings,
    given_settings,
    unknown_settings,
    variable_of,
)
from prefect_elastic_train.doctor.findings import Finding, ok, warn

__all__ = ["check_settings"]


def check_settings() -> Iterator[Finding]:
    """Say which settings are in force, where they stand, and what looks like one and is none.

    Raises:
        ConfigurationError: One has a value that is not allowed.
    """
    settings, given = get_settings(), given_settings()
    for setting, found in given.items():
        told = f"{setting} = {_shown(getattr(settings, setting))}, from {found.source}"
        if found.source == PROFILE:
            yield warn(
                told,
                "Prefect does not know settings of other packages: it warns of them, and `prefect config set` removes "
                f"them from a profile; put it into prefect.toml or set {variable_of(setting)}",
            )
        else:
            yield ok(told)
    defaults = [name for name in type(settings).model_fields if name not in given]
    if defaults:
        yield ok("by default " + ", ".join(f"{name} = {_shown(getattr(settings, name))}" for name in defaults))
    for name, source in unknown_settings():
        yield warn(f"{name}, from {source}, is no setting", "correct its name, or remove it")


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value) or "none"
