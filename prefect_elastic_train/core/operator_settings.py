"""What an operator sets once for all trainings, wherever Prefect's own settings may stand.

Read in the flow process and by the command line, never in a driver or a worker: what those need is in their spec. It
imports Prefect's settings, so nothing that drivers load imports this.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar

from prefect.settings.base import PrefectBaseSettings, build_settings_config
from prefect.settings.sources import (
    EnvFilterSettingsSource,
    FilteredDotEnvSettingsSource,
    PrefectTomlConfigSettingsSource,
    ProfileSettingsTomlLoader,
    PyprojectTomlConfigSettingsSource,
)
from pydantic import AfterValidator, Field, ValidationError
from pydantic_settings import (
    DotEnvSettingsSource,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SecretsSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings.exceptions import SettingsError

from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.spec import MARK_VARIABLE

_PATH = ("elastic_train",)
_TABLE = ".".join(_PATH)
_BLOCK = re.compile(r"([a-z0-9-]+/)?[a-z0-9-]+")
#: What the active Prefect profile is called as a source.
PROFILE = "the active Prefect profile"
#: Settings that name the blocks of trainings that give none, by the argument of ``elastic_train`` that they stand for.
DEFAULT_BLOCKS = {
    "scaling": "default_scaling",
    "failures": "default_failures",
    "checkpoints": "default_checkpoints",
    "storage": "default_storage",
    "cluster": "default_cluster",
}


def _names_a_block(value: str) -> str:
    value = value.strip()
    if value and not _BLOCK.fullmatch(value):
        raise ValueError("expected the name of a saved block, as <name> or <block type>/<name>, such as spot-a100")
    return value


_BlockName = Annotated[str, AfterValidator(_names_a_block)]


class ElasticTrainSettings(PrefectBaseSettings):
    """Settings of this package, read from where Prefect reads its own, the first of these that has one.

    Environment variables ``PREFECT_ELASTIC_TRAIN_*``, the same in ``.env``, the table ``[elastic_train]`` of
    ``prefect.toml``, ``[tool.prefect.elastic_train]`` of ``pyproject.toml``, and the active Prefect profile. Files are
    those of the folder that the process was started in.

    Example:
        ``PREFECT_ELASTIC_TRAIN_POLL_INTERVAL_SECONDS=0.5`` polls the workers twice a second.
    """

    model_config: ClassVar[SettingsConfigDict] = build_settings_config(_PATH, frozen=True)

    poll_interval_seconds: float = Field(
        default=0.0,
        ge=0,
        description="How often the controller polls its workers. 0: 0.1 s, growing with max_workers.",
    )
    liveness_timeout_seconds: float = Field(
        default=300.0,
        gt=0,
        description="A driver whose controller gives no sign of life for so long counts as lost.",
    )
    stop_grace_seconds: float = Field(
        default=8.0, gt=0, description="How long a driver may take to end after SIGINT before SIGKILL."
    )
    flow_run_check_seconds: float = Field(
        default=3.0, gt=0, description="How often a training looks whether its flow run was cancelled or has ended."
    )
    local_cluster_timeout_seconds: float = Field(
        default=120.0, gt=0, description="How long a local cluster may take to start."
    )
    log_lines_per_second: float = Field(
        default=20.0,
        gt=0,
        description="How many lines a second of each source of output reach the Prefect log; rank 0 does in full.",
    )
    reporting: bool = Field(
        default=True, description="Whether the report, the progress and the run's events are written to Prefect."
    )
    report_interval_seconds: float = Field(
        default=10.0, ge=5, description="How often the report is updated while nothing but training happens."
    )
    default_scaling: _BlockName = Field(
        default="", description="Saved ElasticScaling of trainings that give none. Empty: one CPU worker."
    )
    default_failures: _BlockName = Field(
        default="", description="Saved FailureBudget of trainings that give none. Empty: its defaults."
    )
    default_checkpoints: _BlockName = Field(
        default="", description="Saved CheckpointPolicy of trainings that give none. Empty: all checkpoints are kept."
    )
    default_storage: _BlockName = Field(
        default="", description="Saved storage of trainings that give none. Empty: ~/elastic_train_runs."
    )
    default_cluster: _BlockName = Field(
        default="", description="Saved RayCluster of trainings that give none. Empty: a local cluster each."
    )

    def poll_interval(self, max_workers: int) -> float:
        """Give the poll interval in seconds for a worker group of up to ``max_workers``.

        Short, since ``report()`` waits for a poll and what was not polled is lost with a worker; longer for
        large groups, since a poll costs a call to each worker.
        """
        return self.poll_interval_seconds or min(2.0, max(0.1, 0.005 * max_workers))


@cache
def get_settings() -> ElasticTrainSettings:
    """Give the settings of this process.

    Raises:
        ConfigurationError: A value is not allowed, or a file cannot be read.
    """
    try:
        return ElasticTrainSettings()
    except SettingsError as error:
        raise ConfigurationError(str(error)) from error
    except ValidationError as error:
        raise ConfigurationError(_refusal(error)) from None
    except (AttributeError, TypeError, ValueError, OSError) as error:  # Prefect's sources take a file as it comes
        raise ConfigurationError(
            f"settings cannot be read ({type(error).__name__}: {error}): .env, prefect.toml, pyproject.toml and "
            "the active Prefect profile must be text in UTF-8, and tables must be tables of settings and their values"
        ) from error


def default_block_name(argument: str) -> str:
    """Give the name of the saved block that stands for an argument of ``elastic_train``; empty if none does."""
    name: str = getattr(get_settings(), DEFAULT_BLOCKS[argument])
    return name


@contextmanager
def naming_the_setting(argument: str) -> Iterator[None]:
    """Have what is wrong with a default block say which setting names it: nobody has typed it just now."""
    try:
        yield
    except ConfigurationError as error:
        variable = variable_of(DEFAULT_BLOCKS[argument])
        raise ConfigurationError(f"{variable}={default_block_name(argument)!r}: {error}") from error


def variable_of(setting: str) -> str:
    """Give the environment variable of a setting."""
    return f"{ElasticTrainSettings.model_config.get('env_prefix', '')}{setting.upper()}"


@dataclass(frozen=True)
class Given:
    """A setting that stands somewhere.

    Attributes:
        value: As it is written there.
        source: Where that is, for people.
    """

    value: Any
    source: str


def given_settings() -> dict[str, Given]:
    """Give the settings that are not left at their defaults, each from the source that counts.

    Raises:
        SettingsError: A file cannot be read.
    """
    given: dict[str, Given] = {}
    for source in _sources():
        for setting, value in source().items():
            if setting in ElasticTrainSettings.model_fields:
                given.setdefault(setting, Given(value, _NAMES[type(source)]))
    return given


def unknown_settings() -> Iterator[tuple[str, str]]:
    """Find what looks like a setting and is none, such as a misspelt one; give its name and where it stands.

    Raises:
        SettingsError: A file cannot be read.
    """
    prefix = variable_of("")
    variables = {variable_of(setting) for setting in ElasticTrainSettings.model_fields} | {MARK_VARIABLE}
    for source in _sources():
        if isinstance(source, PrefectTomlConfigSettingsSource | PyprojectTomlConfigSettingsSource):
            found = [name for name in source.toml_data if name not in ElasticTrainSettings.model_fields]
        else:
            names = source.profile_settings if isinstance(source, ProfileSettingsTomlLoader) else _variables(source)
            found = [name for name in map(str.upper, names) if name.startswith(prefix) and name not in variables]
        yield from ((name, _NAMES[type(source)]) for name in found)


_NAMES: dict[type[PydanticBaseSettingsSource], str] = {
    EnvFilterSettingsSource: "the environment",
    FilteredDotEnvSettingsSource: "the file .env",
    PrefectTomlConfigSettingsSource: f"the table [{_TABLE}] of prefect.toml",
    PyprojectTomlConfigSettingsSource: f"the table [tool.prefect.{_TABLE}] of pyproject.toml",
    ProfileSettingsTomlLoader: PROFILE,
}


def _sources() -> Iterator[PydanticBaseSettingsSource]:
    """Give Prefect's sources of settings, the one that overrules the others first."""
    bare = (
        InitSettingsSource(ElasticTrainSettings, {}),
        EnvSettingsSource(ElasticTrainSettings),
        DotEnvSettingsSource(ElasticTrainSettings),
        SecretsSettingsSource(ElasticTrainSettings),
    )
    found = ElasticTrainSettings.settings_customise_sources(ElasticTrainSettings, *bare)
    return (source for source in found if type(source) in _NAMES)


def _variables(source: PydanticBaseSettingsSource) -> list[str]:
    return list(source.env_vars) if isinstance(source, FilteredDotEnvSettingsSource) else list(os.environ)


def _refusal(error: ValidationError) -> str:
    """Say which settings are wrong, where they stand, and what is allowed."""
    given = given_settings()
    parts = []
    for one in error.errors(include_url=False):
        setting = str(one["loc"][0])
        found = given.get(setting, Given(one["input"], "an unknown source"))
        rule = one["msg"].removeprefix("Value error, ")
        parts.append(f"{variable_of(setting)}={str(found.value)!r}, from {found.source}, is not allowed: {rule}")
    return "; ".join(parts)
