"""What of jobs mode needs no cluster: a log that breaks off, a dashboard's answers, the first code of a job."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs
from zipfile import ZipFile

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr
from ray.job_submission import JobDetails

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.operator_settings import ElasticTrainSettings
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.settings import ClusterSettings
from prefect_elastic_train.supervisor import job_client, job_handle, training_processes
from prefect_elastic_train.supervisor.job_client import JobClient, RefusedError, UnknownJobError, UnreachableError
from prefect_elastic_train.supervisor.job_handle import JobDriver, JobLog
from prefect_elastic_train.supervisor.training_processes import TrainingProcesses
from tests.unit.support import REPOSITORY, Stop, stop
from tests.unit.test_following import SPEC, Supervisor

Answer = tuple[int, str] | None  # status and content; None closes the connection
JOB = JobDetails(type="SUBMISSION", submission_id="elastic-train-mnist-1", status="RUNNING", entrypoint="true")


def _line(event: ev.Event) -> bytes:
    return f"{ev.EVENT_TAG}{ev.encode_event(event)}\n".encode()


def _event(number: int) -> bytes:
    return _line(ev.ControllerAlive(sequence=number, at=number, doing="RUNNING", seconds=0))


@given(
    kinds=st.lists(st.booleans(), max_size=60),
    steps=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 400)), max_size=12),
    look_back=st.integers(1, 8),
)
def test_every_line_of_a_log_is_read_once_wherever_the_connection_breaks(
    kinds: list[bool], steps: list[tuple[int, int]], look_back: int
) -> None:
    lines = [_event(number) if is_event else b"the same line\n" for number, is_event in enumerate(kinds, start=1)]
    taken = []
    text = b""
    limit = 0

    def read(job, count):
        """Answer as the dashboard does: from so many lines before the end, and not always to it."""
        last = b"".join(text.splitlines(keepends=True)[-count if count > 0 else 0 :])
        yield last[: limit or len(last)]
        if limit:
            raise UnreachableError("it broke off")

    log = JobLog(SimpleNamespace(read_log=read))  # type: ignore[arg-type]
    written = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_handle, "_MIN_LINES", look_back)
        for more, limit in steps:
            written += more
            text = b"".join(lines[:written])
            with suppress(UnreachableError):
                for line in log.read(JOB):
                    taken.append(line)
        limit = 0
        text = b"".join(lines) + b"the rest of a line"
        taken += log.read(JOB)
        taken += log.read(JOB, to_the_end=True)
    assert b"\n".join(taken) == text
    if any(kinds):
        text = _event(99)  # it was begun anew
        with pytest.raises(UnreachableError):
            [*log.read(JOB)]


class Dashboard(ThreadingHTTPServer):
    """A dashboard and the jobs behind it, as far as they are said here."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        #: Answered to a request, or to all ("") in place of what would be; seconds are a wait.
        self.answers: dict[str, Answer | float] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.asked = []
        self.tokens = []
        self.log = b""
        #: Called with the id of a new job; returns what is answered to its submission in place of what would be.
        self.on_submit: Callable[[str], Answer] = lambda submission_id: None
        self.on_request: Callable[[str], None] = lambda request: None
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{self.server_port}"
        self.cluster = ClusterSettings(address=url, connect_timeout_seconds=2, unreachable_timeout_seconds=10)

    def answer(self, method: str, target: str, body: bytes) -> Answer:
        """Answer a request."""
        path, _, query = target.partition("?")
        asked = f"{method} {path}"
        self.asked.append(asked)
        self.on_request(asked)
        found = self.answers.get(asked, self.answers.get("", 0.0))
        if not isinstance(found, float):
            return found
        time.sleep(found)
        if path == "/api/version":
            return 200, json.dumps({"ray_version": ray.__version__})
        if path.startswith("/api/packages/"):
            return (404, "") if method == "GET" else (200, "{}")
        if path.startswith("/api/v0/logs/"):
            lines = int(parse_qs(query)["lines"][0])
            return 200, b"".join(self.log.splitlines(True)[-lines if lines > 0 else 0 :]).decode()
        if path == "/api/jobs/":
            return (200, json.dumps([*self.jobs.values()])) if method == "GET" else self._submit(json.loads(body))
        _, _, _, submission_id, *what = path.split("/")
        job = self.jobs.get(submission_id)
        if job is None:
            return 404, f"Job {submission_id} does not exist"
        if what == ["stop"] and job["status"] == "RUNNING":  # one that waits for its start is not stopped
            job["status"] = "STOPPED"
        return 200, '{"stopped": true}' if what else json.dumps(job)

    def _submit(self, request: dict[str, Any]) -> Answer:
        submission_id = request["submission_id"]
        if submission_id in self.jobs:
            return 500, f"RuntimeError: Job with submission_id {submission_id} already exists"
        self.jobs[submission_id] = request | {"type": "SUBMISSION", "status": "RUNNING", "driver_node_id": "node"}
        accepted = 200, json.dumps({"job_id": submission_id, "submission_id": submission_id})
        return self.on_submit(submission_id) or accepted

    def say(self, *events: ev.Event) -> None:
        """Have the driver tell something."""
        self.log += b"".join(map(_line, events))

    def end(self, *events: ev.Event, status: str = "SUCCEEDED") -> None:
        """Have the driver tell something, and all jobs ended."""
        self.say(*events)
        for job in self.jobs.values():
            job["status"] = status

    def train(self, answer: Answer = None) -> None:
        """Have each job that is submitted train well."""
        self.on_submit = lambda submission_id: self.end(STARTED, STATE, ENDED) or answer

    def statuses(self) -> list[str]:
        """The states of all jobs."""
        return [job["status"] for job in self.jobs.values()]


class _Handler(BaseHTTPRequestHandler):
    server: Dashboard

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.tokens.append(self.headers.get("Authorization", "").removeprefix("Bearer "))
        answer = self.server.answer(self.command, self.path, body)
        if answer is not None:
            status, content = answer
            with suppress(OSError):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(content.encode())

    do_GET = do_POST = do_PUT = do_DELETE = _answer

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dashboard]:
    """A dashboard without jobs, which is asked often."""
    monkeypatch.setattr(training_processes, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(job_handle, "_REQUEST_INTERVAL_SECONDS", 0.02)
    with Dashboard() as dashboard:
        yield dashboard
        dashboard.shutdown()


@pytest.mark.parametrize(
    ("answer", "expected", "says"),
    [
        ((200, "{}"), UnreachableError, "is no Ray dashboard"),
        ((401, "who are you"), RefusedError, "refused the token (Authentication required: who are you)"),
        ((502, "bad gateway"), UnreachableError, "HTTP 502: bad gateway"),
        (None, UnreachableError, "RemoteDisconnected"),
        ((200, '{"ray_version": "2.1.0"}'), RefusedError, "use the same minor version"),
    ],
)
def test_what_a_dashboard_answers_is_told_apart(
    dashboard: Dashboard, answer: Answer, expected: type[Exception], says: str
) -> None:
    client = JobClient(dashboard.cluster)
    client.check_version()
    dashboard.answers["GET /api/version"] = answer
    with pytest.raises(expected) as raised:
        client.check_version()
    assert says in str(raised.value)


def test_a_job_is_gone_only_where_ray_itself_says_so(dashboard: Dashboard) -> None:
    client = JobClient(dashboard.cluster)
    with pytest.raises(UnknownJobError):
        client.find_job("a-1")
    client.submit_job(entrypoint="true", submission_id="a-1")
    assert client.find_job("a-1").submission_id == "a-1"
    for page in ((404, "<html>not here</html>"), (200, "<html>log in</html>"), (200, "[]")):
        dashboard.answers |= {"GET /api/jobs/a-1": page, "GET /api/jobs/": (200, "<html>log in</html>")}
        for request in (lambda: client.find_job("a-1"), client.submitted_jobs):
            with pytest.raises(UnreachableError, match="is no Ray dashboard"):
                request()


def test_requests_go_to_the_block_s_address_with_its_token_which_no_error_holds(
    dashboard: Dashboard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:1")
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password hush")
    (tmp_path / ".ray").mkdir()
    client = JobClient(dashboard.cluster)
    client.submitted_jobs()
    (tmp_path / ".ray" / "auth_token").write_text("of-the-home\n")
    client.submitted_jobs()
    file = tmp_path / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    file.write_bytes(b"hush\xff")
    with pytest.raises(RefusedError, match="holds characters that no"):
        client.submitted_jobs()
    file.write_text("of-the-file")
    client.submitted_jobs()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-the-environment")
    client.submitted_jobs()
    client = JobClient(dashboard.cluster.model_copy(update={"auth_token": SecretStr("of-the-block")}))
    dashboard.answers[""] = None
    with pytest.raises(UnreachableError) as raised:
        client.submitted_jobs()
    assert raised.value.__cause__ is raised.value.__context__ is None
    assert dashboard.tokens == ["", "of-the-home", "of-the-file", "of-the-environment", "of-the-block"]


@pytest.mark.parametrize("token", ["hush\nhush", "h\u00fcsh"])
def test_a_token_that_cannot_be_sent_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(RefusedError) as refused:
        JobClient(ClusterSettings(address="http://head:8265", auth_token=token)).submitted_jobs()
    assert (refused.value.outcome, "hush" in str(refused.value)) == (Outcome.INVALID, False)


def test_certificates_that_cannot_be_read_are_refused_with_their_path(tmp_path: Path) -> None:
    (tmp_path / "invalid").write_text("no certificate")
    for path in (tmp_path / "invalid", tmp_path / "missing"):
        with pytest.raises(RefusedError, match=f"ca_bundle '{path}', cannot be read") as refused:
            JobClient(ClusterSettings(address="https://head:8265", ca_bundle=str(path)))
        assert refused.value.outcome is Outcome.INVALID


class Flow(Supervisor):
    """A flow process that follows jobs, and records what it receives."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.past = []
        self.folder = folder
        self.job = None
        #: Called with each event and each note.
        self.react: Callable[[ev.Event | str], object] = lambda received: None

    def on_event(self, event: ev.Event, replayed: bool) -> None:
        (self.past if replayed else self.events).append(event)
        self.react(event)

    def on_note(self, text: str, level: int = 0) -> None:
        super().on_note(text)
        self.react(text)

    def logged_until(self) -> float:
        return 1.5

    def train(self, dashboard: Dashboard, **changes: Any) -> ev.AttemptEnded:
        """Run an attempt as a job, with changes of its request."""
        spec = replace(SPEC, cluster=dashboard.cluster, request=replace(SPEC.request, **changes))
        processes = TrainingProcesses(self.settings, self)
        self.job = JobDriver(self, self.settings, processes.wait, spec, self.folder, self.job)
        return processes.follow(self.job)


@pytest.fixture
def flow(tmp_path: Path) -> Flow:
    """A flow process."""
    return Flow(tmp_path)


STARTED = ev.AttemptStarted(sequence=1, at=1.0, attempt=1, run_name="mnist", run_uri="/runs/mnist")
STATE = ev.StateChanged(sequence=2, at=2.0, state="RUNNING")
ENDED = ev.AttemptEnded(sequence=3, at=3.0, attempt=1, outcome=Outcome.COMPLETED, result={})


def test_a_job_is_submitted_followed_and_told_and_its_package_lies_in_the_private_folder_meanwhile(
    dashboard: Dashboard, flow: Flow
) -> None:
    packages = []
    dashboard.on_request = lambda request: packages.extend(flow.folder.glob("*.zip") if request[:3] == "PUT" else ())
    dashboard.log = b"a line of before\n"
    dashboard.train()
    assert flow.train(dashboard) == ENDED
    assert (flow.events, flow.lines) == ([STARTED, STATE, ENDED], [("driver", "a line of before")])
    [package] = packages
    assert not package.exists()
    [job] = dashboard.jobs.values()
    assert job["metadata"]["elastic_train_owner"] == SPEC.request.owner.flow_run_id


@pytest.mark.parametrize("answer", [(502, "bad gateway"), (200, "<html>log in</html>")])
def test_a_submission_whose_answer_is_lost_is_recognised(
    dashboard: Dashboard, flow: Flow, monkeypatch: pytest.MonkeyPatch, answer: Answer
) -> None:
    monkeypatch.setattr(job_handle, "_SUBMIT_SECONDS", 0.0)  # it takes longer than its retries
    dashboard.train(answer)
    assert flow.train(dashboard, run_name="lr=0.1, wide") == ENDED
    assert dashboard.asked.count("POST /api/jobs/") == 1
    [name] = dashboard.jobs
    assert name.startswith("elastic-train-lr-0.1--wide-"), "it needs no quotes in a URL or a shell"


def test_a_submission_that_has_not_arrived_is_repeated_and_one_that_is_refused_is_not(
    dashboard: Dashboard, flow: Flow
) -> None:
    flow.react = lambda received: dashboard.answers.clear()
    dashboard.train()
    dashboard.answers["POST /api/jobs/"] = (503, "busy")
    assert flow.train(dashboard) == ENDED
    assert dashboard.asked.count("POST /api/jobs/") == 2
    assert "HTTP 503: busy" in flow.notes[0]
    dashboard.jobs.clear()
    dashboard.answers["POST /api/jobs/"] = (400, "ValueError: no such field")
    with pytest.raises(RefusedError, match=r"Ray does not accept the job: .*no such field"):
        flow.train(dashboard)


@pytest.mark.parametrize(
    ("request_", "answer", "reason"),
    [("", None, "RemoteDisconnected"), ("GET /api/v0/logs/file", (500, "no agent"), "HTTP 500: no agent")],
)
def test_a_dashboard_or_a_log_that_cannot_be_read_says_nothing_about_the_job_and_a_line_says_so(
    dashboard: Dashboard,
    flow: Flow,
    monkeypatch: pytest.MonkeyPatch,
    request_: str,
    answer: Answer,
    reason: str,
) -> None:
    monkeypatch.setattr(job_handle, "NOTE_SECONDS", 0.4)
    flow.settings = ElasticTrainSettings(liveness_timeout_seconds=0.2)

    def react(received):
        if received == STATE:
            dashboard.answers[request_] = answer
        elif "or not with the log" in str(received):
            dashboard.answers.clear()
            dashboard.end(ENDED)

    flow.react = react
    dashboard.on_submit = lambda submission_id: dashboard.say(STARTED, STATE)
    assert flow.train(dashboard) == ENDED
    assert flow.events == [STARTED, STATE, ENDED]
    assert dashboard.asked.count("POST /api/jobs/") == 1
    assert reason in flow.notes[-1]


@pytest.fixture
def own_job(dashboard: Dashboard, tmp_path: Path) -> Dashboard:
    """The dashboard, with a job of the same training that runs, as another process of the flow run has submitted it."""
    dashboard.train()
    Flow(tmp_path).train(dashboard)
    dashboard.end(status="RUNNING")
    dashboard.asked.clear()
    dashboard.log = b""
    return dashboard


def test_a_job_that_runs_is_followed_whatever_ray_it_has_and_what_was_told_before_is_not_told_again(
    own_job: Dashboard, flow: Flow
) -> None:
    own_job.answers["GET /api/version"] = (200, '{"ray_version": "2.1.0"}')
    own_job.say(STARTED)
    own_job.log += b"told before\n"
    own_job.say(STATE)
    own_job.log += b"told now\n"
    own_job.say(ENDED)
    flow.react = lambda received: own_job.end() if received == STATE else None
    assert flow.train(own_job) == ENDED
    assert (flow.past, flow.events, flow.lines) == ([STARTED], [STATE, ENDED], [("driver", "told now")])
    assert "POST /api/jobs/" not in own_job.asked


def test_a_job_that_trains_with_another_configuration_is_not_followed(own_job: Dashboard, flow: Flow) -> None:
    fingerprint = SPEC.request.fingerprint.model_copy(update={"config": {"lr": "2"}})
    with pytest.raises(AttemptFailedError, match="still trains run 'mnist' with another train_loop_config") as caught:
        flow.train(own_job, fingerprint=fingerprint)
    assert (caught.value.outcome, own_job.statuses()) == (Outcome.INVALID, ["RUNNING"])


def test_a_job_that_the_cluster_does_not_know_any_more_is_lost(own_job: Dashboard, flow: Flow) -> None:
    flow.react = lambda received: own_job.jobs.clear() if received == STARTED else None
    own_job.say(STARTED)
    ended = flow.train(own_job)
    assert (ended.outcome, "started again" in ended.message) == (Outcome.CLUSTER_LOST, True)


def test_a_job_of_another_process_that_was_overtaken_is_followed_by_one_of_ours(own_job: Dashboard, flow: Flow) -> None:
    own_job.say(STARTED, ENDED.model_copy(update={"outcome": Outcome.SUPERSEDED}))
    flow.react = lambda received: own_job.end(status="FAILED")
    assert flow.train(own_job).outcome is Outcome.DRIVER_LOST


def test_a_driver_whose_log_says_nothing_hangs(dashboard: Dashboard, flow: Flow) -> None:
    flow.settings = ElasticTrainSettings(liveness_timeout_seconds=0.5)
    dashboard.answers["POST /api/jobs/"] = 0.6  # seconds, which are nobody's silence
    dashboard.on_submit = lambda submission_id: dashboard.say(STARTED)
    ended = flow.train(dashboard)
    assert (ended.outcome, flow.events, dashboard.statuses()) == (Outcome.DRIVER_LOST, [STARTED], ["STOPPED"])


@pytest.mark.parametrize(
    ("status", "said", "outcome", "says"),
    [
        ("FAILED", "", "driver_lost", "the driver was lost: job elastic-train-mnist-"),
        ("STOPPED", "", "cancelled", "was stopped, but not by this flow run"),
        ("STOPPED", "cancelled", "cancelled", "was stopped, but not by this flow run"),
        ("STOPPED", "completed", "completed", ""),
        ("SUCCEEDED", "", "driver_lost", "its final event was lost"),
        ("FAILED", "cancelled", "driver_lost", "was ended by a signal"),
        ("FAILED", "user_error", "user_error", ""),
        ("FAILED", "ModuleNotFoundError: No module named 's3fs'", "invalid", "cannot run the driver: Mod"),
        ("FAILED RUNTIME_ENV_SETUP_FAILURE", "", "invalid", "cannot set up the runtime environment"),
    ],
)
def test_a_job_that_has_ended_is_judged_by_its_state_and_by_its_last_word_if_that_can_be_read(
    dashboard: Dashboard,
    flow: Flow,
    monkeypatch: pytest.MonkeyPatch,
    status: str,
    said: str,
    outcome: str,
    says: str,
) -> None:
    monkeypatch.setattr(job_handle, "_LOG_END_SECONDS", 0.1)
    if not said:
        dashboard.answers["GET /api/v0/logs/file"] = (500, "the node's agent is away")
    elif " " in said:
        dashboard.log = said.encode()
    else:
        dashboard.say(STARTED, ENDED.model_copy(update={"outcome": Outcome(said)}))
    state = dict(zip(("status", "error_type"), status.split(), strict=False))
    dashboard.on_submit = lambda submission_id: dashboard.jobs[submission_id].update(state, message="killed")
    ended = flow.train(dashboard)
    assert ended.outcome == outcome
    assert says in ended.message


@pytest.mark.parametrize("keeps_job", [True, False])
def test_a_stop_ends_the_job_unless_it_shall_go_on(dashboard: Dashboard, flow: Flow, keeps_job: bool) -> None:
    dashboard.on_submit = lambda submission_id: dashboard.say(STARTED)
    flow.react = lambda received: stop() if received == STARTED else None
    flow.keeps_job = lambda reason: keeps_job  # type: ignore[method-assign]
    with pytest.raises(Stop):
        flow.train(dashboard)
    assert dashboard.statuses() == ["RUNNING" if keeps_job else "STOPPED"]
    assert any("goes on in the cluster" in note for note in flow.notes) == keeps_job
    flow.job.stop()
    assert dashboard.statuses() == ["STOPPED"], "no other attempt is to follow"


def test_a_job_that_waits_for_its_start_holds_a_cancel_up_for_a_limited_time(
    dashboard: Dashboard, flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_handle, "JOB_STOP_SECONDS", 0.1)
    dashboard.on_submit = lambda submission_id: dashboard.end(status="PENDING")
    flow.check_stop = lambda: stop() if dashboard.jobs else None  # type: ignore[method-assign]
    with pytest.raises(Stop):
        flow.train(dashboard)
    assert "could not be stopped (it is still PENDING)" in flow.notes[-1]


@pytest.mark.usefixtures("stops_by_signal")
@pytest.mark.parametrize("request_", ["POST /api/jobs/", "/stop"])
def test_a_signal_while_a_job_is_submitted_or_stopped_leaves_it_stopped_and_a_retry_has_a_job_of_its_own(
    dashboard: Dashboard, flow: Flow, request_: str
) -> None:
    signalled = []

    def on_request(request):
        if request.endswith(request_) and not signalled:
            signalled.append(request)
            os.kill(os.getpid(), signal.SIGUSR1)

    dashboard.on_request = on_request
    dashboard.answers["POST /api/jobs/"] = 0.6
    flow.check_stop = lambda: stop() if dashboard.jobs else None  # type: ignore[method-assign]
    with pytest.raises(Stop):
        flow.train(dashboard)
    assert signalled
    assert dashboard.statuses() == ["STOPPED"]
    flow.check_stop = lambda: None  # type: ignore[method-assign]
    dashboard.train()
    assert flow.train(dashboard) == ENDED
    assert len(dashboard.jobs) == 2


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """What a job brings along, unpacked as on a node of the cluster."""
    cluster = ClusterSettings(address="http://head:8265", auth_token="hush")
    with job_client.job_package(replace(SPEC, cluster=cluster), tmp_path) as archive:
        ZipFile(archive).extractall(tmp_path / "node")
    assert not archive.exists(), "what the driver is told goes once it is sent"
    return tmp_path / "node"


OURS = REPOSITORY / "prefect_elastic_train"


def test_a_package_holds_what_the_driver_needs_and_not_the_token(package: Path) -> None:
    spec = pickle.loads((package / "elastic_train_job" / "spec").read_bytes())
    assert spec.request.run_name == SPEC.request.run_name
    assert not [path for path in package.rglob("*") if path.is_file() and b"hush" in path.read_bytes()]
    own, sent = ({path.relative_to(folder) for path in folder.rglob("*.py")} for folder in (OURS, package / OURS.name))
    assert own == sent


def test_the_driver_of_a_job_needs_nothing_but_what_the_cluster_is_asked_for(package: Path) -> None:
    absent = ("prefect", "fastapi", "httpx", "pydantic_settings", "rich", "s3fs", "sqlalchemy", "typer")
    code = f"import sys\nfor name in {absent!r}: sys.modules[name] = None\n"
    for part in ("core", "driver", "controller", "worker", "runs", "storage", "report"):
        for path in sorted((package / "prefect_elastic_train" / part).glob("[a-z]*.py")):
            if path.stem not in ("s3", "operator_settings"):  # asked for where it is used; of the flow's machine
                code += f"import prefect_elastic_train.{part}.{path.stem}\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=package)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_first_code_of_a_job_says_that_the_cluster_has_another_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_client, "PYTHON", "3.99")
    with job_client.job_package(SPEC, tmp_path) as archive, pytest.raises(ImportError, match="the cluster runs Python"):
        exec(ZipFile(archive).read("elastic_train_job/__main__.py"), {})
