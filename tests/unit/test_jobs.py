"""What of jobs mode needs no cluster: a log that breaks off, a dashboard's answers, the first code of a job."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs
from zipfile import ZipFile

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr
from ray.job_submission import JobDetails

from prefect_elastic_train import __version__
from prefect_elastic_train.core.events import (
    EVENT_TAG,
    AttemptEnded,
    AttemptStarted,
    ControllerAlive,
    Event,
    StateChanged,
    decode_event,
    encode_event,
)
from prefect_elastic_train.core.operator_settings import ElasticTrainSettings
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.settings import ClusterSettings
from prefect_elastic_train.core.spec import read_spec
from prefect_elastic_train.driver import job_entry as entry
from prefect_elastic_train.supervisor import attempt, job_client, job_driver, job_log
from prefect_elastic_train.supervisor.attempt import Follower
from prefect_elastic_train.supervisor.job import JobLauncher
from prefect_elastic_train.supervisor.job_client import JobClient, RefusedError, UnreachableError
from prefect_elastic_train.supervisor.job_log import JobLog
from prefect_elastic_train.supervisor.job_package import ENTRYPOINT, job_modules, make_runtime_env
from tests.unit.test_following import SPEC

JOB = JobDetails(type="SUBMISSION", submission_id="elastic-train-mnist-1", status="RUNNING", entrypoint="true")


class Log:
    """A client that gives a log as the dashboard does: from so many lines before its end, and not always to its end."""

    def __init__(self) -> None:
        self.written = b""
        self.breaks: list[int] = []

    def log(self, job: JobDetails, lines: int) -> Iterator[bytes]:
        text = self.written
        if lines >= 0:
            text = b"".join(text.splitlines(keepends=True)[-lines:])
        limit = self.breaks.pop(0) if self.breaks else len(text)
        for begin in range(0, limit, 7):
            yield text[:limit][begin : begin + 7]
        if limit < len(text):
            raise UnreachableError("it broke off")


def _event(number: int) -> bytes:
    return (
        f"{EVENT_TAG}{encode_event(ControllerAlive(sequence=number, at=number, doing='RUNNING', seconds=0))}\n".encode()
    )


@given(
    kinds=st.lists(st.booleans(), max_size=60),
    steps=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 400)), max_size=12),
    look_back=st.integers(1, 8),
)
def test_every_line_of_a_log_is_read_once_wherever_the_connection_breaks(
    kinds: list[bool], steps: list[tuple[int, int]], look_back: int
) -> None:
    lines = [_event(number) if is_event else b"the same line\n" for number, is_event in enumerate(kinds, start=1)]
    client, taken = Log(), list[bytes]()
    log = JobLog(client)  # type: ignore[arg-type]
    written = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_log, "_LEAST_LINES", look_back)
        for more, breaks_after in steps:
            written = min(len(lines), written + more)
            client.written = b"".join(lines[:written])
            client.breaks = [breaks_after]
            with suppress(UnreachableError):
                for line in log.read(JOB):
                    taken.append(line)
        client.written, client.breaks = b"".join(lines), []
        taken += log.read(JOB, to_the_end=True)
    assert [line + b"\n" for line in taken] == lines


def test_the_rest_of_a_line_counts_only_when_nobody_writes_any_more() -> None:
    client = Log()
    log = JobLog(client)  # type: ignore[arg-type]
    client.written = _event(1) + b"half a"
    assert len([*log.read(JOB)]) == 1
    client.written += b" line, the last"
    assert [*log.read(JOB, to_the_end=True)] == [b"half a line, the last"]


def test_a_log_that_was_begun_anew_is_not_taken_for_the_one_that_was_read() -> None:
    client = Log()
    log = JobLog(client)  # type: ignore[arg-type]
    client.written = _event(1)
    assert len([*log.read(JOB)]) == 1
    client.written = _event(2)
    with pytest.raises(UnreachableError):
        [*log.read(JOB)]


class Dashboard:
    """A dashboard and the jobs behind it, as far as they are said here.

    Attributes:
        answers: What is answered to a request, by method and path, in place of what would be; a number of seconds is
            a wait, None a connection that is closed without an answer.
        jobs: What the cluster knows, by submission id.
        asked: The requests so far.
        log: Of all drivers.
    """

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, str] | float | None] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.asked: list[str] = []
        self.uploads: list[bytes] = []
        self.tokens: list[str] = []
        self.log = b""
        self.session = "session_1"
        self.refuses_connections = False
        self.stops_pending = True
        self.on_submit: Callable[[str], None] = lambda submission_id: None
        dashboard = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path, _, query = self.path.partition("?")
                request = f"{self.command} {path}"
                dashboard.asked.append(request)
                dashboard.tokens.append(self.headers.get("Authorization", "").removeprefix("Bearer "))
                found = dashboard.answers.get(request, 0.0)
                if found is None or dashboard.refuses_connections:
                    self.close_connection = True
                    return
                if isinstance(found, float):
                    time.sleep(found)
                status, text = found if isinstance(found, tuple) else dashboard._do(self.command, path, query, body)
                content = text.encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_DELETE = _answer

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.cluster = ClusterSettings(address=self.url, connect_timeout_seconds=2, unreachable_timeout_seconds=10)

    def _do(self, method: str, path: str, query: str, body: bytes) -> tuple[int, str]:
        if path == "/api/version":
            return 200, json.dumps({"ray_version": ray.__version__, "session_name": self.session})
        if path.startswith("/api/packages/"):
            self.uploads += [body] if method == "PUT" else []
            return (404, "") if method == "GET" else (200, "{}")
        if path.startswith("/api/v0/logs/"):
            lines = int(parse_qs(query)["lines"][0])
            return 200, b"".join(self.log.splitlines(True)[-lines if lines > 0 else 0 :]).decode()
        if path == "/api/jobs/" and method == "GET":
            return 200, json.dumps([*self.jobs.values()])
        if path == "/api/jobs/":
            return self._submit(json.loads(body))
        _, _, _, submission_id, *what = path.split("/")
        if submission_id not in self.jobs:
            return 404, f"Job {submission_id} does not exist"
        if what == ["stop"]:
            if self.stops_pending or self.jobs[submission_id]["status"] != "PENDING":
                self.jobs[submission_id]["status"] = "STOPPED"
            return 200, '{"stopped": true}'
        return 200, json.dumps(self.jobs[submission_id])

    def _submit(self, request: dict[str, Any]) -> tuple[int, str]:
        submission_id = request["submission_id"]
        if submission_id in self.jobs:
            return 500, f"RuntimeError: Job with submission_id {submission_id} already exists"
        self.add(submission_id, request["metadata"], entrypoint=request["entrypoint"])
        self.on_submit(submission_id)
        return 200, json.dumps({"job_id": submission_id, "submission_id": submission_id})

    def add(self, submission_id: str, metadata: dict[str, str], **more: Any) -> None:
        """Have a job that runs."""
        known = {"type": "SUBMISSION", "entrypoint": "true", "status": "RUNNING", "driver_node_id": "node"}
        self.jobs[submission_id] = {**known, "submission_id": submission_id, "metadata": metadata, **more}

    def say(self, *events: Event) -> None:
        """Have the driver tell something."""
        self.log += b"".join(f"{EVENT_TAG}{encode_event(event)}\n".encode() for event in events)

    def end(self, status: str = "SUCCEEDED") -> None:
        """Have all jobs ended."""
        for job in self.jobs.values():
            job["status"] = status

    def close(self) -> None:
        """Answer nobody any more."""
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def dashboard() -> Iterator[Dashboard]:
    """A dashboard without jobs."""
    dashboard = Dashboard()
    yield dashboard
    dashboard.close()


@pytest.mark.parametrize(
    ("answer", "expected", "says"),
    [
        ((404, "<html>"), UnreachableError, "is no Ray dashboard"),
        ((200, "<html>a login page</html>"), UnreachableError, "is no Ray dashboard"),
        ((401, "who are you"), RefusedError, "refused the token (HTTP 401: who are you)"),
        ((403, ""), RefusedError, "refused the token (HTTP 403)"),
        ((502, "bad gateway"), UnreachableError, "HTTP 502: bad gateway"),
        (None, UnreachableError, "RemoteDisconnected"),
    ],
)
def test_what_a_dashboard_answers_is_told_apart(
    dashboard: Dashboard, answer: tuple[int, str] | None, expected: type[Exception], says: str
) -> None:
    client = JobClient(dashboard.cluster)
    assert client.session() == "session_1"
    dashboard.answers["GET /api/version"] = answer
    with pytest.raises(expected) as raised:
        client.session()
    assert says in str(raised.value)


def test_a_job_is_gone_only_where_ray_itself_says_so(dashboard: Dashboard) -> None:
    client = JobClient(dashboard.cluster)
    assert client.job("a-1") is None
    dashboard.add("a-1", {})
    found = client.job("a-1")
    assert found is not None
    assert not found.status.is_terminal()
    pages = [
        (404, "<html>not here</html>"),
        (200, "<html>log in</html>"),
        (200, "[]"),
    ]
    for page in pages:
        dashboard.answers |= {"GET /api/jobs/a-1": page, "GET /api/jobs/": (200, "<html>log in</html>")}
        with pytest.raises(UnreachableError):
            client.job("a-1")
        with pytest.raises(UnreachableError):
            client.jobs()


def test_requests_go_to_the_block_s_address_with_its_token_whatever_the_environment_says(
    dashboard: Dashboard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password hush")
    (tmp_path / ".ray").mkdir()
    expected = ["", "of-the-home", "of-the-file", "of-the-environment", "of-the-block"]
    JobClient(dashboard.cluster).jobs()
    (tmp_path / ".ray" / "auth_token").write_text("of-the-home\n")
    JobClient(dashboard.cluster).jobs()
    (tmp_path / "token").write_text("of-the-file")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    JobClient(dashboard.cluster).jobs()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-the-environment")
    JobClient(dashboard.cluster).jobs()
    JobClient(dashboard.cluster.model_copy(update={"auth_token": SecretStr("of-the-block")})).jobs()
    assert dashboard.tokens == expected


@pytest.mark.parametrize("token", ["hush hush", "hush\nhush", "h\u00fcsh", "hush\x00"])
def test_a_token_that_cannot_be_sent_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(RefusedError) as refused:
        JobClient(ClusterSettings(address="http://head:8265", auth_token=token))
    assert refused.value.outcome is Outcome.INVALID
    assert "hush" not in str(refused.value)
    assert token not in str(refused.value)


def test_an_error_does_not_hold_the_request_that_holds_the_token(dashboard: Dashboard) -> None:
    dashboard.answers["GET /api/jobs/"] = None
    with pytest.raises(UnreachableError) as raised:
        JobClient(dashboard.cluster.model_copy(update={"auth_token": SecretStr("hush")})).jobs()
    assert dashboard.tokens == ["hush"]
    assert raised.value.__cause__ is raised.value.__context__ is None


def test_a_token_that_changes_in_its_file_is_read_again(
    dashboard: Dashboard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    (tmp_path / "token").write_text("old")
    client = JobClient(dashboard.cluster)
    dashboard.answers["GET /api/jobs/"] = (403, "expired")
    (tmp_path / "token").write_text("new")
    with pytest.raises(RefusedError):
        client.jobs()
    assert dashboard.tokens == ["old", "new"]


class Flow(Follower):
    """A flow process that follows jobs, and what it was told."""

    def __init__(self, folder: Path) -> None:
        self.events: list[Event] = []
        self.past: list[Event] = []
        self.lines: list[str] = []
        self.notes: list[str] = []
        super().__init__(
            ElasticTrainSettings(),
            self.events.append,
            lambda source, text: self.lines.append(text),
            on_note=self.notes.append,
        )
        self.on_past_event = self.past.append
        self._folder = folder

    def train(self, dashboard: Dashboard) -> AttemptEnded:
        """Run an attempt as a job."""
        return JobLauncher(self, self._folder).run_attempt(replace(SPEC, cluster=dashboard.cluster))


@pytest.fixture
def flow(tmp_path: Path) -> Flow:
    """A flow process."""
    return Flow(tmp_path)


STARTED = AttemptStarted(sequence=1, at=1.0, attempt=1, run_name="mnist", run_uri="/runs/mnist")
STATE = StateChanged(sequence=2, at=2.0, state="RUNNING")
ENDED = AttemptEnded(sequence=3, at=3.0, attempt=1, outcome=Outcome.COMPLETED, result={})


def _trains_well(dashboard: Dashboard) -> None:
    def run(submission_id: str) -> None:
        dashboard.say(STARTED, STATE, ENDED)
        dashboard.end()

    dashboard.on_submit = run


def test_a_job_is_submitted_followed_and_told_event_by_event(dashboard: Dashboard, flow: Flow) -> None:
    dashboard.log = b"a line of before\n"
    _trains_well(dashboard)
    excluding = {"excludes": ["*.py", "spec"], "working_dir": str(Path(__file__).parent)}
    dashboard.cluster = dashboard.cluster.model_copy(update={"runtime_env": excluding})
    assert flow.train(dashboard) == ENDED
    assert flow.events == [STARTED, STATE, ENDED]
    assert flow.lines == ["a line of before"]
    [job] = dashboard.jobs.values()
    assert job["metadata"]["flow_run_id"] == SPEC.request.owner.flow_run_id
    names = {name for package in dashboard.uploads for name in ZipFile(BytesIO(package)).namelist()}
    assert {"prefect_elastic_train/driver/main.py", "elastic_train_job/spec"} <= names
    assert Path(__file__).name not in names, "what the user excludes is the user's"


def test_what_is_uploaded_lies_in_the_private_folder_meanwhile_and_nowhere_else(
    dashboard: Dashboard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = tmp_path / "private", tmp_path / "public"
    for folder in (private, public):
        folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(public))
    _trains_well(dashboard)
    answer, seen = dashboard._do, list[tuple[int, int]]()

    def look(method: str, path: str, query: str, body: bytes) -> tuple[int, str]:
        if method == "PUT":
            seen.append((len([*private.glob("*.zip")]), len([*public.rglob("*.zip")])))
        return answer(method, path, query, body)

    monkeypatch.setattr(dashboard, "_do", look)
    assert Flow(private).train(dashboard) == ENDED
    assert set(seen) == {(1, 0)}
    assert not [*private.rglob("*.zip")]


@pytest.mark.parametrize("answer", [(502, "bad gateway"), (500, "who knows"), (200, "<html>log in</html>")])
def test_a_submission_whose_answer_is_lost_is_recognised(
    dashboard: Dashboard, flow: Flow, answer: tuple[int, str]
) -> None:
    _trains_well(dashboard)
    real = dashboard._submit

    def lose(request: dict[str, Any]) -> tuple[int, str]:
        real(request)
        return answer

    dashboard._submit = lose  # type: ignore[method-assign]
    assert flow.train(dashboard) == ENDED
    assert dashboard.asked.count("POST /api/jobs/") == 1
    assert len(dashboard.jobs) == 1


def test_a_submission_that_has_not_arrived_is_repeated_and_one_that_is_refused_is_not(
    dashboard: Dashboard, flow: Flow
) -> None:
    _trains_well(dashboard)
    dashboard.answers["POST /api/jobs/"] = (503, "busy")

    def heal(text: str) -> None:
        dashboard.answers.clear()

    flow.check_stop = lambda: heal("") if dashboard.asked.count("POST /api/jobs/") == 1 else None
    assert flow.train(dashboard) == ENDED
    assert dashboard.asked.count("POST /api/jobs/") == 2
    dashboard.jobs.clear()
    flow.check_stop = lambda: None
    dashboard.answers["POST /api/jobs/"] = (400, "ValueError: no such field")
    with pytest.raises(RefusedError, match=r"Ray does not accept the job: .*no such field"):
        flow.train(dashboard)


def test_a_dashboard_that_is_away_says_nothing_about_the_job(
    dashboard: Dashboard, flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_driver, "BLIND_SECONDS", 0.5)

    def note(text: str) -> None:
        flow.notes.append(text)
        if "has not answered for" in text:
            dashboard.refuses_connections = False
            dashboard.say(ENDED)
            dashboard.end()

    def on_event(event: Event) -> None:
        flow.events.append(event)
        dashboard.refuses_connections = event == STATE

    flow.on_note, flow.on_event = note, on_event
    dashboard.on_submit = lambda submission_id: dashboard.say(STARTED, STATE)
    assert flow.train(dashboard) == ENDED
    assert flow.events == [STARTED, STATE, ENDED]
    assert dashboard.asked.count("POST /api/jobs/") == 1
    assert any("may go on unseen" in note for note in flow.notes)


def _add_own(dashboard: Dashboard, flow: Flow) -> None:
    """Have a job of the same training, as another process of the flow run has submitted it."""
    _trains_well(dashboard)
    flow.train(dashboard)
    dashboard.end("RUNNING")
    dashboard.asked.clear()
    flow.events.clear()
    flow.notes.clear()


def test_a_job_that_runs_is_followed_and_what_was_told_before_is_not_told_again(
    dashboard: Dashboard, flow: Flow
) -> None:
    _add_own(dashboard, flow)
    dashboard.log = b""
    dashboard.say(STARTED)
    dashboard.log += b"told before\n"
    dashboard.say(STATE)
    dashboard.log += b"told now\n"
    dashboard.say(ENDED)
    flow.followed_until = lambda: 1.5
    flow.check_stop = lambda: dashboard.end() if flow.events else None
    assert flow.train(dashboard) == ENDED
    assert (flow.past, flow.events, flow.lines) == ([STARTED], [STATE, ENDED], ["told now"])
    assert "POST /api/jobs/" not in dashboard.asked


def test_a_cluster_with_another_ray_gets_no_job_but_one_that_trains_in_it_is_followed(
    dashboard: Dashboard, flow: Flow
) -> None:
    other = (200, '{"ray_version": "2.1.0", "session_name": "session_1"}')
    dashboard.answers["GET /api/version"] = other
    with pytest.raises(RefusedError, match=r"runs Ray 2\.1\.0 .*; use the same minor version"):
        flow.train(dashboard)
    assert not dashboard.jobs
    dashboard.answers.clear()
    _add_own(dashboard, flow)
    dashboard.answers["GET /api/version"] = other
    flow.check_stop = lambda: dashboard.end() if "GET /api/v0/logs/file" in dashboard.asked else None
    flow.followed_until = lambda: 0.0
    assert flow.train(dashboard) == ENDED


def test_a_job_whose_cluster_was_started_anew_is_lost(dashboard: Dashboard, flow: Flow) -> None:
    _add_own(dashboard, flow)
    dashboard.log = b""

    def restart(text: str) -> None:
        dashboard.jobs.clear()
        dashboard.session = "session_2"

    flow.on_note = restart
    ended = flow.train(dashboard)
    assert ended.outcome is Outcome.CLUSTER_LOST
    assert "was started anew" in ended.message


def test_a_job_that_is_unknown_once_is_not_lost(dashboard: Dashboard, flow: Flow) -> None:
    dashboard.on_submit = lambda submission_id: dashboard.say(STARTED)

    def on_event(event: Event) -> None:
        flow.events.append(event)
        [(submission_id, job)] = dashboard.jobs.items()
        if event == STARTED:
            dashboard.jobs.clear()

            def come_back() -> None:
                if dashboard.asked.count("GET /api/version") == 2:
                    dashboard.jobs[submission_id] = {**job, "status": "SUCCEEDED"}
                    dashboard.say(ENDED)
                    flow.check_stop = lambda: None

            flow.check_stop = come_back

    flow.on_event = on_event
    assert flow.train(dashboard) == ENDED


@pytest.mark.parametrize("can_be_read", [True, False])
def test_a_driver_whose_log_says_nothing_hangs_and_one_whose_log_cannot_be_read_may_not(
    dashboard: Dashboard, flow: Flow, monkeypatch: pytest.MonkeyPatch, can_be_read: bool
) -> None:
    monkeypatch.setattr(job_driver, "_FRESH_SECONDS", 1.5)
    flow.settings = ElasticTrainSettings(liveness_timeout_seconds=3.0)
    dashboard.on_submit = lambda submission_id: dashboard.say(STARTED)
    if not can_be_read:
        dashboard.answers["GET /api/v0/logs/file"] = (500, "the node's agent is away")
    until = time.monotonic() + 6

    def check_stop() -> None:
        if time.monotonic() > until:
            dashboard.answers.clear()
            dashboard.say(ENDED)
            dashboard.end()
            flow.check_stop = lambda: None

    flow.check_stop = check_stop
    ended = flow.train(dashboard)
    assert ended.outcome is (Outcome.DRIVER_LOST if can_be_read else Outcome.COMPLETED)
    assert [job["status"] for job in dashboard.jobs.values()] == ["STOPPED" if can_be_read else "SUCCEEDED"]


class Clock:
    """Time that passes only where somebody waits for it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Return the time."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


class LoglessClient:
    """A dashboard that knows of a job that has failed, and cannot read its log."""

    address = "http://head:8265"

    def job(self, submission_id: str) -> JobDetails:
        """Look the job up."""
        return FAILED

    def log(self, job: JobDetails, lines: int) -> Iterator[bytes]:
        """Read nothing."""
        raise UnreachableError("the node's agent is gone")


FAILED = JobDetails(
    type="SUBMISSION", submission_id="a-1", status="FAILED", entrypoint="true", message="killed", driver_node_id="node"
)


def test_a_job_that_has_ended_is_not_followed_for_ever_when_its_log_cannot_be_read(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    for module in (job_driver, attempt):
        monkeypatch.setattr(module, "time", clock)

    def check_stop() -> None:
        assert clock.now < 1200, "it is followed still"

    flow.check_stop = check_stop
    client: Any = LoglessClient()
    ended = flow.follow(job_driver.JobDriver(flow, client, FAILED, "session_1", 600, None))
    assert ended is not None
    assert ended.outcome is Outcome.DRIVER_LOST
    assert "killed" in ended.message


class Stop(BaseException):
    """The flow run was told to stop."""


@pytest.mark.parametrize("detaches", [True, False])
def test_a_stop_ends_the_job_unless_it_shall_go_on(dashboard: Dashboard, flow: Flow, detaches: bool) -> None:
    dashboard.on_submit = lambda submission_id: dashboard.say(STARTED)

    def check_stop() -> None:
        if flow.events:
            raise Stop

    flow.check_stop, flow.detaches = check_stop, lambda reason: detaches
    with pytest.raises(Stop):
        flow.train(dashboard)
    [job] = dashboard.jobs.values()
    assert job["status"] == ("RUNNING" if detaches else "STOPPED")
    assert any("goes on in the cluster" in note for note in flow.notes) == detaches


def test_a_job_that_waits_for_its_start_is_ended_by_another_job(dashboard: Dashboard, flow: Flow) -> None:
    def on_submit(submission_id: str) -> None:
        ended = dashboard.jobs.get(submission_id.removesuffix("-end"), {})
        ended["status"] = "FAILED" if submission_id.endswith("-end") else "PENDING"

    dashboard.on_submit = on_submit
    dashboard.stops_pending = False

    def check_stop() -> None:
        if dashboard.jobs:
            raise Stop

    flow.check_stop = check_stop
    with pytest.raises(Stop):
        flow.train(dashboard)
    [waiting, helper] = dashboard.jobs.values()
    assert waiting["status"] == "FAILED"
    assert f"_ray_internal_job_actor_{waiting['submission_id']}" in helper["entrypoint"]
    assert not any("could not be stopped" in note for note in flow.notes)


def test_a_stop_does_not_wait_for_an_answer_and_a_submission_on_its_way_is_stopped(
    dashboard: Dashboard, flow: Flow
) -> None:
    dashboard.answers["POST /api/jobs/"] = 2.0

    def check_stop() -> None:
        if "POST /api/jobs/" in dashboard.asked:
            raise Stop

    flow.check_stop = check_stop
    with pytest.raises(Stop):
        flow.train(dashboard)
    assert [job["status"] for job in dashboard.jobs.values()] == ["STOPPED"]
    dashboard.answers["GET /api/version"] = 30.0
    dashboard.asked.clear()
    flow.check_stop = lambda: check_stop_at(time.monotonic())
    began = time.monotonic()

    def check_stop_at(now: float) -> None:
        if now - began > 1:
            raise Stop

    with pytest.raises(Stop):
        flow.train(dashboard)
    assert time.monotonic() - began < 8


def test_a_signal_while_a_slow_submission_is_on_its_way_stops_the_job_that_comes_of_it(
    dashboard: Dashboard, flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_client, "_IN_FLIGHT_SECONDS", 0.1)
    monkeypatch.setattr(job_driver, "_STOP_AGAIN_SECONDS", 0.5)
    dashboard.answers["POST /api/jobs/"] = 3.0
    signals = [threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))]

    def handle(signum: int, frame: Any) -> None:
        raise Stop

    def check_stop() -> None:
        if "POST /api/jobs/" in dashboard.asked and signals:
            signals.pop().start()  # it comes while the answer is waited for

    flow.check_stop = check_stop
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(Stop):
            flow.train(dashboard)
        time.sleep(max(0.0, 3.5 - 3.0 * len(dashboard.jobs)))  # a job that was not waited for comes now
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [job["status"] for job in dashboard.jobs.values()] == ["STOPPED"]


def test_a_package_holds_what_the_driver_needs_and_not_the_token(tmp_path: Path) -> None:
    cluster = ClusterSettings(
        address="http://head:8265",
        auth_token="hush",
        runtime_env={"env_vars": {"A": "1"}, "py_modules": ["s3://a.zip"]},
    )
    environment = make_runtime_env(cluster)
    assert environment["py_modules"] == ["s3://a.zip"]
    assert environment["env_vars"]["A"] == "1"
    with job_modules(replace(SPEC, cluster=cluster), tmp_path) as (package, job):
        assert (package / "driver" / "main.py").is_file()
        assert not [*package.rglob("__pycache__")]
        assert read_spec(job / "spec").request.run_name == SPEC.request.run_name
        assert (job / "spec").stat().st_mode & 0o077 == 0
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"hush" in path.read_bytes()]
    assert not job.exists(), "what the driver is told goes once it is sent"


def test_the_driver_of_a_job_needs_nothing_but_what_the_cluster_is_asked_for() -> None:
    absent = ("prefect", "fastapi", "httpx", "pydantic_settings", "rich", "s3fs", "sqlalchemy", "typer")
    package = Path(entry.__file__).parents[2]
    parts = ("core", "driver", "elastic", "runs", "storage", "report")
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
