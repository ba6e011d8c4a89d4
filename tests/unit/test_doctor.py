"""What `elastic-train doctor` makes of what it sees, as far as that needs no Ray and no Prefect server."""

import json
import platform
import threading
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner

from prefect_elastic_train.cli import app
from prefect_elastic_train.doctor import examination
from tests.unit import support
from tests.unit.test_jobs import Dashboard


@pytest.mark.parametrize("hangs", [True, False])
def test_what_goes_wrong_in_a_check_is_a_finding_beside_what_it_has_found_without_a_password(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr(examination, "_SECONDS", 0.1 if hangs else 5)

    def check() -> Iterator[examination.Finding]:
        yield examination.fail("http://me:secret@host/api\nis away", "ask them")
        release.wait(30 if hangs else 0)
        raise KeyError("gone")

    first, second = examination.run_check("mine", check)
    release.set()
    assert first == examination.Finding("fail", "http://***@host/api is away", "ask them", "mine")
    assert (second.level, second.message) == ("fail", "no answer within 0.1 s" if hangs else "KeyError: 'gone'")


@pytest.mark.parametrize(
    ("check", "answers", "level", "message"),
    [
        ("server", {}, "fail", "404 … which ends with /api"),
        (
            "server",
            {"GET /admin/version": (200, '{"no": "version"}')},
            "fail",
            "no compatible Prefect server … ends with /api",
        ),
        ("server", {"GET /admin/version": (200, '"2.20.0"')}, "fail", "client: 3. … server: 2.20.0"),
        ("server", {"": (401, "")}, "fail", "401 … PREFECT_SERVER_API_AUTH_STRING"),
        ("block_types", {}, "warn", "elastic-scaling … prefect block register"),
        (
            "cluster",
            {
                "GET /api/version": (200, '{"ray_version": "2.40.0", "session_name": "s"}'),
                "GET /api/jobs/": (200, "[]"),
            },
            "fail",
            f"runs Ray 2.40.0 … the flow Ray {version('ray')} … use the same minor version",
        ),
    ],
)
def test_a_server_a_cluster_or_block_types_that_cannot_be_used_are_found(
    check: str, answers: dict[str, Any], level: str, message: str
) -> None:
    dashboard = Dashboard()
    url = dashboard.cluster.address
    dashboard.answers = {"": (404, "")} | answers
    arguments = [support.spec(cluster=dashboard.cluster)] if check == "cluster" else []
    with temporary_settings({PREFECT_API_URL: url}):
        found, *_ = examination.run_check(check, partial(getattr(examination, f"check_{check}"), *arguments))
    dashboard.shutdown()
    text = f"{found.message} {found.remedy}"
    assert (found.level, [part for part in message.split(" … ") if part not in text]) == (level, [])
    assert url in text or level == "warn"


def test_without_a_server_the_versions_are_shown_and_nothing_else_is_checked(tmp_path: Path) -> None:
    command = f"doctor --cluster prod --storage {tmp_path}/runs"
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        result = CliRunner().invoke(app, f"{command} --json")
        shown = CliRunner().invoke(app, command)
    told = json.loads(result.stdout)
    assert (result.exit_code, shown.exit_code, told["ok"]) == (1, 1, False), result.output
    assert [(finding["check"], finding["level"]) for finding in told["findings"]] == [
        ("versions", "ok"),
        ("server", "fail"),
    ]
    for part in (
        f"ok   versions  Python {platform.python_version()}",
        f"ray {version('ray')}",
        f"prefect {version('prefect')}",
        "fail server    ValueError: No Prefect API URL provided. Please set PREFECT_API_URL",
        "trainings cannot run like this (",
    ):
        assert part in shown.stdout
    assert list(tmp_path.iterdir()) == []
    assert CliRunner().invoke(app, "doctor --timeout 600").exit_code == 2, "wrong usage"
