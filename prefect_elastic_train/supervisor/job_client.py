"""Ray's client of its dashboards as the supervisor uses it, and what a job brings along.

That is this package, what the driver is told, and the user's code. All of it lies in the cluster's package store and
on its nodes, readable for whoever can use the cluster.
"""

from __future__ import annotations

import os
import pickle
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import ray
import requests
from pydantic import SecretStr
from ray.dashboard.modules.dashboard_sdk import SubmissionClient
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobSubmissionClient

from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.request import JOB_MODULE, DriverSpec
from prefect_elastic_train.core.settings import ClusterSettings
from prefect_elastic_train.core.version import VERSION_FILE, __version__

_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 10.0
#: The list holds all jobs that the cluster ever ran, and a submission may wait for the node of the head.
_JOBS_SECONDS = 60.0
#: A package goes in one piece; so long may Ray itself take to read a log, too.
_UPLOAD_SECONDS = _LOG_SECONDS = 600.0
_PIECE_BYTES = 64 * 1024
_NO_DASHBOARD = "what answers is no Ray dashboard; give its URL, port 8265 unless set otherwise"
#: Of each job that trains. Ray lets one that is stopped end by itself for so many seconds; the driver takes up to five.
#: And a person's prints are not to be guessed at; the run's log has a limit of its own.
_VARIABLES = {"RAY_JOB_STOP_WAIT_TIME_S": "8", "RAY_DEDUP_LOGS": "0"}

_PACKAGE = Path(__file__).parents[1]
#: The first code that runs in a job. What keeps the driver from running here is an ImportError.
_ENTRY = """\
import sys
from pathlib import Path

python = "%d.%d" % sys.version_info[:2]
if python != "{python}":
    raise ImportError(f"the cluster runs Python {{python}} and the flow Python {python}")
from prefect_elastic_train.driver.__main__ import main

main([str(Path(__file__).with_name("spec"))])
"""
#: What the flow's objects are pickled by.
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
#: An image may call its Python either way.
_EXECUTE = 'exec "$(command -v python || command -v python3)"'
_TRAIN = f"{_EXECUTE} -m {JOB_MODULE}"


class UnreachableError(Exception):
    """The dashboard does not answer, or not as it should: nothing is known of the jobs meanwhile."""


class UnknownJobError(UnreachableError):
    """Ray itself says that there is no such job; a gateway has pages of its own."""


class RefusedError(AttemptFailedError):
    """The cluster cannot be used like this; outcome ``invalid``."""


class JobClient(JobSubmissionClient):  # type: ignore[misc]
    """The dashboard of a cluster.

    Ray's own client, but: all requests have a bound in time and are authorised with the block's token; environment
    variables such as ``RAY_ADDRESS`` do not lead it to another cluster; nothing is asked before it is wanted. Every
    method raises :class:`UnreachableError` and :class:`RefusedError`.
    """

    def __init__(self, cluster: ClusterSettings) -> None:
        self._cluster = cluster
        self._client_ray_version = ray.__version__
        bundle = os.path.expanduser(cluster.ca_bundle) or os.environ.get("SSL_CERT_FILE", "")
        try:
            # Not the constructor between, which lets the environment choose the address and asks the dashboard.
            SubmissionClient.__init__(
                self, cluster.address, headers=_authorization(cluster), verify=cluster.verify_tls and (bundle or True)
            )
        except OSError as error:
            raise _refused(
                f"the certificates of the RayCluster, ca_bundle {bundle!r}, cannot be read: {error}"
            ) from error
        self.address = str(self._address)

    def check_version(self) -> None:
        """Refuse a cluster that runs another minor version of Ray than this machine, whose driver it cannot run."""
        with _reading():
            answer = self._do_request("GET", "/api/version")
            if answer.status_code != 200:
                self._raise_error(answer)
            there = str(answer.json()["ray_version"])
            here = ray.__version__
        if there.split(".")[:2] != here.split(".")[:2]:
            raise _refused(
                f"the cluster at {self.address} runs Ray {there} and the flow Ray {here}; use the same minor version"
            )

    def jobs(self) -> list[JobDetails]:
        """List the submitted jobs that the cluster remembers."""
        with _reading():
            return [job for job in self.list_jobs() if job.type == "SUBMISSION"]

    def job(self, submission_id: str) -> JobDetails | None:
        """Look a job up; None if the cluster does not know it."""
        with _reading(), suppress(UnknownJobError):
            return self.get_job_info(submission_id)
        return None

    def submit(
        self, submission_id: str, metadata: dict[str, str], package: Path | None = None, command: str = _TRAIN
    ) -> None:
        """Submit a job by an id that no job has had, with the metadata that it is found by.

        With a package of modules it is a driver, with the block's environment and resources; else it runs the command.

        Raises:
            UnreachableError: Nobody knows whether the cluster has it.
            RefusedError: It was refused, or cannot be sent as it is.
        """
        environment: dict[str, Any] = {}
        resources: dict[str, float] = {}
        try:
            if package is not None:
                environment = dict(self._cluster.runtime_env)
                resources = dict(self._cluster.driver_resources)
                if self._cluster.working_dir:
                    environment["working_dir"] = os.path.expanduser(self._cluster.working_dir)
                environment["env_vars"] = {**_VARIABLES, **(environment.get("env_vars") or {})}
                uri = self._upload_package_if_needed(str(package), include_gitignore=False, is_file=True)
                environment["py_modules"] = [*(environment.get("py_modules") or []), uri]
            self.submit_job(
                entrypoint=command,
                submission_id=submission_id,
                runtime_env=environment,
                metadata=dict(metadata),
                entrypoint_num_cpus=resources.pop("CPU", None),
                entrypoint_num_gpus=resources.pop("GPU", None),
                entrypoint_memory=int(resources.pop("memory", 0)) or None,
                entrypoint_resources=resources or None,
            )
        except (AttemptFailedError, UnreachableError):
            raise
        except requests.RequestException as error:  # an answer that Ray's client cannot read
            raise UnreachableError(f"{type(error).__name__}: {error}") from None
        except Exception as error:
            raise _refused(f"Ray does not accept the job: {type(error).__name__}: {error}") from error

    def stop(self, submission_id: str) -> None:
        """Have a job ended; a job that has ended or is unknown is left as it is."""
        with _reading(), suppress(UnknownJobError):
            self.stop_job(submission_id)

    def end_pending(self, submission_id: str) -> None:
        """End a job that waits for its start by another one, since Ray's own stop waits for that start, too."""
        # What it waits for is an actor with this name, in the Ray of our bounds.
        code = (
            "import ray; ray.init(log_to_driver=False); "
            f"ray.kill(ray.get_actor({f'_ray_internal_job_actor_{submission_id}'!r}, "
            "namespace='SUPERVISOR_ACTOR_RAY_NAMESPACE'))"
        )
        self.submit(f"{submission_id}-end", {}, command=f"{_EXECUTE} -c {shlex.quote(code)}")

    def log(self, job: JobDetails, lines: int) -> Iterator[bytes]:
        """Read so many lines of the end of the log of a job's driver, -1 for all, in pieces; it may break off."""
        parameters = {
            "node_id": job.driver_node_id,
            "filename": f"job-driver-{job.submission_id}.log",
            "lines": str(lines),
            "timeout": str(int(_LOG_SECONDS)),
        }
        with closing(self._do_request("GET", "/api/v0/logs/file", params=parameters, stream=True)) as answer:
            if answer.status_code != 200:
                self._raise_error(answer)
            try:
                yield from answer.iter_content(_PIECE_BYTES)
            except requests.RequestException as error:
                raise UnreachableError(f"the log broke off: {type(error).__name__}: {error}") from None

    def _do_request(self, method: str, endpoint: str, **more: Any) -> requests.Response:
        """Ask, with a bound; all of Ray's client goes this way."""
        self._headers = _authorization(self._cluster)  # it may be in a file that changes
        if method == "PUT":
            timeout = (_UPLOAD_SECONDS, _UPLOAD_SECONDS)  # sending counts to the former
        else:
            timeout = (_CONNECT_SECONDS, _JOBS_SECONDS if endpoint == "/api/jobs/" else _ANSWER_SECONDS)
        # Without an `auth` of ours a .netrc would take the place of the token.
        more |= {"timeout": timeout, "allow_redirects": False, "auth": lambda request: request}
        try:
            answer: requests.Response = super()._do_request(method, endpoint, **more)
            return answer
        except AuthenticationError as error:
            raise _refused(
                f"the Ray cluster at {self.address} refused the token ({str(error).splitlines()[0]}); give its token "
                "as auth_token of the RayCluster"
            ) from error
        except requests.RequestException as error:
            reason = getattr(error.args[0] if error.args else error, "reason", error)
            problem = f"{type(reason).__name__}: {reason}"
        raise UnreachableError(problem)  # not from what holds the request, and with it the token

    def _raise_error(self, answer: requests.Response) -> None:
        said = f"HTTP {answer.status_code}: {' '.join(answer.text.split())[-300:]}"
        if answer.status_code == 400:
            raise _refused(f"Ray does not accept the job: {said}")
        if answer.status_code != 404:
            raise UnreachableError(said)
        if re.fullmatch(r"Job \S+ does not exist", answer.text.strip()):
            raise UnknownJobError(said)
        raise UnreachableError(f"{_NO_DASHBOARD}: {said}")


def _refused(message: str) -> RefusedError:
    return RefusedError(message, outcome=Outcome.INVALID)


def _authorization(cluster: ClusterSettings) -> dict[str, Any]:
    """Return the headers with the token for a cluster: the block's, or what Ray itself would take."""
    token = cluster.auth_token.get_secret_value() or os.environ.get("RAY_AUTH_TOKEN", "")
    if not token:
        with suppress(OSError):
            path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
            token = path.read_text(errors="replace")
    token = token.strip()
    if not re.fullmatch("[!-~]*", token):
        raise _refused(
            "the cluster's token holds characters that no token has, such as spaces or line ends; copy it anew"
        )
    # With none, the header that is not sent keeps Ray from looking for a token by itself.
    value = f"Bearer {token}" if token else None
    return {"Authorization": value, "X-Ray-Authorization": value}


@contextmanager
def _reading() -> Iterator[None]:
    """Take an answer that cannot be read for none: a gateway has pages of its own."""
    try:
        yield
    except (ValueError, TypeError, KeyError) as error:
        raise UnreachableError(f"{_NO_DASHBOARD}: {type(error).__name__}: {error}") from None


@contextmanager
def job_package(spec: DriverSpec, folder: Path) -> Iterator[Path]:
    """An archive of this package and of the one that a job starts, with the spec; it lies in a private folder."""
    # The driver is inside by then, and this machine's folders are not where it runs.
    cluster = spec.cluster.model_copy(update={"auth_token": SecretStr("")})
    spec = replace(spec, cluster=cluster, sys_path=[])
    file = folder / "job.zip"
    try:
        with ZipFile(file, "w", ZIP_DEFLATED) as archive:
            for path in sorted(_PACKAGE.rglob("*")):
                if path.is_file() and path.suffix != ".pyc":
                    archive.write(path, Path(_PACKAGE.name) / path.relative_to(_PACKAGE))
            archive.writestr(f"{_PACKAGE.name}/{VERSION_FILE}", f"{__version__}\n")
            archive.writestr(f"{JOB_MODULE}/__main__.py", _ENTRY.format(python=PYTHON))
            archive.writestr(f"{JOB_MODULE}/__init__.py", "")
            archive.writestr(f"{JOB_MODULE}/spec", pickle.dumps(spec))
        yield file
    finally:
        file.unlink(missing_ok=True)
