"""Ray's client of its dashboards as the supervisor uses it: every request has a bound, and the token may change.

Uses ``ray._private.runtime_env.packaging.create_package``: the public client packs into /tmp, where a killed process
leaves the spec of the driver behind.
"""

from __future__ import annotations

import os
import queue
import re
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
import requests
from ray._private.runtime_env.packaging import create_package
from ray.dashboard.modules.dashboard_sdk import SubmissionClient, uri_to_http_components
from ray.job_submission import JobDetails, JobSubmissionClient

from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.settings import ClusterSettings
from prefect_elastic_train.supervisor.attempt import TURN_SECONDS

_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 10.0
#: The list holds all jobs that the cluster ever ran, and a submission may wait for the node of the head.
_JOBS_SECONDS = 60.0
#: A package goes in one piece.
_UPLOAD_SECONDS = 600.0
#: How long a request that is given up may still be on its way.
_IN_FLIGHT_SECONDS = 5.0
#: Ray's own bound for reading a log, which it would set to half a minute.
_LOG_SECONDS = 600
_PIECE_BYTES = 64 * 1024
#: Answers of the 4xx that another try may change.
_PASSING_STATUS = (404, 408, 425, 429)


class UnreachableError(Exception):
    """The dashboard does not answer, or not as it should: nothing is known of the jobs meanwhile.

    Attributes:
        status: Of the answer, 0 if there was none.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class UnknownJobError(UnreachableError):
    """Ray itself says that there is no such job; a gateway has pages of its own."""


class RefusedError(AttemptFailedError):
    """The cluster cannot be used like this; outcome ``invalid``."""


class JobClient(JobSubmissionClient):  # type: ignore[misc]
    """The dashboard of a cluster.

    Ray's own client, but: all requests have a bound in time and are authorised with the block's token; environment
    variables such as ``RAY_ADDRESS`` do not lead it to another cluster; nothing is asked before it is wanted.

    Args:
        cluster: Its address, token and certificates.
        turn: Called several times a second while an answer is waited for; what it raises passes on.
        folder: Private folder for what is uploaded; None for one that uploads nothing.

    Raises:
        RefusedError: The token cannot be sent, or the certificates not be read.
    """

    def __init__(
        self, cluster: ClusterSettings, turn: Callable[[], None] = lambda: None, folder: Path | None = None
    ) -> None:
        self._cluster = cluster
        self._turn = turn
        self._folder = folder
        self._session = requests.Session()
        self._session.auth = lambda request: request  # or a .netrc would take the place of the token
        self._headers: dict[str, Any] = {}
        self._client_ray_version = ray.__version__
        self._cluster_ray_version = ""
        self._posting: threading.Thread | None = None
        verify = _ca_bundle(cluster) or True if cluster.verify_tls else False
        try:
            # Not the constructor between, which lets the environment choose the address and asks the dashboard.
            SubmissionClient.__init__(self, cluster.address, headers=_authorization(_token(cluster)), verify=verify)
        except OSError as error:
            raise _refused(
                f"the certificates of the RayCluster, ca_bundle {verify!r}, cannot be read: {error}; give a "
                "file in PEM format, or a folder of them, that this machine has"
            ) from error

    @property
    def address(self) -> str:
        """URL of the dashboard."""
        return str(self._address)

    @property
    def is_posting(self) -> bool:
        """Whether a request whose answer nobody waits for any more is on its way: a submission may still arrive."""
        return self._posting is not None and self._posting.is_alive()

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def session(self) -> str:
        """Return the name of the cluster's session: another one is another cluster.

        Raises:
            UnreachableError: There is no dashboard, or none yet.
            RefusedError: The cluster does not let us in.
        """
        answer = self._do_request("GET", "/api/version")
        if answer.status_code >= 500:
            self._raise_error(answer)
        with _read_as("a version; give the dashboard's URL, port 8265 unless set otherwise"):
            found = answer.json()
            self._cluster_ray_version, name = str(found["ray_version"]), str(found["session_name"])
        self.jobs()  # the version is told to everybody
        return name

    def check_version(self) -> None:
        """Check that the cluster, whose session was asked for, can run the driver of this machine.

        Raises:
            RefusedError: It runs another minor version of Ray.
        """
        there, here = self._cluster_ray_version, version("ray")
        if there.split(".")[:2] != here.split(".")[:2]:
            raise _refused(
                f"the cluster at {self.address} runs Ray {there} and the flow Ray {here}; use the same minor version"
            )

    def jobs(self) -> list[JobDetails]:
        """List the submitted jobs that the cluster remembers."""
        with _read_as():
            return [job for job in self.list_jobs() if job.type == "SUBMISSION"]

    def job(self, submission_id: str) -> JobDetails | None:
        """Look a job up; None if the cluster does not know it."""
        with _read_as():
            try:
                found = self.get_job_info(submission_id)
            except UnknownJobError:
                return None
            if found.submission_id != submission_id:
                raise ValueError("another job")
            return found

    def submit(
        self,
        submission_id: str,
        entrypoint: str,
        metadata: dict[str, str],
        runtime_env: dict[str, Any] | None = None,
        modules: Sequence[Path] = (),
        resources: dict[str, Any] | None = None,
    ) -> None:
        """Submit a command as a job.

        Args:
            submission_id: Its id, which no job has had.
            entrypoint: The command.
            metadata: What people and programs know it by.
            runtime_env: Its runtime environment, whose folders of this machine are uploaded.
            modules: Folders of Python packages that are uploaded whole, whatever the runtime environment excludes.
            resources: What it reserves, by the names of Ray's ``submit_job``.

        Raises:
            UnreachableError: Nobody knows whether the cluster has it.
            RefusedError: It was refused, or cannot be sent as it is.
        """
        environment = dict(runtime_env or {})
        try:
            uploaded = [
                self._upload_package_if_needed(str(module), include_gitignore=False, include_parent_dir=True)
                for module in modules
            ]
            if uploaded:  # Ray takes an empty list for a module without a path
                environment["py_modules"] = [*(environment.get("py_modules") or []), *uploaded]
            self.submit_job(
                entrypoint=entrypoint,
                submission_id=submission_id,
                runtime_env=environment,
                metadata=dict(metadata),
                **(resources or {}),
            )
        except AttemptFailedError:
            raise
        except requests.RequestException as error:  # an answer that Ray's client cannot read
            raise UnreachableError(_described(error)) from None
        except UnreachableError as error:
            if not 400 <= error.status < 500 or error.status in _PASSING_STATUS:
                raise
            raise _refused(f"Ray does not accept the job: {error}") from error
        except Exception as error:
            raise _refused(f"Ray does not accept the job: {type(error).__name__}: {error}") from error

    def stop(self, submission_id: str) -> None:
        """Have a job ended; a job that has ended or is unknown is left as it is."""
        with _read_as(), suppress(UnknownJobError):
            self.stop_job(submission_id)

    def log(self, job: JobDetails, lines: int) -> Iterator[bytes]:
        """Read the log of a job's driver as pieces of bytes.

        Args:
            job: The job; its driver must have started.
            lines: How many lines of its end; -1 for all.

        Raises:
            UnreachableError: It cannot be read, also in the middle.
        """
        parameters = {
            "node_id": job.driver_node_id,
            "filename": f"job-driver-{job.submission_id}.log",
            "lines": str(lines),
            "timeout": str(_LOG_SECONDS),
        }
        with closing(self._do_request("GET", "/api/v0/logs/file", params=parameters, stream=True)) as answer:
            if answer.status_code != 200:
                self._raise_error(answer)
            try:
                yield from answer.iter_content(_PIECE_BYTES)
            except requests.RequestException as error:
                raise UnreachableError(f"the log broke off: {_described(error)}") from None

    def _do_request(
        self, method: str, endpoint: str, *, data: bytes | None = None, json_data: Any = None, **more: Any
    ) -> requests.Response:
        """Ask, with a bound; all of Ray's client goes this way."""
        if method == "PUT":
            timeout = (_UPLOAD_SECONDS, _UPLOAD_SECONDS)  # sending counts to the former
        else:
            timeout = (_CONNECT_SECONDS, _JOBS_SECONDS if endpoint == "/api/jobs/" else _ANSWER_SECONDS)
        more |= {"data": data, "json": json_data, "verify": self._verify, "timeout": timeout, "allow_redirects": False}
        while True:
            send = partial(self._session.request, method, self._address + endpoint, headers=self._headers, **more)
            answer = self._wait_for(send, is_post=method == "POST")
            if isinstance(answer, Exception):
                if isinstance(_root(answer), ssl.SSLCertVerificationError):
                    raise _refused(
                        f"the certificate of {self.address} is not trusted ({_described(answer)}); give the path of "
                        "the certificates that vouch for it as ca_bundle of the RayCluster"
                    )
                raise UnreachableError(_described(answer))  # not from what holds the request, and with it the token
            if answer.status_code not in (401, 403):
                return answer
            renewed = _authorization(_token(self._cluster))  # it may be in a file that changes
            if renewed == self._headers:
                raise _refused(
                    f"the Ray cluster at {self.address} refused the token ({_what_it_says(answer)}); give its token as "
                    "auth_token of the RayCluster"
                )
            self._headers = renewed

    def _upload_package(
        self,
        package_uri: str,
        package_path: str,
        include_gitignore: bool,
        include_parent_dir: bool | None = False,
        excludes: list[str] | None = None,
        is_file: bool = False,
    ) -> None:
        """Upload a folder or a file. Ray packs in /tmp, where a process that is killed leaves secrets behind."""
        if self._folder is None or is_file:
            super()._upload_package(
                package_uri, package_path, include_gitignore, include_parent_dir, excludes, is_file=is_file
            )
            return
        file = self._folder / uri_to_http_components(package_uri)[1]
        try:
            create_package(
                package_path,
                file,
                include_gitignore=include_gitignore,
                include_parent_dir=bool(include_parent_dir),
                excludes=excludes,
            )
            super()._upload_package(package_uri, str(file), include_gitignore, is_file=True)
        finally:
            file.unlink(missing_ok=True)

    def _wait_for(self, send: Callable[[], requests.Response], is_post: bool) -> requests.Response | Exception:
        """Send a request in a thread, and wait for the answer or what went wrong."""
        answers: queue.Queue[requests.Response | Exception] = queue.Queue()

        def run() -> None:
            try:
                answers.put(send())
            except Exception as error:  # noqa: BLE001 - told by who has sent it
                answers.put(error)

        thread = threading.Thread(target=run, name="elastic-train-request", daemon=True)
        thread.start()
        while True:
            try:
                self._turn()
                return answers.get(timeout=TURN_SECONDS)
            except queue.Empty:
                continue
            except BaseException:  # of the turn, or of a signal
                if is_post:
                    self._posting = thread
                    thread.join(_IN_FLIGHT_SECONDS)  # what is asked next finds what this has done
                raise

    def _raise_error(self, answer: requests.Response) -> None:
        is_unknown = answer.status_code == 404 and re.fullmatch(r"Job \S+ does not exist", answer.text.strip())
        raise (UnknownJobError if is_unknown else UnreachableError)(_what_it_says(answer), answer.status_code)


def _refused(message: str) -> RefusedError:
    return RefusedError(message, outcome=Outcome.INVALID)


def _token(cluster: ClusterSettings) -> str:
    """Return the token for a cluster: the block's, or what Ray itself would take; empty without one."""
    token = cluster.auth_token.get_secret_value() or os.environ.get("RAY_AUTH_TOKEN", "")
    if not token:
        path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
        try:
            token = path.read_text()
        except (OSError, UnicodeDecodeError):
            return ""
    token = token.strip()
    if not token.isascii() or not token.isprintable() or " " in token:
        raise _refused(
            "the cluster's token holds characters that no token has, such as spaces or line ends; copy it anew"
        )
    return token


def _authorization(token: str) -> dict[str, Any]:
    # With none, the header that is not sent keeps Ray from looking for a token by itself.
    value = f"Bearer {token}" if token else None
    return {"Authorization": value, "X-Ray-Authorization": value}


def _ca_bundle(cluster: ClusterSettings) -> str:
    """Return the path of the certificates that vouch for a dashboard; empty for those that Python packages bring."""
    named = cluster.ca_bundle or os.environ.get("SSL_CERT_FILE") or os.environ.get("REQUESTS_CA_BUNDLE") or ""
    return os.path.expanduser(named)


@contextmanager
def _read_as(what: str = "what Ray says of a job") -> Iterator[None]:
    """Take an answer that cannot be read for none: a gateway has pages of its own."""
    try:
        yield
    except (ValueError, TypeError, KeyError) as error:
        raise UnreachableError(f"what answers is no Ray dashboard: expected {what}") from error


def _root(error: BaseException) -> BaseException:
    """The error of the connection itself, below what requests and urllib3 make of it."""
    while type(error).__module__.startswith(("requests.", "urllib3.")):
        inner = error.__cause__ or error.__context__
        if inner is None:
            break
        error = inner
    return error


def _described(error: BaseException) -> str:
    root = _root(error)
    return f"{type(root).__name__}: {root}" if str(root) else type(root).__name__


def _what_it_says(answer: requests.Response) -> str:
    text = " ".join(answer.text.split())
    return f"HTTP {answer.status_code}: {text[-300:]}" if text else f"HTTP {answer.status_code}"
