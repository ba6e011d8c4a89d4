"""`elastic-train doctor` in front of real servers, clusters and storages, healthy ones and broken ones."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import BlockDocumentUpdate
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner

from prefect_elastic_train import ElasticScaling, LocalStorage, RayCluster
from prefect_elastic_train.blocks.lookup import BLOCK_TYPES
from prefect_elastic_train.cli import app
from prefect_elastic_train.core.operator_settings import get_settings
from tests.support.processes import ROOT, RayHead, free_port, prefect_server, wait_for

PASSWORD = "operator:of-these-tests"
#: A healthy laptop is told so in less than 15 s, and the test prints how long it took. What it holds is twice that, as
#: other tests run beside this one on the same cores.
HEALTHY_SECONDS = 30.0
#: Carried by all processes of one doctor.
DOCTOR_VARIABLE = "TEST_DOCTOR_MARK"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that asks for a password, with our block types and nobody else's blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_SERVER_API_AUTH_STRING", PASSWORD)
        with prefect_server(tmp_path_factory.mktemp("guarded")) as url:
            patch.delenv("PREFECT_SERVER_API_AUTH_STRING")
            with temporary_settings({PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: PASSWORD}):
                for kind in (kind for kinds in BLOCK_TYPES.values() for kind in kinds):
                    kind.register_type_and_schema(_sync=True)  # type: ignore[call-arg]
            yield url
            # Prefect goes on sending the events of this process to the server that it began with.
            EventsWorker.drain_all(timeout=5)


@pytest.fixture
def server(guarded: str) -> Iterator[str]:
    """That server as this process's API, with the right password."""
    with temporary_settings({PREFECT_API_URL: guarded, PREFECT_API_AUTH_STRING: PASSWORD}):
        yield guarded


@pytest.fixture(autouse=True)
def _settings_are_read_anew() -> Iterator[None]:
    get_settings.cache_clear()
    yield
    get_settings.cache_clear()


@dataclass(frozen=True)
class Answer:
    """What the command has said."""

    exit_code: int
    told: dict[str, Any]

    def of(self, check: str, level: str) -> str:
        """Give what a check has told on a level."""
        found = [one for one in self.told["findings"] if (one["check"], one["level"]) == (check, level)]
        return " | ".join(f"{one['message']} {one['remedy']}" for one in found)

    def failed(self) -> set[str]:
        """Give the checks that have failed."""
        return {one["check"] for one in self.told["findings"] if one["level"] == "fail"}


def _doctor(*arguments: str) -> Answer:
    result = CliRunner().invoke(app, ["doctor", *arguments, "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Answer(result.exit_code, json.loads(result.stdout))


def _assert_names(answer: Answer, check: str, *parts: str) -> None:
    assert answer.exit_code == 1
    assert answer.failed() == {check}, answer.told
    for part in parts:
        assert part in answer.of(check, "fail")


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files, with a path that is short enough for Ray's sockets."""
    folder = Path(tempfile.mkdtemp(prefix="doc-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_a_healthy_machine_is_told_so_in_seconds_and_nothing_is_left(
    guarded: str, tmp_path: Path, temporary: Path
) -> None:
    mark = secrets.token_hex(8)
    environment = {
        **os.environ,
        "PREFECT_API_URL": guarded,
        "PREFECT_API_AUTH_STRING": PASSWORD,
        "HOME": str(tmp_path),
        "TMPDIR": str(temporary),
        DOCTOR_VARIABLE: mark,
    }
    done = subprocess.run(
        [sys.executable, "-c", "from prefect_elastic_train.cli import app; app()", "doctor", "--json"],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    print(f"healthy in {told['seconds']} s")
    assert told["seconds"] < HEALTHY_SECONDS
    assert {one["level"] for one in told["findings"]} == {"ok"}, told
    checks = {one["check"] for one in told["findings"]}
    assert checks == {"versions", "settings", "server", "blocks", "storage", "cluster"}
    assert not (tmp_path / "elastic_train_runs").exists()
    assert [path.name for path in temporary.glob("elt-*")] == []
    # The guard ends a moment after what it has guarded.
    with suppress(AssertionError):
        wait_for(lambda: not _carrying(mark), 10)
    assert _carrying(mark) == []


def _carrying(mark: str) -> list[str]:
    """Give the living processes that a doctor has started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(DOCTOR_VARIABLE) == mark:
                found.append(" ".join(process.cmdline())[:200])
        except psutil.Error:
            continue
    return found


def test_a_server_that_is_down_is_named_with_how_to_start_one(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}/api"
    with temporary_settings({PREFECT_API_URL: url}):
        answer = _doctor("--storage", str(tmp_path), "--cluster", "any")
    _assert_names(answer, "server", url, "PREFECT_API_URL", "`prefect server start`")
    assert "without the blocks" in answer.of("cluster", "skip")
    assert answer.told["seconds"] < HEALTHY_SECONDS


@pytest.mark.parametrize("password", [None, "not:the-password"])
def test_a_server_that_refuses_the_password_is_named_with_the_variable(
    guarded: str, tmp_path: Path, password: str | None
) -> None:
    with temporary_settings({PREFECT_API_URL: guarded, PREFECT_API_AUTH_STRING: password}):
        answer = _doctor("--storage", str(tmp_path), "--cluster", "any")
    _assert_names(answer, "server", guarded, "PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING")
    assert "the-password" not in json.dumps(answer.told)


def test_a_block_that_does_not_load_is_named_with_field_value_and_rule(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = ElasticScaling().save("edited", overwrite=True, _sync=True)
    secret = RayCluster(address="http://127.0.0.1:1", auth_token="token-nobody-shall-see").save(
        "edited", overwrite=True, _sync=True
    )
    monkeypatch.setenv("PREFECT_ELASTIC_TRAIN_DEFAULT_FAILURES", "no-such-budget")
    with get_client(sync_client=True) as client:
        try:
            client.update_block_document(document, BlockDocumentUpdate(data={"max_workers": -2}))
            client.update_block_document(
                secret, BlockDocumentUpdate(data={"auth_token": "token-nobody-shall-see", "adress": "x"})
            )
            answer = _doctor("--storage", str(tmp_path))
        finally:
            client.delete_block_document(document)
            client.delete_block_document(secret)
    _assert_names(answer, "blocks", "elastic-scaling/edited", "max_workers", "-2", "greater than or equal to 1")
    _assert_names(answer, "blocks", "ray-cluster-training/edited", "adress")
    _assert_names(answer, "blocks", "PREFECT_ELASTIC_TRAIN_DEFAULT_FAILURES='no-such-budget'", "prefect block ls")
    assert "token-nobody-shall-see" not in json.dumps(answer.told)


def test_a_storage_that_cannot_be_written_and_a_wrong_token_are_named_with_the_way_out(
    server: str, head: RayHead
) -> None:
    # Not even root may write below /sys.
    LocalStorage(path="/sys/elastic-train-runs").save("broken", overwrite=True, _sync=True)
    for address in (head.url, head.address):
        RayCluster(address=address, auth_token="not-the-token").save("broken", overwrite=True, _sync=True)
        answer = _doctor("--profile", "broken")
        assert answer.exit_code == 1
        assert answer.failed() == {"storage", "cluster"}
        for part in ("/sys/elastic-train-runs", "read-only", "To go on, give this user write permission, or another"):
            assert part in answer.of("storage", "fail")
        for part in (address, "refused the token", "auth_token of the RayCluster"):
            assert part in answer.of("cluster", "fail")
        for block in ("training-storage-directory/broken", "ray-cluster-training/broken"):
            assert block in answer.of("blocks", "ok")
        assert "not-the-token" not in json.dumps(answer.told)


def test_a_training_takes_the_blocks_that_the_settings_name(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect_elastic_train import ConfigurationError, elastic_train
    from prefect_elastic_train.orchestration.arguments import driver_spec

    ElasticScaling(max_workers=7).save("seven", overwrite=True, _sync=True)
    LocalStorage(path="/mnt/shared/seven").save("seven", overwrite=True, _sync=True)
    monkeypatch.setenv("PREFECT_ELASTIC_TRAIN_DEFAULT_SCALING", "seven")
    monkeypatch.setenv("PREFECT_ELASTIC_TRAIN_DEFAULT_STORAGE", "training-storage-directory/seven")
    asked = elastic_train.ask("package.module:loop")
    spec = driver_spec(asked.request, asked.blocks)
    assert (spec.scaling.max_workers, spec.storage.uri) == (7, "/mnt/shared/seven")
    assert spec.storage_block == "training-storage-directory/seven"
    asked = elastic_train.ask("package.module:loop", scaling=ElasticScaling(max_workers=2))
    given = driver_spec(asked.request, asked.blocks)
    assert given.scaling.max_workers == 2, "what is given stands before the settings"

    get_settings.cache_clear()
    monkeypatch.setenv("PREFECT_ELASTIC_TRAIN_DEFAULT_CLUSTER", "nowhere")
    with pytest.raises(ConfigurationError) as refused:
        elastic_train("package.module:loop")
    assert "PREFECT_ELASTIC_TRAIN_DEFAULT_CLUSTER='nowhere': cannot load block 'nowhere': there is no" in str(
        refused.value
    )
    get_settings.cache_clear()
    monkeypatch.setenv("PREFECT_ELASTIC_TRAIN_STOP_GRACE_SECONDS", "soon")
    with pytest.raises(ConfigurationError, match="PREFECT_ELASTIC_TRAIN_STOP_GRACE_SECONDS='soon'"):
        elastic_train("package.module:loop")
