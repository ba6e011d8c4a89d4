"""What `elastic-train doctor` makes of what it sees, as far as that needs no Ray and no Prefect server."""

from __future__ import annotations

import json
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner

from prefect_elastic_train.cli import app
from prefect_elastic_train.core.settings import ClusterSettings
from prefect_elastic_train.doctor import examination
from tests.unit import support


@contextmanager
def _answering(answers: dict[str, Any]) -> Iterator[str]:
    """Run a server that answers some paths with JSON or an HTTP status, all others with 404."""

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
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("hangs", [True, False])
def test_what_goes_wrong_in_a_check_is_a_finding_beside_what_it_has_found_without_a_password(hangs: bool) -> None:
    release = threading.Event()

    def check() -> Iterator[examination.Finding]:
        yield examination.fail("http://me:secret@host/api\nis away", "ask s3://k:s@bucket")
        release.wait(30 if hangs else 0)
        raise KeyError("gone")

    first, second = examination.run_check("mine", check, 0.1 if hangs else 5)
    release.set()
    assert first == examination.Finding("fail", "http://***@host/api is away", "ask s3://***@bucket", "mine")
    assert (second.level, second.message) == ("fail", "no answer within 0.1 s" if hangs else "KeyError: 'gone'")


def test_doctor_shows_the_versions_of_python_ray_and_prefect() -> None:
    [found] = examination.check_versions()
    assert found.level == "ok"
    for part in (platform.python_version(), f"ray {version('ray')}", f"prefect {version('prefect')}"):
        assert part in found.message


@pytest.mark.parametrize(
    ("answers", "parts"),
    [
        ({}, ["404", "which ends with /api"]),
        ({"/admin/version": {"no": "version"}}, ["no compatible Prefect server", "ends with /api"]),
        ({"/admin/version": "2.20.0"}, ["client: 3.", "server: 2.20.0"]),
        ({"/admin/version": 401}, ["401", "PREFECT_SERVER_API_AUTH_STRING"]),
    ],
)
def test_a_server_that_cannot_be_used_is_told(answers: dict[str, Any], parts: list[str]) -> None:
    with _answering(answers) as url, temporary_settings({PREFECT_API_URL: url}):
        [found] = examination.check_server()
    assert found.level == "fail"
    for part in [url, *parts]:
        assert part in f"{found.message} {found.remedy}"


def test_block_types_that_nobody_has_registered_are_a_warning_with_the_command_that_does() -> None:
    with _answering({}) as url, temporary_settings({PREFECT_API_URL: url}):
        warned, loaded = examination.check_block_types()
    assert (warned.level, loaded.message) == ("warn", "0 saved blocks load")
    assert "elastic-scaling" in warned.message
    assert "prefect block register" in warned.remedy


def test_a_cluster_with_another_ray_is_told_with_both_versions() -> None:
    answers = {"/api/version": {"ray_version": "2.40.0", "session_name": "s"}, "/api/jobs/": []}
    with _answering(answers) as url:
        spec = support.spec(cluster=ClusterSettings(address=url))
        [found] = examination.run_check("cluster", lambda: examination.check_cluster(spec), 10)
    assert found.level == "fail"
    for part in (url, "runs Ray 2.40.0", f"the flow Ray {version('ray')}", "use the same minor version"):
        assert part in found.message


def test_without_a_server_the_rest_is_skipped_with_which_setting_to_change(tmp_path: Path) -> None:
    arguments = ["--cluster", "prod", "--storage", str(tmp_path / "runs")]
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        result = CliRunner().invoke(app, ["doctor", *arguments, "--json"])
        shown = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == shown.exit_code == 1, result.output
    told = json.loads(result.stdout)
    assert told["ok"] is False
    levels = {finding["check"]: finding["level"] for finding in told["findings"]}
    assert list(levels.items()) == [
        ("versions", "ok"),
        ("server", "fail"),
        *((check, "skip") for check in ("blocks", "storage", "cluster")),
    ]
    assert "fail server    ValueError: No Prefect API URL provided. Please set PREFECT_API_URL" in shown.stdout
    assert "trainings cannot run like this (" in shown.stdout
    assert list(tmp_path.iterdir()) == []
    assert CliRunner().invoke(app, ["doctor", "--timeout", "600"]).exit_code == 2, "wrong usage"
