"""What of jobs mode needs no cluster: a log that breaks off, a dashboard's answers, the first code of a job."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_elastic_train import __version__
from prefect_elastic_train.core.events import EVENT_TAG, AttemptEnded, ControllerAlive, decode_event, encode_event
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.settings import ClusterSettings, FailureSettings, ScalingSettings
from prefect_elastic_train.core.spec import read_spec
from prefect_elastic_train.driver import job_entry as entry
from prefect_elastic_train.supervisor.jobs import log
from prefect_elastic_train.supervisor.jobs.api import Job, JobsApi, UnreachableError, token_of
from prefect_elastic_train.supervisor.jobs.log import JobLog
from prefect_elastic_train.supervisor.jobs.package import ENTRYPOINT, make_runtime_env
from tests.unit.test_following import SPEC

JOB = Job("elastic-train-mnist-1", "RUNNING", "", "", {}, 0.0, "node", "01")


class Log:
    """A log as the dashboard gives it: from so many lines before its end, and not always to its end."""

    def __init__(self) -> None:
        self.written = b""
        self.breaks: list[int] = []
        self.reads = 0

    @contextmanager
    def log(self, job: Job, lines: int, *, follow: bool) -> Iterator[Iterator[bytes]]:
        self.reads += 1
        text = self.written
        if lines >= 0:
            kept = text.splitlines(keepends=True)[-lines:] if lines else []
            text = b"".join(kept)
        limit = self.breaks.pop(0) if self.breaks else None

        def pieces() -> Iterator[bytes]:
            sent = text if limit is None else text[:limit]
            for begin in range(0, len(sent), 7):
                yield sent[begin : begin + 7]
            if follow or limit is not None:
                raise UnreachableError("it broke off")

        yield pieces()


def _event(number: int) -> bytes:
    return f"{EVENT_TAG}{encode_event(ControllerAlive(sequence=number, at=1.0, doing='RUNNING', seconds=0))}\n".encode()


def _current(api: Log, taken: list[bytes]) -> JobLog:
    followed = JobLog(api, JOB, taken.append)  # type: ignore[arg-type]
    followed._reader = threading.current_thread()
    return followed


@given(
    kinds=st.lists(st.booleans(), max_size=60),
    steps=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 400)), max_size=12),
    look_back=st.integers(1, 8),
)
def test_every_line_of_a_log_is_taken_once_wherever_the_connection_breaks(
    kinds: list[bool], steps: list[tuple[int, int]], look_back: int
) -> None:
    lines = [_event(number) if is_event else b"the same line\n" for number, is_event in enumerate(kinds, start=1)]
    api, taken = Log(), list[bytes]()
    followed = _current(api, taken)
    written = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "_LOOK_BACK", (look_back, 4 * look_back, -1))
        for more, breaks_after in steps:
            written = min(len(lines), written + more)
            api.written = b"".join(lines[:written])
            api.breaks = [breaks_after]
            followed._catch_up()
            try:
                followed._read(look_back, follow=True)
            except UnreachableError:
                pass
        api.written, api.breaks = b"".join(lines), []
        assert followed._catch_up(to_the_end=True)
    assert [line + b"\n" for line in taken] == lines


def test_the_rest_of_a_line_counts_only_when_nobody_writes_any_more() -> None:
    api, taken = Log(), list[bytes]()
    followed = _current(api, taken)
    api.written = _event(1) + b"half a"
    assert followed._catch_up()
    assert len(taken) == 1
    api.written += b" line, the last"
    assert followed._catch_up(to_the_end=True)
    assert taken[1:] == [b"half a line, the last"]


def test_a_stream_that_begins_behind_the_last_known_line_is_left_for_one_that_begins_before_it() -> None:
    api, taken = Log(), list[bytes]()
    followed = _current(api, taken)
    api.written = _event(1)
    assert followed._catch_up()
    api.written += b"more\n" * 20
    assert not followed._read(3, follow=True), "a stream that never ends would be waited in for ever"
    assert followed._catch_up()
    assert len(taken) == 21


def test_a_reader_that_is_left_behind_takes_nothing_any_more() -> None:
    api, taken = Log(), list[bytes]()
    followed = _current(api, taken)
    api.written = _event(1)
    assert followed._catch_up()
    followed.stop()
    api.written += _event(2)
    followed._catch_up()
    assert len(taken) == 1


@pytest.fixture
def dashboard() -> Iterator[tuple[str, dict[str, tuple[int, str]]]]:
    """A server whose answers are set by path."""
    answers: dict[str, tuple[int, str]] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            status, body = answers.get(f"{path} of {token}") or answers.get(path, (404, "<html>not here</html>"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", answers
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("answer", "expected", "says"),
    [
        ((200, '{"ray_version": "2.60.0", "session_name": "s"}'), None, ""),
        ((404, "<html>"), AttemptFailedError, "is no Ray dashboard"),
        ((200, "<html>a login page</html>"), AttemptFailedError, "is no Ray dashboard"),
        ((401, "who are you"), AttemptFailedError, "refused the token (HTTP 401: who are you)"),
        ((403, ""), AttemptFailedError, "refused the token (HTTP 403)"),
        ((502, "bad gateway"), UnreachableError, "HTTP 502: bad gateway"),
        ((503, "<html>maintenance"), UnreachableError, "HTTP 503"),
    ],
)
def test_what_a_dashboard_answers_is_told_apart(
    dashboard: tuple[str, dict[str, tuple[int, str]]],
    answer: tuple[int, str],
    expected: type[Exception] | None,
    says: str,
) -> None:
    url, answers = dashboard
    answers["/api/version"] = answer
    api = JobsApi(ClusterSettings(address=url))
    if expected is None:
        assert (api.version().ray, api.version().session) == ("2.60.0", "s")
        return
    with pytest.raises(expected) as raised:
        api.version()
    assert says in str(raised.value)
    if isinstance(raised.value, AttemptFailedError):
        assert raised.value.outcome is Outcome.INVALID


def test_a_job_is_gone_only_where_ray_itself_says_so(dashboard: tuple[str, dict[str, tuple[int, str]]]) -> None:
    url, answers = dashboard
    api = JobsApi(ClusterSettings(address=url))
    with pytest.raises(UnreachableError):
        api.job("a-1")  # some gateway's 404
    for page in ("<html>the page you look for does not exist</html>", "Job a-12 does not exist"):
        answers["/api/jobs/a-1"] = (404, page)
        with pytest.raises(UnreachableError):
            api.job("a-1")
    for body in ("<html>log in</html>", "[]", '{"submission_id": "another"}'):
        answers["/api/jobs/a-1"] = (200, body)
        with pytest.raises(UnreachableError):
            api.job("a-1")
    answers["/api/jobs/"] = (200, "<html>log in</html>")
    with pytest.raises(UnreachableError):
        api.jobs()
    answers["/api/jobs/a-1"] = (404, "Job a-1 does not exist")
    assert api.job("a-1") is None
    answers["/api/jobs/a-1"] = (200, '{"submission_id": "a-1", "status": "RUNNING", "type": "SUBMISSION"}')
    found = api.job("a-1")
    assert found is not None
    assert (found.status, found.is_terminal, found.driver_node_id) == ("RUNNING", False, "")


def test_nobody_answers() -> None:
    with pytest.raises(UnreachableError):
        JobsApi(ClusterSettings(address="http://127.0.0.1:1")).version()


def test_the_token_is_the_block_s_or_what_ray_would_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    url = "http://head:8265"
    assert token_of(ClusterSettings(address=url)) == ""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("of-the-home\n")
    assert token_of(ClusterSettings(address=url)) == "of-the-home"
    (tmp_path / "token").write_text("of-the-file")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert token_of(ClusterSettings(address=url)) == "of-the-file"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-the-environment")
    assert token_of(ClusterSettings(address=url)) == "of-the-environment"
    assert token_of(ClusterSettings(address=url, auth_token="of-the-block")) == "of-the-block"


@pytest.mark.parametrize("token", ["hush hush", "hush\nhush", "h\u00fcsh", "hush\x00"])
def test_a_token_that_cannot_be_sent_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(AttemptFailedError) as refused:
        JobsApi(ClusterSettings(address="http://head:8265", auth_token=token))
    assert refused.value.outcome is Outcome.INVALID
    assert "hush" not in str(refused.value)
    assert token not in str(refused.value)


def test_a_token_that_changes_in_its_file_is_read_again(
    dashboard: tuple[str, dict[str, tuple[int, str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, answers = dashboard
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    (tmp_path / "token").write_text("old")
    answers["/api/jobs/ of new"] = (200, "[]")
    answers["/api/jobs/ of old"] = (403, "expired")
    api = JobsApi(ClusterSettings(address=url))
    with pytest.raises(AttemptFailedError):
        api.jobs()
    (tmp_path / "token").write_text("new")
    assert api.jobs() == []


@pytest.mark.parametrize("pattern", ["*.json", "spec", "main.py", "driver", "driver/*"])
def test_excludes_that_would_strip_the_driver_are_refused(tmp_path: Path, pattern: str) -> None:
    def environment(excludes: list[str]) -> dict[str, Any]:
        cluster = ClusterSettings(address="http://head:8265", runtime_env={"excludes": excludes})
        return make_runtime_env(replace(SPEC, cluster=cluster), tmp_path)

    with pytest.raises(AttemptFailedError, match=r"would leave .* of the driver out") as refused:
        environment(["/data/*.bin", pattern])
    assert refused.value.outcome is Outcome.INVALID
    assert environment(["/data/*.bin", "*.ckpt", "notebooks"])["excludes"] == ["/data/*.bin", "*.ckpt", "notebooks"]


def test_a_package_holds_what_the_driver_needs_and_not_the_token(tmp_path: Path) -> None:
    cluster = ClusterSettings(
        address="http://head:8265",
        auth_token="hush",
        runtime_env={"env_vars": {"A": "1"}, "py_modules": ["s3://a.zip"]},
    )
    spec = replace(SPEC, cluster=cluster, scaling=ScalingSettings(), failures=FailureSettings())
    environment = make_runtime_env(spec, tmp_path)
    uploaded, package, job = environment["py_modules"]
    assert uploaded == "s3://a.zip"
    assert (Path(package) / "driver" / "main.py").is_file()
    assert not list(Path(package).rglob("__pycache__"))
    assert environment["env_vars"]["A"] == "1"
    assert read_spec(Path(job) / "spec").request.run_name == spec.request.run_name
    assert (Path(job) / "spec").stat().st_mode & 0o077 == 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"hush" in path.read_bytes()]


def test_the_driver_of_a_job_needs_nothing_but_what_the_cluster_is_asked_for() -> None:
    absent = ("prefect", "fastapi", "httpx", "pydantic_settings", "rich", "s3fs", "sqlalchemy", "typer")
    package = Path(entry.__file__).parents[2]
    parts = ("driver", "elastic", "filesystems", "runs", "reporting")
    modules = [
        ".".join(path.relative_to(package.parent).with_suffix("").parts)
        for part in parts
        for path in sorted((package / part).glob("[a-z]*.py"))
        if path.stem not in ("launch", "guard", "s3")  # of the flow's machine; S3 is asked for where it is used
    ]
    code = (
        f"import importlib, sys\nfor name in {absent!r}: sys.modules[name] = None\n"
        f"for name in {[*modules, 'prefect_elastic_train.core.result']!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def _run_entry(folder: Path, **changes: Any) -> subprocess.CompletedProcess[str]:
    job = folder / "elastic_train_job"
    job.mkdir()
    (job / "__init__.py").touch()
    shutil.copyfile(entry.__file__, job / "__main__.py")
    wanted = {
        "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "ray": "2.60.0",
        "package": __version__,
        "modules": ["psutil"],
        **changes,
    }
    (job / "wanted.json").write_text(json.dumps(wanted))
    return subprocess.run(
        [sys.executable, "-m", "elastic_train_job"], cwd=folder, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"python": "3.99"}, "the flow Python 3.99"),
        (
            {"modules": ["psutil", "no_such_module", "no.such.module"]},
            "lacks what the driver needs: no_such_module, no.",
        ),
        ({"ray": "3.1.0"}, "the flow Ray 3.1.0"),
        ({"package": "99.0"}, "the flow uses 99.0"),
    ],
)
def test_the_first_code_of_a_job_says_what_is_wrong_with_the_cluster(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    done = _run_entry(tmp_path, **changes)
    assert done.returncode == 1, "Ray shall not call it a success"
    [line] = done.stdout.splitlines()
    ended = decode_event(line.removeprefix(EVENT_TAG))
    assert isinstance(ended, AttemptEnded)
    assert (ended.outcome, ended.final) == (Outcome.INVALID, True)
    assert says in ended.message


def test_a_node_without_a_python_that_has_ray_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", ENTRYPOINT], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 1
    ended = decode_event(done.stdout.strip().removeprefix(EVENT_TAG))
    assert isinstance(ended, AttemptEnded)
    assert "no Python with Ray" in ended.message
