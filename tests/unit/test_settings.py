"""What an operator sets once: from which places it is read, which of them counts, and what is said of bad values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.settings.profiles import Profile
from pydantic_settings.exceptions import SettingsError

from prefect_elastic_train.core.operator_settings import (
    DEFAULT_BLOCKS,
    PROFILE,
    ElasticTrainSettings,
    Given,
    default_block_name,
    get_settings,
    given_settings,
    naming_the_setting,
    unknown_settings,
    variable_of,
)
from prefect_elastic_train.core.outcomes import ConfigurationError

#: Environment variable, its text, what that means, and a default that differs from it.
VARIABLES: dict[str, tuple[str, Any, Any]] = {
    "PREFECT_ELASTIC_TRAIN_POLL_INTERVAL_SECONDS": ("0.5", 0.5, 0.0),
    "PREFECT_ELASTIC_TRAIN_LIVENESS_TIMEOUT_SECONDS": ("60", 60.0, 300.0),
    "PREFECT_ELASTIC_TRAIN_STOP_GRACE_SECONDS": ("3", 3.0, 8.0),
    "PREFECT_ELASTIC_TRAIN_FLOW_RUN_CHECK_SECONDS": ("1", 1.0, 3.0),
    "PREFECT_ELASTIC_TRAIN_LOCAL_CLUSTER_TIMEOUT_SECONDS": ("30", 30.0, 120.0),
    "PREFECT_ELASTIC_TRAIN_LOG_LINES_PER_SECOND": ("5", 5.0, 20.0),
    "PREFECT_ELASTIC_TRAIN_REPORTING": ("0", False, True),
    "PREFECT_ELASTIC_TRAIN_REPORT_INTERVAL_SECONDS": ("30", 30.0, 10.0),
    "PREFECT_ELASTIC_TRAIN_DEFAULT_SCALING": ("spot-a100", "spot-a100", ""),
    "PREFECT_ELASTIC_TRAIN_DEFAULT_FAILURES": ("failure-budget/long", "failure-budget/long", ""),
    "PREFECT_ELASTIC_TRAIN_DEFAULT_CHECKPOINTS": (" keep-3 ", "keep-3", ""),
    "PREFECT_ELASTIC_TRAIN_DEFAULT_STORAGE": ("training-storage-s3/prod", "training-storage-s3/prod", ""),
    "PREFECT_ELASTIC_TRAIN_DEFAULT_CLUSTER": ("prod", "prod", ""),
}

REFUSED = [
    ("PREFECT_ELASTIC_TRAIN_POLL_INTERVAL_SECONDS", "-1", "greater than or equal to 0"),
    ("PREFECT_ELASTIC_TRAIN_LIVENESS_TIMEOUT_SECONDS", "0", "greater than 0"),
    ("PREFECT_ELASTIC_TRAIN_STOP_GRACE_SECONDS", "soon", "valid number"),
    ("PREFECT_ELASTIC_TRAIN_FLOW_RUN_CHECK_SECONDS", "0", "greater than 0"),
    ("PREFECT_ELASTIC_TRAIN_LOCAL_CLUSTER_TIMEOUT_SECONDS", "0", "greater than 0"),
    ("PREFECT_ELASTIC_TRAIN_LOG_LINES_PER_SECOND", "0", "greater than 0"),
    ("PREFECT_ELASTIC_TRAIN_REPORTING", "perhaps", "valid boolean"),
    ("PREFECT_ELASTIC_TRAIN_REPORT_INTERVAL_SECONDS", "4.9", "greater than or equal to 5"),
    ("PREFECT_ELASTIC_TRAIN_DEFAULT_STORAGE", "s3://bucket/runs", "the name of a saved block"),
    ("PREFECT_ELASTIC_TRAIN_DEFAULT_CLUSTER", "a b", "the name of a saved block"),
]

Write = Callable[[str, str], None]


@pytest.fixture(autouse=True)
def _nothing_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder, an empty profile and no variable; and what a test makes the process read is forgotten."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PREFECT_PROFILES_PATH", str(tmp_path / "profiles.toml"))
    monkeypatch.chdir(tmp_path)
    get_settings.cache_clear()
    yield
    get_settings.cache_clear()


def _in_environment(monkeypatch: pytest.MonkeyPatch) -> Write:
    return lambda setting, text: monkeypatch.setenv(variable_of(setting), text)


def _in_dotenv(_: pytest.MonkeyPatch) -> Write:
    return lambda setting, text: _write(".env", f"{variable_of(setting)}='{text}'\n")


def _in_prefect_toml(_: pytest.MonkeyPatch) -> Write:
    return lambda setting, text: _write("prefect.toml", f'[elastic_train]\n{setting} = "{text}"\n')


def _in_pyproject(_: pytest.MonkeyPatch) -> Write:
    return lambda setting, text: _write("pyproject.toml", f'[tool.prefect.elastic_train]\n{setting} = "{text}"\n')


def _in_profile(_: pytest.MonkeyPatch) -> Write:
    return lambda setting, text: _write(
        "profiles.toml", f'active = "mine"\n[profiles.mine]\n{variable_of(setting)} = "{text}"\n'
    )


def _write(name: str, text: str) -> None:
    Path(name).write_text(text)


#: Each source by what it is called, the one that overrules the others first.
SOURCES: dict[str, Callable[[pytest.MonkeyPatch], Write]] = {
    "the environment": _in_environment,
    "the file .env": _in_dotenv,
    "the table [elastic_train] of prefect.toml": _in_prefect_toml,
    "the table [tool.prefect.elastic_train] of pyproject.toml": _in_pyproject,
    PROFILE: _in_profile,
}


def _field(variable: str) -> str:
    return variable.removeprefix("PREFECT_ELASTIC_TRAIN_").lower()


def test_the_variables_in_the_tests_are_all_there_are() -> None:
    assert {_field(variable) for variable in VARIABLES} == ElasticTrainSettings.model_fields.keys()
    assert {variable_of(setting) for setting in ElasticTrainSettings.model_fields} == VARIABLES.keys()
    assert set(DEFAULT_BLOCKS.values()) <= ElasticTrainSettings.model_fields.keys()


@pytest.mark.parametrize(
    ("variable", "text", "meaning", "default"), [(name, *rest) for name, rest in VARIABLES.items()]
)
def test_every_setting_is_read_from_its_variable(
    variable: str, text: str, meaning: Any, default: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert getattr(ElasticTrainSettings(), _field(variable)) == default
    monkeypatch.setenv(variable, text)
    assert getattr(ElasticTrainSettings(), _field(variable)) == meaning


def test_each_source_overrules_those_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, (source, place) in enumerate(reversed(SOURCES.items()), start=1):
        place(monkeypatch)("stop_grace_seconds", str(seconds))
        assert ElasticTrainSettings().stop_grace_seconds == seconds, source
        assert given_settings() == {"stop_grace_seconds": Given(str(seconds), source)}


def test_a_setting_that_one_source_lacks_comes_from_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [name for name in VARIABLES if not name.endswith("REPORTING")]
    for variable, (source, place) in zip(settings, SOURCES.items(), strict=False):
        place(monkeypatch)(_field(variable), VARIABLES[variable][0])
        assert given_settings()[_field(variable)].source == source
    for variable, _ in zip(settings, SOURCES, strict=False):
        assert getattr(ElasticTrainSettings(), _field(variable)) == VARIABLES[variable][1]


@pytest.mark.parametrize(("variable", "text", "rule"), REFUSED)
def test_a_bad_value_is_refused_by_name_value_rule_and_source(
    variable: str, text: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigurationError) as refused:
        get_settings()
    assert f"{variable}='{text}', from the environment, is not allowed: " in str(refused.value)
    assert rule in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("source", SOURCES)
def test_a_bad_value_is_refused_with_where_it_stands(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    SOURCES[source](monkeypatch)("stop_grace_seconds", "soon")
    with pytest.raises(ConfigurationError) as refused:
        get_settings()
    assert f"PREFECT_ELASTIC_TRAIN_STOP_GRACE_SECONDS='soon', from {source}, is not allowed" in str(refused.value)


def test_all_bad_values_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_ELASTIC_TRAIN_STOP_GRACE_SECONDS", "soon")
    monkeypatch.setenv("PREFECT_ELASTIC_TRAIN_REPORTING", "perhaps")
    with pytest.raises(ConfigurationError, match=r"STOP_GRACE_SECONDS='soon'.*; .*REPORTING='perhaps'"):
        get_settings()


def test_a_file_that_is_no_toml_is_named() -> None:
    _write("prefect.toml", "[elastic_train\n")
    with pytest.raises(ConfigurationError, match=r"prefect\.toml.*invalid TOML"):
        get_settings()
    with pytest.raises(SettingsError):
        given_settings()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("prefect.toml", b"elastic_train = 5\n"),
        ("prefect.toml", b"[[elastic_train]]\n"),
        ("prefect.toml", b"a = '\xff'\n"),
        ("pyproject.toml", b"tool = 5\n"),
        ("profiles.toml", b"active = 'mine'\n[profiles]\nmine = 5\n"),
        (".env", b"A=\xff\n"),
    ],
)
def test_a_file_of_another_shape_is_refused_in_one_line_with_the_files_that_are_read(name: str, text: bytes) -> None:
    Path(name).write_bytes(text)
    for ask in (get_settings, lambda: default_block_name("storage")):
        with pytest.raises(ConfigurationError, match=r"^settings cannot be read \(.*prefect.toml") as refused:
            ask()
        assert len(str(refused.value).splitlines()) == 1


def test_what_is_no_setting_is_found_in_each_source(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in SOURCES.values():
        place(monkeypatch)("reportng", "1")
    monkeypatch.setenv("PREFECT_ELASTIC_TRAIN_PROCESS_MARK", "0123")
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    monkeypatch.setenv("PREFECT_ELASTIC_TRAIN_REPORTING", "1")
    variable = "PREFECT_ELASTIC_TRAIN_REPORTNG"
    in_tables = [source for source in SOURCES if "table" in source]
    assert list(unknown_settings()) == [("reportng" if source in in_tables else variable, source) for source in SOURCES]
    assert get_settings().reporting, "and passed over"


def test_prefect_itself_does_not_keep_our_settings_in_a_profile() -> None:
    # Why the documentation prefers prefect.toml: what Prefect drops here is gone when it next writes the profile.
    with pytest.warns(UserWarning, match="PREFECT_ELASTIC_TRAIN_REPORTING' is not recognized"):
        profile = Profile(name="mine", settings={"PREFECT_ELASTIC_TRAIN_REPORTING": "false"})
    assert profile.settings == {}


def test_a_default_block_that_is_refused_is_told_with_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_block_name("storage") == ""
    get_settings.cache_clear()
    monkeypatch.setenv("PREFECT_ELASTIC_TRAIN_DEFAULT_STORAGE", "prod")
    assert default_block_name("storage") == "prod"
    with (
        pytest.raises(ConfigurationError, match=r"^PREFECT_ELASTIC_TRAIN_DEFAULT_STORAGE='prod': there is none$"),
        naming_the_setting("storage"),
    ):
        raise ConfigurationError("there is none")


@pytest.mark.parametrize(("workers", "seconds"), [(1, 0.1), (20, 0.1), (64, 0.32), (400, 2.0), (4096, 2.0)])
def test_the_poll_interval_grows_with_the_workers_within_bounds(workers: int, seconds: float) -> None:
    assert ElasticTrainSettings().poll_interval(workers) == pytest.approx(seconds)
    settings: Any = ElasticTrainSettings(poll_interval_seconds=0.7)
    assert settings.poll_interval(workers) == 0.7


def test_a_process_reads_its_settings_once() -> None:
    assert get_settings() is get_settings()
