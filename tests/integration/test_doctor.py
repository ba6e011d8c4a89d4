"""`elastic-train doctor` in front of real servers, clusters and storages, healthy ones and broken ones."""

import json
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import BlockDocumentUpdate
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner

from prefect_elastic_train import ElasticScaling, LocalStorage, RayCluster
from prefect_elastic_train.blocks.lookup import BLOCK_TYPES
from prefect_elastic_train.cli import app
from prefect_elastic_train.core.operator_settings import get_settings
from prefect_elastic_train.orchestration.arguments import driver_spec
from prefect_elastic_train.orchestration.task import make_training
from tests.support.clusters import RayHead
from tests.support.processes import ROOT, call, carrying, free_port, prefect_server, wait_for

CANARY = "token-nobody-shall-see"
#: A healthy laptop is told so in less than 15 s. What the test holds is more, as others run on the same cores.
HEALTHY_SECONDS = 60.0


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with our block types and nobody else's blocks."""
    with prefect_server(tmp_path_factory.mktemp("prefect")) as url:
        with temporary_settings({PREFECT_API_URL: url}):
            for kind in (kind for kinds in BLOCK_TYPES.values() for kind in kinds):
                kind.register_type_and_schema(_sync=True)  # type: ignore[call-arg]
        yield url
        # Prefect goes on sending the events of this process to the server that it began with.
        EventsWorker.drain_all(timeout=5)


@pytest.fixture
def server(own_server: str) -> Iterator[str]:
    """That server as this process's API."""
    with temporary_settings({PREFECT_API_URL: own_server}):
        yield own_server


@pytest.fixture(autouse=True)
def _settings_are_read_anew() -> Iterator[None]:
    get_settings.cache_clear()
    yield
    get_settings.cache_clear()


def _found(told: dict[str, Any], check: str, level: str = "fail") -> str:
    """What a check has told on a level."""
    found = [one for one in told["findings"] if (one["check"], one["level"]) == (check, level)]
    return " | ".join(f"{one['message']} {one['remedy']}" for one in found)


def _doctor(*arguments: str, fails: set[str]) -> dict[str, Any]:
    """What the command tells, of which just these checks fail."""
    result = CliRunner().invoke(app, ["doctor", *arguments, "--json"])
    assert isinstance(result.exception, SystemExit), result.exception
    told: dict[str, Any] = json.loads(result.stdout)
    assert {one["check"] for one in told["findings"] if one["level"] == "fail"} == fails, told
    assert (result.exit_code, CANARY in result.stdout) == (1, False)
    return told


def test_a_healthy_machine_is_told_so_in_seconds_and_nothing_is_left(own_server: str, tmp_path: Path) -> None:
    mark = f"TEST_DOCTOR_MARK={secrets.token_hex(8)}"
    temporary = Path(tempfile.mkdtemp(prefix="doc-", dir="/tmp"))  # short enough for Ray's sockets
    variables = (mark, f"PREFECT_API_URL={own_server}", f"PYTHONPATH={ROOT}", f"HOME={tmp_path}", f"TMPDIR={temporary}")
    command = (sys.executable, "-c", "from prefect_elastic_train.cli import app; app()", "doctor", "--json")
    told = json.loads(call("env", *variables, *command, folder=tmp_path, timeout=90, stderr=subprocess.PIPE))
    assert told["seconds"] < HEALTHY_SECONDS
    assert {one["level"] for one in told["findings"]} == {"ok"}, told
    assert {one["check"] for one in told["findings"]} == {"versions", "server", "blocks", "storage", "cluster"}
    assert [*(tmp_path / "elastic_train_runs").iterdir()] == []
    assert [path.name for path in temporary.glob("elt-*")] == []
    wait_for(lambda: not carrying(mark), 10, "the guard to end, a moment after what it has guarded")
    shutil.rmtree(temporary, ignore_errors=True)


def test_a_server_that_is_down_is_named_with_how_to_start_one(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}/api"
    with temporary_settings({PREFECT_API_URL: url}):
        told = _doctor("--storage", str(tmp_path), "--cluster", "any", fails={"server"})
    for part in (url, "PREFECT_API_URL", "`prefect server start`"):
        assert part in _found(told, "server")
    assert not _found(told, "cluster", "ok")
    assert told["seconds"] < HEALTHY_SECONDS


def test_a_block_that_does_not_load_is_named_with_field_value_and_rule(server: str, tmp_path: Path) -> None:
    cluster = RayCluster(address="http://127.0.0.1:1", auth_token=CANARY)
    edits = ((ElasticScaling(), {"max_workers": -2}), (cluster, {"auth_token": CANARY, "adress": "x"}))
    documents = [block.save("edited", overwrite=True, _sync=True) for block, _ in edits]
    with get_client(sync_client=True) as client:
        try:
            for document, (_, data) in zip(documents, edits, strict=True):
                client.update_block_document(document, BlockDocumentUpdate(data=data))
            for option, parts in {
                "--profile": ("elastic-scaling/edited", "max_workers", "-2", "greater than or equal to 1"),
                "--cluster": ("ray-cluster-training/edited", "adress"),
            }.items():
                told = _found(_doctor("--storage", str(tmp_path), option, "edited", fails={"blocks"}), "blocks")
                assert [part for part in parts if part not in told] == []
        finally:
            for document in documents:
                client.delete_block_document(document)


def test_a_storage_that_cannot_be_written_and_a_wrong_token_are_named_with_the_way_out(
    server: str, head: RayHead
) -> None:
    # Not even root may write below /sys.
    LocalStorage(path="/sys/elastic-train-runs").save("broken", overwrite=True, _sync=True)
    for address in (head.url, head.address):
        RayCluster(address=address, auth_token=CANARY).save("broken", overwrite=True, _sync=True)
        told = _doctor("--profile", "broken", fails={"storage", "cluster"})
        parts = {
            "storage": ("/sys/elastic-train-runs", "read-only", "To go on, give this user write permission, or use"),
            "cluster": (address, "refused the token", "auth_token of the RayCluster"),
        }
        for check in parts:
            assert [part for part in parts[check] if part not in _found(told, check)] == []


def test_a_training_takes_the_blocks_that_the_settings_name(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ElasticScaling(max_workers=7).save("seven", overwrite=True, _sync=True)
    LocalStorage(path="/mnt/shared/seven").save("seven", overwrite=True, _sync=True)
    monkeypatch.setenv("PREFECT_ELASTIC_TRAIN_DEFAULT_SCALING", "seven")
    monkeypatch.setenv("PREFECT_ELASTIC_TRAIN_DEFAULT_STORAGE", "training-storage-directory/seven")
    # What is given stands before the settings.
    for given, workers in (({}, 7), ({"scaling": ElasticScaling(max_workers=2)}, 2)):
        asked = make_training("package.module:loop", **given)
        spec = driver_spec(asked.request, asked.blocks)
        assert (spec.scaling.max_workers, spec.storage.uri) == (workers, "/mnt/shared/seven")
        assert spec.storage_block == "training-storage-directory/seven"
