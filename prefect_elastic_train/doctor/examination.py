"""The checks of `elastic-train doctor`, in their order, with their time limits."""

import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version

import httpx
from prefect.client.base import ServerType, determine_server_type
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from prefect_elastic_train.blocks.lookup import ALL_BLOCK_TYPES, chosen_blocks, saved_name
from prefect_elastic_train.core.operator_settings import ElasticTrainSettings
from prefect_elastic_train.core.outcomes import ElasticTrainError, Outcome
from prefect_elastic_train.core.records import Owner
from prefect_elastic_train.core.request import DriverSpec, RunRequest
from prefect_elastic_train.core.settings import without_credentials
from prefect_elastic_train.core.threads import start_thread
from prefect_elastic_train.core.version import untested_ray
from prefect_elastic_train.driver.ray_contract import check_ray
from prefect_elastic_train.orchestration.arguments import driver_spec
from prefect_elastic_train.runs.fingerprints import fingerprint
from prefect_elastic_train.storage.preflight import preflight
from prefect_elastic_train.supervisor.follower import Follower
from prefect_elastic_train.supervisor.training_processes import TrainingProcesses


@dataclass(frozen=True)
class Finding:
    """A result of a check of ``elastic-train doctor``.

    Attributes:
        level: "ok"; "warn": trainings run, but something is wrong; "fail": trainings cannot run.
        message: The fact that was found.
        remedy: The action of the user that solves the problem; empty if there is none.
        check: Name of the check.
    """

    level: str
    message: str
    remedy: str = ""
    check: str = ""


ok = partial(Finding, "ok")
warn = partial(Finding, "warn")
fail = partial(Finding, "fail")

#: Time limit of each check. It suffices to start a local cluster, and to detect an unreachable storage.
_SECONDS = 45.0
_API_TIMEOUT_SECONDS = 3.0
#: Part of the time limit that is left to stop the driver, and to a driver to report that no cluster answers.
_STOP_SECONDS = 4.0


def examine(storage: str, cluster: str, profile: str) -> Iterator[Finding]:
    """Run the checks of ``elastic-train doctor``, and yield their findings.

    If the server fails, the other checks are left out; if the blocks fail, those of the storage and the cluster.

    Args:
        storage: A directory, a URL or a saved block; empty: the block of the profile, or the default one.
        cluster: A saved ``RayCluster``; empty: that of the profile, or the default one.
        profile: A name under which blocks are saved; empty: none.
    """
    specs: list[DriverSpec] = []  # spec of a training with these blocks; empty if they cannot be loaded

    def check_blocks() -> Iterator[Finding]:
        yield from check_block_types()
        blocks = chosen_blocks({"storage": storage, "cluster": cluster}, profile)
        request = RunRequest("doctor", Owner(flow_run_id="doctor"), fingerprint("doctor:none", "none", None))
        specs.append(driver_spec(request, blocks))
        yield ok(f"a training uses {', '.join(saved_name(block) or type(block).__name__ for block in blocks)}")

    yield from run_check("versions", check_versions)
    server = run_check("server", check_server)
    yield from server
    if any(finding.level == "fail" for finding in server):
        return
    yield from run_check("blocks", check_blocks)
    for spec in specs:
        yield from run_check("storage", partial(check_storage, spec))
        yield from run_check("cluster", partial(check_cluster, spec))


def run_check(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Run a check in a thread, and return its findings, without the passwords of URLs.

    After the time limit the thread is abandoned, and a finding reports that there was no answer.
    """
    findings: list[Finding] = []

    def run() -> None:
        try:
            findings.extend(check())
        except Exception as error:  # noqa: BLE001 - any exception is a finding
            kind = "" if isinstance(error, ElasticTrainError) else f"{type(error).__name__}: "
            findings.append(fail(f"{kind}{error}"))

    thread = start_thread(run)
    thread.join(_SECONDS)
    if thread.is_alive():
        findings.append(
            fail(f"no answer within {_SECONDS:g} s", "try it by hand, for example with `ls` or `ray status`")
        )
    return [
        replace(finding, check=name, message=without_credentials(" ".join(finding.message.split())))
        for finding in findings
    ]


def check_versions() -> Iterator[Finding]:
    """Yield a finding with the versions of Python, this package, Ray and Prefect."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("prefect-elastic-train", "ray", "prefect"))
    yield ok(f"Python {platform.python_version()}, {packages}")
    if untested := untested_ray():
        check_ray()
        yield warn(untested, "compare docs/compatibility.md")


def check_server() -> Iterator[Finding]:
    """Check that the Prefect server answers, has a compatible version and accepts the credentials."""
    if determine_server_type() is ServerType.EPHEMERAL:
        yield ok("PREFECT_API_URL is not set: each process has a temporary server, without a UI or saved blocks")
        return
    with _prefect_client() as client:
        url = str(client.api_url).rstrip("/")
        try:
            client.raise_for_api_version_mismatch()
            client.read_flows(limit=1)  # checks the credentials, which the version needs not
        except (httpx.HTTPError, RuntimeError, ValueError, TypeError) as error:  # ValueError: an answer with no version
            reason = error.__cause__ or error
            yield fail(
                f"no compatible Prefect server that accepts the credentials answers at {url} "
                f"({type(reason).__name__}: {reason})",
                "HTTP 401 or 403: set PREFECT_API_AUTH_STRING to the server's own PREFECT_SERVER_API_AUTH_STRING; on "
                "Prefect Cloud, or for a gateway, PREFECT_API_KEY or PREFECT_CLIENT_CUSTOM_HEADERS. Otherwise start "
                "a server with `prefect server start`, or correct PREFECT_API_URL, which ends with /api: `prefect "
                "config set PREFECT_API_URL=http://127.0.0.1:4200/api`",
            )
            return
        yield ok(f"the server at {url} accepts the credentials; the client is Prefect {client.client_version()}")


def check_storage(spec: DriverSpec) -> Iterator[Finding]:
    """Check that the storage of the spec can be used for training."""
    preflight(spec.storage)
    yield ok(f"{spec.storage.uri} can be written, read, created in exclusively and deleted from")


def check_cluster(spec: DriverSpec) -> Iterator[Finding]:
    """Check that the Ray cluster of the spec can be used for training.

    If the cluster takes jobs, query its dashboard. Otherwise join it as a training does; a local cluster is started.
    """
    if spec.cluster.kuberay:
        yield ok("a training makes its own cluster on Kubernetes, which was not tried")
        return
    if not spec.cluster.is_submitted:
        yield _join(spec)
        return
    from prefect_elastic_train.supervisor.job_client import JobClient, UnreachableError  # imports Ray's client

    client = JobClient(spec.cluster)
    try:
        client.submitted_jobs()
        client.check_version()
    except UnreachableError as error:
        remedy = "correct the address of the RayCluster, or check that the head of the cluster runs"
        yield fail(f"no Ray dashboard answers at {client.get_address()} ({error})", remedy)
    else:
        yield ok(f"the dashboard at {client.get_address()} answers, accepts the token, and has this Ray version")


@dataclass
class _Deadline(Follower):
    """Ignores the output and the events of a driver, and stops it at a time of the monotonic clock."""

    _ends_at: float

    def check_stop(self) -> None:
        if time.monotonic() > self._ends_at:
            raise TimeoutError("the cluster was not joined in time: check that memory, CPUs and space in /tmp are free")


def _join(spec: DriverSpec) -> Finding:
    """Start a driver that joins the cluster of the spec and trains nothing, and return the finding.

    All processes that were started are stopped.
    """
    # The runtime environment and the working directory are for the loop only.
    timeout = min(spec.cluster.connect_timeout_seconds, _SECONDS - 2 * _STOP_SECONDS)
    changes = {"runtime_env": {}, "working_dir": "", "connect_timeout_seconds": timeout}
    deadline = _Deadline(time.monotonic() + _SECONDS - _STOP_SECONDS)
    runtime = TrainingProcesses(ElasticTrainSettings.model_construct(stop_grace_seconds=0.5), deadline)
    runtime.driver_command = (sys.executable, "-m", "prefect_elastic_train.doctor.probe")
    try:
        ended = runtime.run_attempt(replace(spec, cluster=spec.cluster.model_copy(update=changes)))
    finally:
        runtime.close()
    return ok(ended.message) if ended.outcome is Outcome.COMPLETED else fail(ended.message)


def check_block_types() -> Iterator[Finding]:
    """Check that Prefect's server has the block types of this version of the package, unless it is temporary."""
    if determine_server_type() is ServerType.EPHEMERAL:
        return
    outdated = []
    with _prefect_client() as client:
        for block_type in ALL_BLOCK_TYPES:
            try:
                client.read_block_schema_by_checksum(
                    block_type._calculate_schema_checksum(), version=block_type.get_block_schema_version()
                )
            except ObjectNotFound:
                outdated.append(block_type.get_block_type_slug())
    if outdated:
        message = f"block types that are not registered, or in another version: {', '.join(outdated)}"
        yield warn(message, "`prefect block register -m prefect_elastic_train`")


@contextmanager
def _prefect_client() -> Iterator[SyncPrefectClient]:
    """Yield a client of the Prefect API with a short timeout that retries a request once."""
    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 1}),
        get_client(httpx_settings={"timeout": _API_TIMEOUT_SECONDS}, sync_client=True) as client,
    ):
        yield client
