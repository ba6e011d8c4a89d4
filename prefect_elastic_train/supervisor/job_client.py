"""The client for a Ray dashboard, and the package of modules that a driver needs in the cluster.

A job's package contains this Python package, the driver's spec, and the user's code. It is stored in the cluster's
package store and on its nodes, where all users of the cluster can read it.
"""

import os
import pickle
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import ray
import requests
from pydantic import SecretStr
from ray.dashboard.modules.dashboard_sdk import SubmissionClient
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from prefect_elastic_train.core.outcomes import AttemptFailedError
from prefect_elastic_train.core.request import JOB_MODULE, DriverSpec
from prefect_elastic_train.core.settings import ClusterSettings
from prefect_elastic_train.core.time_limits import STOP_GRACE_SECONDS
from prefect_elastic_train.core.version import VERSION_FILE, __version__

_DASHBOARD_SECONDS = 10.0
#: For listing and submitting: the list has all jobs that the cluster ever ran, and a submission may wait for the head.
_JOBS_SECONDS = 60.0
#: For uploading a package, which is one request, and for Ray to read a log.
_TRANSFER_SECONDS = 600.0
_CHUNK_BYTES = 64 * 1024
_NO_DASHBOARD = "what answers is no Ray dashboard; give its URL, port 8265 unless set otherwise"
#: Environment of a driver: the time from Ray's SIGTERM to SIGKILL, and no deduplication of lines that users print.
_VARIABLES = {"RAY_JOB_STOP_WAIT_TIME_S": f"{STOP_GRACE_SECONDS:g}", "RAY_DEDUP_LOGS": "0"}

_PACKAGE = Path(__file__).parents[1]
#: The program of a job. An ImportError shows that the driver cannot run in the cluster.
_ENTRY = """\
import sys
from pathlib import Path

python = "%d.%d" % sys.version_info[:2]
if python != "{python}":
    raise ImportError(f"the cluster runs Python {{python}} and the flow Python {python}")
from prefect_elastic_train.driver.__main__ import main

main([str(Path(__file__).with_name("spec"))])
"""
#: The version that the user's objects are pickled with.
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
#: Images name their Python one way or the other.
_EXECUTE = 'exec "$(command -v python || command -v python3)"'


class UnreachableError(Exception):
    """The dashboard does not answer, or not as a dashboard does. The state of the jobs is unknown."""


class UnknownJobError(UnreachableError):
    """Ray answers that the job does not exist. A gateway's error page is an :class:`UnreachableError`."""


class RefusedError(AttemptFailedError):
    """The cluster refuses the request; outcome ``invalid``."""


class JobClient(JobSubmissionClient):  # type: ignore[misc]
    """The client of a cluster's dashboard.

    It extends Ray's own client: all requests have a timeout and are authorized with the block's token; environment
    variables such as ``RAY_ADDRESS`` do not select another cluster; the constructor sends no request. Every method
    raises :class:`UnreachableError` and :class:`RefusedError`.
    """

    def __init__(self, cluster: ClusterSettings) -> None:
        self._cluster = cluster
        bundle = os.path.expanduser(cluster.ca_bundle) or os.environ.get("SSL_CERT_FILE", "")
        # Skips JobSubmissionClient's constructor, which reads the address from the environment and sends a request.
        # Each request sets its headers; those given here keep Ray from looking for a token.
        try:
            SubmissionClient.__init__(
                self, cluster.address, headers={"Authorization": ""}, verify=cluster.verify_tls and (bundle or True)
            )
        except OSError as error:
            raise RefusedError(
                f"the certificates of the RayCluster, ca_bundle {bundle!r}, cannot be read ({error}); give the path of "
                "a PEM file on this machine"
            ) from error

    def check_version(self) -> None:
        """Check that the cluster runs the same minor version of Ray as this process.

        Raises:
            RefusedError: It runs another one, with which the driver cannot work.
        """
        with _unexpected_answers():
            answer = self._do_request("GET", "/api/version")
            if answer.status_code != 200:
                self._raise_error(answer)
            version = str(answer.json()["ray_version"])
        if version.split(".")[:2] != ray.__version__.split(".")[:2]:
            raise RefusedError(
                f"the cluster at {self.get_address()} runs Ray {version} and the flow Ray {ray.__version__}; use the "
                "same minor version"
            )

    def submitted_jobs(self) -> list[JobDetails]:
        """Return the submitted Ray jobs that the cluster remembers, those that have ended included."""
        with _unexpected_answers():
            return [job for job in self.list_jobs() if job.type == "SUBMISSION"]

    def find_job(self, submission_id: str) -> JobDetails:
        """Return the details of a Ray job by its submission id.

        Raises:
            UnknownJobError: The cluster does not know the job.
        """
        with _unexpected_answers():
            return self.get_job_info(submission_id)

    def submit(self, submission_id: str, metadata: dict[str, str], package: Path) -> None:
        """Submit a driver as a Ray job under a new submission id, with metadata by which the job can be found again.

        Args:
            submission_id: The new id.
            metadata: Texts that the cluster keeps with the job.
            package: Archive with the modules of the driver.

        Raises:
            UnreachableError: It is unknown if the cluster has the job.
            RefusedError: The cluster refused the job, or it cannot be sent.
        """
        environment = self._cluster.full_runtime_env
        resources = dict(self._cluster.driver_resources)
        environment["env_vars"] = _VARIABLES | (environment.get("env_vars") or {})
        try:
            uri = self._upload_package_if_needed(str(package), include_gitignore=False, is_file=True)
            environment["py_modules"] = [*(environment.get("py_modules") or []), uri]
            self.submit_job(
                entrypoint=f"{_EXECUTE} -m {JOB_MODULE}",
                submission_id=submission_id,
                runtime_env=environment,
                metadata=metadata,
                entrypoint_num_cpus=resources.pop("CPU", None),
                entrypoint_num_gpus=resources.pop("GPU", None),
                entrypoint_memory=int(resources.pop("memory", 0)),
                entrypoint_resources=resources,
            )
        except (AttemptFailedError, UnreachableError):
            raise
        except requests.RequestException as error:  # Ray's client cannot read the answer
            raise UnreachableError(f"{type(error).__name__}: {error}") from None
        except Exception as error:
            raise RefusedError(f"Ray does not accept the job: {type(error).__name__}: {error}") from error

    def stop(self, submission_id: str) -> JobStatus:
        """Request that the cluster stops a Ray job, unless it has ended, and return its status.

        Raises:
            UnknownJobError: The cluster does not know the job.
        """
        with _unexpected_answers():
            self.stop_job(submission_id)
            return self.get_job_status(submission_id)

    def read_log(self, job: JobDetails, lines: int) -> Iterator[bytes]:
        """Yield in chunks the last lines of the log of a Ray job's driver; all lines for -1.

        Raises:
            UnreachableError: The log cannot be read, or breaks off.
        """
        parameters = {
            "node_id": job.driver_node_id,
            "filename": f"job-driver-{job.submission_id}.log",
            "lines": str(lines),
            "timeout": str(int(_TRANSFER_SECONDS)),
        }
        with self._do_request("GET", "/api/v0/logs/file", params=parameters, stream=True) as answer:
            if answer.status_code != 200:
                self._raise_error(answer)
            try:
                yield from answer.iter_content(_CHUNK_BYTES)
            except requests.RequestException as error:
                raise UnreachableError(f"the log broke off: {type(error).__name__}: {error}") from None

    def _do_request(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        """Send an HTTP request to the dashboard, with a timeout and the token. All methods of Ray's client use this."""
        timeout = (_DASHBOARD_SECONDS, _JOBS_SECONDS if endpoint == "/api/jobs/" else _DASHBOARD_SECONDS)
        if method == "PUT":
            timeout = (_TRANSFER_SECONDS, _TRANSFER_SECONDS)  # the first one includes sending
        # Without an `auth`, requests would use a .netrc in place of the token.
        options |= {"timeout": timeout, "allow_redirects": False, "auth": lambda request: request}
        try:
            self._headers = _authorization(self._cluster)  # the token may be in a file that changes
            answer: requests.Response = super()._do_request(method, endpoint, **options)
            return answer
        except AuthenticationError as error:
            raise RefusedError(
                f"the Ray cluster at {self.get_address()} refused the token ({str(error).splitlines()[0]}); give its "
                "token as auth_token of the RayCluster"
            ) from error
        except requests.RequestException as error:
            reason = getattr(error.args[0] if error.args else error, "reason", error)
            problem = f"{type(reason).__name__}: {reason}"
        raise UnreachableError(problem)  # without its cause, which has the request and with it the token

    def _raise_error(self, answer: requests.Response) -> None:
        problem = f"HTTP {answer.status_code}: {' '.join(answer.text.split())[-300:]}"
        if answer.status_code == 400:
            raise RefusedError(f"Ray does not accept the job: {problem}")
        if re.fullmatch(r"Job \S+ does not exist", answer.text.strip()):
            raise UnknownJobError(problem)
        raise UnreachableError(f"{_NO_DASHBOARD}: {problem}" if answer.status_code == 404 else problem)


def _authorization(cluster: ClusterSettings) -> dict[str, Any]:
    """Return the HTTP headers with the token of a cluster; without a token, their values are None.

    The token is that of the block, or else that of Ray's own settings.
    """
    token = cluster.auth_token.get_secret_value() or os.environ.get("RAY_AUTH_TOKEN", "")
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    with suppress(OSError):
        token = (token or path.read_text(errors="replace")).strip()
    if not re.fullmatch("[!-~]*", token):
        raise RefusedError(
            "the cluster's token holds characters that no token has, such as spaces or line ends; copy it again"
        )
    # None is not sent, and keeps Ray from adding a token by itself.
    value = f"Bearer {token}" if token else None
    return {"Authorization": value, "X-Ray-Authorization": value}


@contextmanager
def _unexpected_answers() -> Iterator[None]:
    """Raise UnreachableError for an answer in the ``with`` that is not a dashboard's, such as a gateway's own page."""
    try:
        yield
    except (ValueError, TypeError, KeyError) as error:
        raise UnreachableError(f"{_NO_DASHBOARD}: {type(error).__name__}: {error}") from None


@contextmanager
def job_package(spec: DriverSpec, folder: Path) -> Iterator[Path]:
    """Make the archive for a Ray job: this package, the program of the job, and the spec. Delete it after the ``with``.

    The spec in the archive has neither the dashboard's token, which the driver does not need, nor this machine's import
    path.

    Args:
        spec: The input of the driver.
        folder: Private folder in which the archive is made.
    """
    cluster = spec.cluster.model_copy(update={"auth_token": SecretStr("")})
    spec = replace(spec, cluster=cluster, sys_path=[])
    file = folder / "job.zip"
    try:
        with ZipFile(file, "w", ZIP_DEFLATED) as archive:
            for path in sorted(_PACKAGE.rglob("*.py")):
                archive.write(path, path.relative_to(_PACKAGE.parent))
            archive.writestr(f"{_PACKAGE.name}/{VERSION_FILE}", f"{__version__}\n")
            archive.writestr(f"{JOB_MODULE}/__main__.py", _ENTRY.format(python=PYTHON))
            archive.writestr(f"{JOB_MODULE}/__init__.py", "")
            archive.writestr(f"{JOB_MODULE}/spec", pickle.dumps(spec))
        yield file
    finally:
        file.unlink(missing_ok=True)
