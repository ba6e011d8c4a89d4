"""What an operator sets once: from which places it is read, which of them counts, and what is said of bad values."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from prefect_elastic_train.blocks.lookup import chosen_block
from prefect_elastic_train.core.operator_settings import (
    ElasticTrainSettings,
    get_settings,
    variable_of,
)
from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.settings import without_credentials

#: By setting its text, and what that means; no default.
SETTINGS = {
    "poll_interval_seconds": ("0.5", 0.5),
    "liveness_timeout_seconds": ("60", 60.0),
    "stop_grace_seconds": ("3", 3.0),
    "termination_grace_seconds": ("0", 0.0),
    "flow_run_check_seconds": ("1", 1.0),
    "local_cluster_timeout_seconds": ("30", 30.0),
    "log_lines_per_second": ("5", 5.0),
    "reporting": ("0", False),
    "report_interval_seconds": ("30", 30.0),
    "default_storage": ("training-storage-s3/prod", "training-storage-s3/prod"),
    **{f"default_{what}": (" prod ", "prod") for what in ("scaling", "failures", "checkpoints", "cluster")},
}
REFUSED = [
    ("poll_interval_seconds", "-1", "greater than or equal to 0"),
    ("report_interval_seconds", "4.9", "greater than or equal to 5"),
    ("default_storage", "s3://bucket/runs", "match pattern"),
]
STOP_GRACE = "PREFECT_ELASTIC_TRAIN_STOP_GRACE_SECONDS"
#: Each file that settings may stand in, with a text of it; those after it stand before it.
FILES = {
    "profiles.toml": f'active = "mine"\n[profiles.mine]\n{STOP_GRACE} = "1"\n',
    "pyproject.toml": "[tool.prefect.elastic_train]\nstop_grace_seconds = 2\n",
    "prefect.toml": "[elastic_train]\nstop_grace_seconds = 3\n",
    ".env": f"{STOP_GRACE}=4\n",
}


@pytest.fixture(autouse=True)
def _nothing_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder, an empty profile and no variable; and what a test makes the process read is forgotten."""
    for setting in SETTINGS:
        monkeypatch.delenv(variable_of(setting), raising=False)
    monkeypatch.setenv("PREFECT_PROFILES_PATH", str(tmp_path / "profiles.toml"))
    monkeypatch.chdir(tmp_path)
    get_settings.cache_clear()
    yield
    get_settings.cache_clear()


@pytest.mark.parametrize("setting", ElasticTrainSettings.model_fields)
def test_every_setting_is_read_from_its_variable_once(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, meaning = SETTINGS[setting]
    assert getattr(ElasticTrainSettings(), setting) != meaning
    monkeypatch.setenv(f"PREFECT_ELASTIC_TRAIN_{setting.upper()}", text)
    assert getattr(get_settings(), setting) == meaning
    assert get_settings() is get_settings()


def test_each_source_overrules_those_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, (name, text) in enumerate(FILES.items(), start=1):
        Path(name).write_text(text)
        assert ElasticTrainSettings().stop_grace_seconds == seconds, name
    monkeypatch.setenv(STOP_GRACE, "5")
    assert ElasticTrainSettings().stop_grace_seconds == 5


@pytest.mark.parametrize(("setting", "text", "rule"), REFUSED)
def test_a_bad_value_is_refused_by_name_value_and_rule(
    setting: str, text: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable_of(setting), text)
    with pytest.raises(ConfigurationError, match=rule) as refused:
        get_settings()
    assert f"{variable_of(setting)}='{text}' is not allowed: " in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_a_default_block_that_is_refused_is_told_with_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_ELASTIC_TRAIN_DEFAULT_STORAGE", "prod")
    # No Prefect API is configured here: that is not the same as a name that nobody has saved.
    refusal = r"^PREFECT_ELASTIC_TRAIN_DEFAULT_STORAGE='prod': cannot load block .*API"
    with pytest.raises(ConfigurationError, match=refusal):
        chosen_block("storage")


@pytest.mark.parametrize(("workers", "seconds"), [(1, 0.1), (64, 0.32), (4096, 2.0)])
def test_the_poll_interval_grows_with_the_workers_within_bounds(workers: int, seconds: float) -> None:
    assert ElasticTrainSettings().poll_interval(workers) == pytest.approx(seconds)
    assert ElasticTrainSettings(poll_interval_seconds=0.7).poll_interval(workers) == 0.7


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://AKIA:se/cr@et+/x@bucket/runs", "s3://***@bucket/runs"),
        ("https://token@host/a", "https://***@host/a"),
        ("AKIA:se/cr@et@bucket", "***@bucket"),
        ("ftp:/ada:sesame@host", "ftp:/***@host"),
        ("got 'sftp://ada:s'me@host' twice", "got 'sftp://***@host' twice"),
        ("http://a:b@c is away, ask http://d:e@f", "http://***@c is away, ask http://***@f"),
        ('{"url": "https://a:b/c@d", "n": 1}', '{"url": "https://***@d", "n": 1}'),
        *(
            (text, text)
            for text in ("gs://bucket/runs", "http://host:8265/api", "error: ask ada@example.com", "a@b", "")
        ),
    ],
)
def test_user_and_password_are_left_out_and_nothing_else(text: str, shown: str) -> None:
    assert without_credentials(text) == shown
