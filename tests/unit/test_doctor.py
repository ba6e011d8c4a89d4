"""What `elastic-train doctor` makes of what it sees, as far as that needs no Ray and no Prefect server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from prefect.settings import PREFECT_API_URL, temporary_settings
from pydantic import SecretStr
from typer.testing import CliRunner

from prefect_elastic_train.cli import app
from prefect_elastic_train.core.operator_settings import get_settings
from prefect_elastic_train.core.settings import ClusterSettings
from prefect_elastic_train.core.spec import MARK_VARIABLE
from prefect_elastic_train.core.storage_settings import LocalStorageSettings, S3StorageSettings
from prefect_elastic_train.doctor import machine
from prefect_elastic_train.doctor.clusters import check_cluster
from prefect_elastic_train.doctor.findings import Check, Finding, Level, fail, ok
from prefect_elastic_train.doctor.machine import check_leftovers, check_requirements, check_settings, check_storage
from prefect_elastic_train.doctor.prefect_server import check_server
from tests.support.processes import free_port


@contextmanager
def _answering(answers: dict[str, Any]) -> Iterator[str]:
    """Run a server that answers some paths with JSON or an HTTP status, all others with 404; give its URL."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path, 404)
            body = json.dumps(answer).encode()
            self.send_response(answer if isinstance(answer, int) else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def _levels(findings: Iterable[Finding]) -> list[Level]:
    return [finding.level for finding in findings]


def _told(findings: Iterable[Finding], level: Level) -> str:
    return " | ".join(f"{one.message} {one.remedy}" for one in findings if one.level is level)


def test_a_check_that_crashes_is_a_finding_beside_what_it_has_found() -> None:
    def check() -> Iterator[Finding]:
        yield ok("so far")
        raise KeyError("gone")

    assert Check("mine", check, 5, "").findings() == [
        Finding(Level.OK, "so far", check="mine"),
        Finding(Level.FAIL, "KeyError: 'gone'", check="mine"),
    ]


def test_a_check_that_hangs_is_a_finding_when_its_time_is_up() -> None:
    release = threading.Event()

    def check() -> Iterator[Finding]:
        yield ok("so far")
        release.wait(30)

    started = time.monotonic()
    look = Check("mine", check, 0.3, "ask the operator")
    found = look.findings()
    release.set()
    assert time.monotonic() - started < 5
    assert _levels(found) == [Level.OK, Level.FAIL]
    assert (found[1].message, found[1].remedy) == ("no answer within 0.3 s", "ask the operator")


def test_a_password_in_a_url_is_not_told() -> None:
    [found] = Check(
        "mine", lambda: [fail("http://me:secret@host/api\nis away", "ask s3://k:s@bucket")], 5, ""
    ).findings()
    assert (found.message, found.remedy) == ("http://***@host/api is away", "ask s3://***@bucket")


def test_this_environment_has_the_versions_that_the_metadata_asks_for() -> None:
    [found] = machine.check_versions()
    assert found.level is Level.OK
    assert f"ray {version('ray')}" in found.message
    assert f"prefect {version('prefect')}" in found.message


def test_a_version_out_of_bounds_is_told_with_both_and_the_command() -> None:
    texts = ["ray[default,train]<2", "no-such-package>=1", 'torch<2; extra == "torch"']
    ray, missing, torch = check_requirements([Requirement(text) for text in texts])
    assert (ray.level, missing.level, torch.level) == (Level.FAIL, Level.FAIL, Level.WARN)
    assert f"ray is {version('ray')}, and prefect-elastic-train needs <2" in ray.message
    assert (missing.message.startswith("no-such-package is not installed"), torch.remedy) == (
        True,
        "`pip install 'torch<2'`",
    )


def test_what_fits_or_is_not_needed_is_no_problem() -> None:
    texts = [
        "ray>=2.60",
        'no-such-package>=1; extra == "s3"',
        'no-such-package>=1; extra == "dev"',
        'no-such-package>=1; python_version < "3"',
        'torch>=2; extra == "torch"',
    ]
    assert list(check_requirements([Requirement(text) for text in texts])) == []


@pytest.fixture
def _own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PREFECT_PROFILES_PATH", str(tmp_path / "profiles.toml"))
    get_settings.cache_clear()
    yield
    get_settings.cache_clear()


@pytest.mark.usefixtures("_own_settings")
def test_settings_are_told_with_where_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_ELASTIC_TRAIN_REPORTNG", "0")
    Path("prefect.toml").write_text("[elastic_train]\nreporting = false\n")
    Path("profiles.toml").write_text('active="x"\n[profiles.x]\nPREFECT_ELASTIC_TRAIN_DEFAULT_CLUSTER="prod"\n')
    found = list(check_settings())
    assert "reporting = false, from the table [elastic_train] of prefect.toml" in _told(found, Level.OK)
    assert "by default poll_interval_seconds = 0, liveness_timeout_seconds = 300" in _told(found, Level.OK)
    warnings = _told(found, Level.WARN)
    assert "default_cluster = prod, from the active Prefect profile" in warnings
    assert "`prefect config set` removes them" in warnings
    assert "PREFECT_ELASTIC_TRAIN_REPORTNG, from the environment, is no setting" in warnings


def test_nothing_is_left_in_a_storage_that_was_tried_nor_of_its_folder(tmp_path: Path) -> None:
    found = list(check_storage(LocalStorageSettings(path=str(tmp_path / "new" / "runs")), 30))
    assert set(_levels(found)) == {Level.OK}
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs" / "mnist").mkdir(parents=True)
    list(check_storage(LocalStorageSettings(path=str(tmp_path / "runs")), 30))
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mnist"]


def test_a_storage_with_little_room_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_LITTLE_ROOM", 2**80)
    found = list(check_storage(LocalStorageSettings(path=str(tmp_path)), 30))
    assert _levels(found) == [Level.OK, Level.WARN]
    assert "elastic-train runs prune" in found[1].remedy


def test_an_endpoint_that_is_down_is_told_with_what_was_asked_and_in_time() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    keys = {"access_key_id": "AKIA" + "X" * 16, "secret_access_key": SecretStr("not-told")}
    settings = S3StorageSettings(bucket_path="bucket/runs", endpoint_url=url, region="eu-central-1", **keys)
    [found] = Check("storage", lambda: check_storage(settings, 6), 6, "").findings()
    assert found.level is Level.FAIL
    for part in ("s3://bucket/runs", "cannot create", url, "Is it up and reachable from this machine?"):
        assert part in found.message


def test_a_private_folder_without_processes_is_left_over(tmp_path: Path) -> None:
    names = ["elt-dead", "elt-marked", "elt-guarded", "elt-young", "other"]
    dead, marked, guarded, young, _ = folders = [tmp_path / name for name in names]
    for folder in folders:
        folder.mkdir()
        if folder is not young:
            os.utime(folder, (0, 0))
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    processes = [
        subprocess.Popen(sleep, env={**os.environ, MARK_VARIABLE: str(marked)}),
        subprocess.Popen([*sleep, f"--folder={guarded}"]),
    ]
    try:
        [found] = check_leftovers([str(tmp_path)])
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
    assert found.level is Level.WARN
    assert f"nobody uses {dead}:" in found.message
    assert found.remedy == f"`rm -r {dead}`"
    dead.rmdir()
    [found] = check_leftovers([str(tmp_path / "nowhere")])
    assert found.level is Level.OK


@pytest.mark.parametrize(
    ("answers", "level", "parts"),
    [
        ({}, Level.FAIL, ["is no Prefect API (HTTP 404)", "ends with /api"]),
        ({"/admin/version": {"no": "version"}}, Level.FAIL, ["is no Prefect API", "ends with /api"]),
        ({"/admin/version": "2.20.0"}, Level.FAIL, ["runs Prefect 2.20.0", "install Prefect 3 on the server"]),
        ({"/admin/version": 503}, Level.FAIL, ["HTTP 503: it is busy, or broken", "the server's log"]),
        ({"/admin/version": 429}, Level.FAIL, ["HTTP 429: it is busy, or broken", "the server's log"]),
        ({"/admin/version": "3.0.0"}, Level.WARN, ["runs Prefect 3.0.0, here is", "it is older", version("prefect")]),
        ({"/admin/version": "3.99.0"}, Level.OK, ["runs Prefect 3.99.0", version("prefect")]),
    ],
)
def test_a_server_of_another_kind_or_version_is_told(answers: dict[str, Any], level: Level, parts: list[str]) -> None:
    with _answering(answers) as url, temporary_settings({PREFECT_API_URL: url}):
        [found] = check_server()
    assert found.level is level
    for part in [url, *parts]:
        assert part in f"{found.message} {found.remedy}"


def test_a_server_that_is_busy_for_a_moment_is_asked_again() -> None:
    answers: dict[str, Any] = {"/admin/version": 503}
    with _answering(answers) as url, temporary_settings({PREFECT_API_URL: url}):
        timer = threading.Timer(0.5, answers.update, [{"/admin/version": version("prefect")}])
        timer.start()
        [found] = check_server()
        timer.join()
    assert found.level is Level.OK


def test_a_flow_without_any_server_is_told_which_setting_to_change() -> None:
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        [found] = check_server()
    assert found.level is Level.FAIL
    assert "PREFECT_API_URL is not set" in found.message
    assert "prefect server start" in found.remedy


def test_a_cluster_with_another_ray_is_told_with_both_versions() -> None:
    answers = {"/api/version": {"ray_version": "2.40.0", "session_name": "s"}, "/api/jobs/": []}
    with _answering(answers) as url:
        [found] = Check("cluster", lambda: check_cluster(ClusterSettings(address=url), 10), 10, "").findings()
    assert found.level is Level.FAIL
    for part in (url, "runs Ray 2.40.0", f"the flow Ray {version('ray')}", "use the same minor version"):
        assert part in found.message


def test_what_needs_the_server_is_skipped_without_it_and_the_rest_is_looked_at(tmp_path: Path) -> None:
    arguments = ["--cluster", "prod", "--storage", str(tmp_path / "runs")]
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        result = CliRunner().invoke(app, ["doctor", *arguments, "--json"])
        shown = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == shown.exit_code == 1, result.output
    told = json.loads(result.stdout)
    assert told["ok"] is False
    levels = {finding["check"]: finding["level"] for finding in told["findings"]}
    assert list(levels) == ["versions", "settings", "server", "blocks", "storage", "cluster", "leftovers"]
    assert levels["server"] == "fail"
    assert levels["versions"] == levels["storage"] == "ok"
    assert levels["blocks"] == levels["cluster"] == "skip"
    assert "fail server    PREFECT_API_URL is not set" in shown.stdout
    assert "to do: set PREFECT_API_URL" in shown.stdout
    assert "trainings cannot run like this: " in shown.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "wrong", [["--timeout", "600"], ["--timeout", "14"], ["--timeout", "soon"], ["--no-such-option"]]
)
def test_wrong_usage_has_an_exit_code_of_its_own(wrong: list[str]) -> None:
    assert CliRunner().invoke(app, ["doctor", *wrong]).exit_code == 2
