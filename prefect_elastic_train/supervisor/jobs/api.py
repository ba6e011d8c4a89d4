"""Ray's dashboard as the supervisor uses it: the Jobs REST API, logs and the state of the cluster.

Every request is bounded in time, which those of Ray's own client are not. Nothing of Ray is imported here.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.settings import ClusterSettings

__all__ = [
    "ClusterVersion",
    "Job",
    "JobsApi",
    "NoDashboardError",
    "UnreachableError",
    "ca_bundle_of",
    "token_of",
]

_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 10.0
#: The list holds all jobs that the cluster ever ran.
_LIST_SECONDS = 60.0
#: Ray's own bound for reading a whole log, which it would set to half a minute.
_WHOLE_LOG_SECONDS = 600
#: A log stream that is silent for longer is taken for broken: a driver says something every two seconds.
_SILENCE_SECONDS = 30.0
_POLL_LOG_SECONDS = 0.5
_MAX_LEFT = 1000
_TERMINAL = ("SUCCEEDED", "FAILED", "STOPPED")
#: Actors that belong to a cluster and not to the run whose driver happened to start them.
_SHARED_ACTORS = ("_AutoscalingCoordinatorActor",)


class UnreachableError(Exception):
    """The dashboard does not answer, or not as it should: nothing is known of the jobs meanwhile."""


class NoDashboardError(AttemptFailedError):
    """Something else answers in the place of a dashboard; while a head is restarted, a gateway may."""


@dataclass(frozen=True)
class ClusterVersion:
    """Which cluster answers: another session name is another cluster."""

    ray: str
    session: str


@dataclass(frozen=True)
class Job:
    """A submitted job.

    Attributes:
        submission_id: Its id.
        status: ``PENDING``, ``RUNNING``, ``SUCCEEDED``, ``FAILED`` or ``STOPPED``.
        message: What Ray says of that.
        error_type: What kind of failure Ray calls it, empty for none.
        metadata: What it was submitted with.
        started_at: When it was submitted, in seconds since the epoch.
        driver_node_id: Where its driver runs, empty as long as it does not.
        job_id: Ray's id of the driver, empty as long as it has not joined the cluster.
    """

    submission_id: str
    status: str
    message: str
    error_type: str
    metadata: dict[str, str]
    started_at: float
    driver_node_id: str
    job_id: str

    @property
    def is_terminal(self) -> bool:
        """Whether it has ended."""
        return self.status in _TERMINAL


def token_of(cluster: ClusterSettings) -> str:
    """Give the token for a cluster: the block's, or what Ray itself would take; empty without one.

    Raises:
        AttemptFailedError: It cannot be sent; outcome ``invalid``.
    """
    token = cluster.auth_token.get_secret_value() or os.environ.get("RAY_AUTH_TOKEN", "")
    if not token:
        path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
        try:
            token = path.read_text()
        except (OSError, UnicodeDecodeError):
            return ""
    token = token.strip()
    if not token.isascii() or not token.isprintable() or " " in token:
        raise AttemptFailedError(
            "the cluster's token holds characters that no token has, such as spaces or line ends; copy it anew",
            outcome=Outcome.INVALID,
        )
    return token


def ca_bundle_of(cluster: ClusterSettings) -> str:
    """Give the path of the certificates that vouch for a dashboard; empty for those that Python packages bring."""
    named = cluster.ca_bundle or os.environ.get("SSL_CERT_FILE") or os.environ.get("REQUESTS_CA_BUNDLE") or ""
    return os.path.expanduser(named)


class JobsApi:
    """The dashboard of a cluster.

    Args:
        cluster: Its address, token and certificates.

    Raises:
        AttemptFailedError: The certificates cannot be read; outcome ``invalid``.
    """

    def __init__(self, cluster: ClusterSettings) -> None:
        self.address = cluster.address.rstrip("/")
        self._cluster = cluster
        self._token = token_of(cluster)
        self._client = httpx.Client(
            headers=_authorization(self._token),
            verify=_tls(cluster),
            timeout=httpx.Timeout(_ANSWER_SECONDS, connect=_CONNECT_SECONDS),
            follow_redirects=False,
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def version(self) -> ClusterVersion:
        """Ask which cluster it is."""
        answer = self._request("GET", "/api/version")
        try:
            found = self._read(answer)
        except UnreachableError:
            if answer.status_code >= 500:
                raise
            found = None
        if not isinstance(found, dict) or "ray_version" not in found:
            raise NoDashboardError(
                f"what answers at {self.address} is no Ray dashboard; give the URL of the dashboard (port 8265 unless "
                "it was set otherwise) as address of the RayCluster, with the path prefix of a proxy if there is one",
                outcome=Outcome.INVALID,
            )
        return ClusterVersion(str(found["ray_version"]), str(found.get("session_name") or ""))

    def jobs(self) -> list[Job]:
        """List the submitted jobs that the cluster remembers."""
        listed = self._json("GET", "/api/jobs/", timeout=httpx.Timeout(_LIST_SECONDS, connect=_CONNECT_SECONDS))
        if not isinstance(listed, list):
            raise UnreachableError("the list of jobs is none")
        return [_job(found) for found in listed if found.get("type") == "SUBMISSION"]

    def job(self, submission_id: str) -> Job | None:
        """Look a job up; None if the cluster does not know it."""
        answer = self._request("GET", f"/api/jobs/{submission_id}")
        if _is_unknown(answer, submission_id):
            return None
        found = self._read(answer)
        if not isinstance(found, dict) or found.get("submission_id") != submission_id:
            raise UnreachableError("what answers does not speak of the job")
        return _job(found)

    def submit(self, submission_id: str, entrypoint: str, metadata: dict[str, str]) -> None:
        """Submit a command as a job that brings nothing along and reserves nothing.

        Args:
            submission_id: Its id, which no job has had.
            entrypoint: The command.
            metadata: What people and programs know it by.
        """
        request = {"entrypoint": entrypoint, "submission_id": submission_id, "metadata": metadata}
        self._json("POST", "/api/jobs/", json=request)

    def delete(self, submission_id: str) -> None:
        """Have the cluster forget a job that has ended."""
        self._json("DELETE", f"/api/jobs/{submission_id}")

    def stop(self, submission_id: str) -> None:
        """Tell a job to end; a job that has ended or is unknown is left as it is."""
        answer = self._request("POST", f"/api/jobs/{submission_id}/stop")
        if not _is_unknown(answer, submission_id):
            self._read(answer)

    @contextmanager
    def log(self, job: Job, lines: int, *, follow: bool) -> Iterator[Iterator[bytes]]:
        """Read the log of a job's driver as pieces of bytes.

        Args:
            job: The job; its driver must have started.
            lines: How many lines of its end; -1 for all.
            follow: Go on with what is written meanwhile, until the connection breaks.

        Raises:
            UnreachableError: It cannot be read, also in the middle.
        """
        path = f"/api/v0/logs/{'stream' if follow else 'file'}"
        parameters = {
            "node_id": job.driver_node_id,
            "filename": f"job-driver-{job.submission_id}.log",
            "lines": str(lines),
        }
        if follow:
            parameters["interval"] = str(_POLL_LOG_SECONDS)
        else:
            parameters["timeout"] = str(_WHOLE_LOG_SECONDS)
        timeout = httpx.Timeout(_SILENCE_SECONDS, connect=_CONNECT_SECONDS)
        try:
            with self._client.stream("GET", self.address + path, params=parameters, timeout=timeout) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise UnreachableError(f"the log cannot be read: {_what_it_says(answer)}")
                yield answer.iter_bytes()
        except httpx.HTTPError as error:
            raise UnreachableError(f"the log broke off: {_described(error)}") from error

    def left_of(self, job_id: str) -> list[str]:
        """Give what of a job is left in the cluster: its actors and placement groups."""
        filters = {"filter_keys": "job_id", "filter_predicates": "=", "filter_values": job_id}
        actors = self._listed("actors", filters)
        # The state of a placement group names its creator's job, which is the run's.
        groups = self._listed("placement_groups", {})
        return [
            *(
                f"actor {found['class_name']} ({found['state']})"
                for found in actors
                if found["state"] != "DEAD" and found["class_name"] not in _SHARED_ACTORS
            ),
            *(
                f"placement group ({found['state']})"
                for found in groups
                if found.get("creator_job_id") == job_id and found["state"] != "REMOVED"
            ),
        ]

    def _listed(self, what: str, filters: dict[str, str]) -> list[dict[str, Any]]:
        parameters = {"limit": str(_MAX_LEFT), "detail": "0", "timeout": "8", **filters}
        found = self._json("GET", f"/api/v0/{what}", params=parameters)
        listed: list[dict[str, Any]] = found["data"]["result"]["result"]
        return listed

    def _json(self, method: str, path: str, **arguments: Any) -> Any:
        return self._read(self._request(method, path, **arguments))

    def _request(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        try:
            answer = self._client.request(method, self.address + path, **arguments)
            if answer.status_code in (401, 403) and self._renew_token():
                answer = self._client.request(method, self.address + path, **arguments)
            return answer
        except httpx.HTTPError as error:
            if _is_untrusted(error):
                raise AttemptFailedError(
                    f"the certificate of {self.address} is not trusted ({_described(error)}); give the path of the "
                    "certificates that vouch for it as ca_bundle of the RayCluster",
                    outcome=Outcome.INVALID,
                ) from error
            raise UnreachableError(_described(error)) from error

    def _renew_token(self) -> bool:
        """Read the token again, which may be in a file that changes; tell whether it is another one."""
        token = token_of(self._cluster)
        if token == self._token:
            return False
        self._token = token
        self._client.headers.update(_authorization(token))
        return True

    def _read(self, answer: httpx.Response) -> Any:
        if answer.status_code in (401, 403):
            raise AttemptFailedError(
                f"the Ray cluster at {self.address} refused the token ({_what_it_says(answer)}); give its token as "
                "auth_token of the RayCluster",
                outcome=Outcome.INVALID,
            )
        if not answer.is_success:
            raise UnreachableError(_what_it_says(answer))
        try:
            return answer.json()
        except ValueError as error:
            raise UnreachableError(f"the answer is no JSON: {_what_it_says(answer)}") from error


def _authorization(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}", "X-Ray-Authorization": f"Bearer {token}"} if token else {}


def _is_unknown(answer: httpx.Response, submission_id: str) -> bool:
    """Tell whether it is Ray that does not know a job; a gateway has pages of its own."""
    return answer.status_code == 404 and answer.text.strip() == f"Job {submission_id} does not exist"


def _job(found: dict[str, Any]) -> Job:
    driver = found.get("driver_info") or {}
    return Job(
        submission_id=str(found.get("submission_id") or ""),
        status=str(found.get("status") or "PENDING"),
        message=str(found.get("message") or ""),
        error_type=str(found.get("error_type") or ""),
        metadata={str(name): str(value) for name, value in (found.get("metadata") or {}).items()},
        started_at=float(found.get("start_time") or 0) / 1000,
        driver_node_id=str(found.get("driver_node_id") or ""),
        job_id=str(driver.get("id") or found.get("job_id") or ""),
    )


def _tls(cluster: ClusterSettings) -> ssl.SSLContext | bool:
    if not cluster.verify_tls:
        return False
    path = ca_bundle_of(cluster)
    if not path:
        return True
    try:
        if os.path.isdir(path):
            return ssl.create_default_context(capath=path)
        return ssl.create_default_context(cafile=path)
    except OSError as error:
        raise AttemptFailedError(
            f"the certificates of the RayCluster, ca_bundle {path!r}, cannot be read: {error}; give a "
            "file in PEM format, or a folder of them, that this machine has",
            outcome=Outcome.INVALID,
        ) from error


def _is_untrusted(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY_FAILED" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _what_it_says(answer: httpx.Response) -> str:
    text = " ".join(answer.text.split())
    return f"HTTP {answer.status_code}: {text[-300:]}" if text else f"HTTP {answer.status_code}"
