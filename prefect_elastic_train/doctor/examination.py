"""What `elastic-train doctor` looks at, in which order, and for how long."""

from __future__ import annotations

import contextvars
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import chain

import httpx
from prefect.client.base import ServerType, determine_server_type
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import BlockDocument
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from prefect_elastic_train.blocks.lookup import BLOCK_TYPES, chosen_blocks, saved_name
from prefect_elastic_train.core.events import ClusterConnected, Event
from prefect_elastic_train.core.operator_settings import ElasticTrainSettings
from prefect_elastic_train.core.outcomes import ConfigurationError, ElasticTrainError
from prefect_elastic_train.core.records import Owner
from prefect_elastic_train.core.request import DriverSpec, RunRequest
from prefect_elastic_train.core.settings import without_credentials
from prefect_elastic_train.orchestration.arguments import driver_spec
from prefect_elastic_train.runs.identity import fingerprint
from prefect_elastic_train.storage.preflight import preflight
from prefect_elastic_train.supervisor.runtime import Runtime


@dataclass(frozen=True)
class Finding:
    """One thing that a check has found: how good or bad it is, what it is, and what to do about it."""

    level: str
    message: str
    remedy: str = ""
    check: str = ""


#: As it should be; trainings run, but something is wrong; could not be looked at; trainings cannot run like this.
ok, warn, skip, fail = (partial(Finding, level) for level in ("ok", "warn", "skip", "fail"))

_QUICK_SECONDS = 10.0
#: For each of blocks, storage and cluster: a local cluster starts meanwhile, a storage that is away is noticed.
_SECONDS = 45.0
_ANSWER_SECONDS = 3.0
#: Documents that the Prefect server gives at once.
_PAGE = 200
#: What is kept of a check's time for ending what it has started, and for a driver that does not answer to say so.
_LEAVE_SECONDS = 4.0


def examine(storage: str = "", cluster: str = "", profile: str = "") -> Iterator[Finding]:
    """Run all checks, each for a bounded time; skip what needs what is not found.

    The storage is a directory, a URL or a saved block, the cluster a saved ``RayCluster``, the profile a name that
    blocks of several types are saved under. What is not named is as in :func:`chosen_block`: what the settings name,
    else what trainings use without one, a directory in the home folder and a local cluster.
    """
    specs: list[DriverSpec] = []

    def check_blocks() -> Iterator[Finding]:
        yield from check_block_types()
        blocks = chosen_blocks({"storage": storage, "cluster": cluster}, profile)
        request = RunRequest("doctor", Owner(flow_run_id="doctor"), fingerprint("doctor:none", "none", None))
        specs.append(driver_spec(request, blocks))
        yield ok(f"a training takes {', '.join(saved_name(one) or type(one).__name__ for one in blocks.values())}")

    def check_storage() -> Iterator[Finding]:
        with preflight(specs[0].storage):
            yield ok(f"{specs[0].storage.uri} can be written, read, created in exclusively and deleted from")

    yield from run_check("versions", check_versions, _QUICK_SECONDS)
    server = run_check("server", check_server, _QUICK_SECONDS)
    yield from server
    if all(one.level != "fail" for one in server):
        yield from run_check("blocks", check_blocks, _SECONDS)
    else:
        yield skip("cannot be looked at without the server", check="blocks")
    if specs:
        yield from run_check("storage", check_storage, _SECONDS)
        yield from run_check("cluster", lambda: check_cluster(specs[0]), _SECONDS)
    else:
        for name in ("storage", "cluster"):
            yield skip("which one to try is not known without the blocks", check=name)


def run_check(name: str, look: Callable[[], Iterable[Finding]], seconds: float) -> list[Finding]:
    """Run a check in a thread, which is left to itself when its time is up; return what it has found, no password."""
    found: list[Finding] = []

    def run() -> None:
        try:
            for one in look():
                found.append(one)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong in a check is a finding
            words = str(error) if isinstance(error, ElasticTrainError) else f"{type(error).__name__}: {error}"
            found.append(fail(words))

    # Prefect's settings live in context variables.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name=f"doctor-{name}", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        found.append(fail(f"no answer within {seconds:g} s", "try it alone, such as with `ls` or `ray status`"))
    return [replace(one, check=name, message=_clean(one.message), remedy=_clean(one.remedy)) for one in [*found]]


def check_versions() -> Iterator[Finding]:
    """Report the versions of Python, this package, Ray and Prefect."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("prefect-elastic-train", "ray", "prefect"))
    yield ok(f"Python {platform.python_version()}, {packages}")


def check_server() -> Iterator[Finding]:
    """Ask the Prefect server for its version, with the credentials that trainings would use."""
    if determine_server_type() is ServerType.EPHEMERAL:
        yield ok("PREFECT_API_URL is not set: Prefect starts a temporary server for each process, without a UI")
        return
    with _asking_prefect() as client:
        url = str(client.api_url).rstrip("/")
        try:
            client.raise_for_api_version_mismatch()
            client.read_flows(limit=1)  # the version is told to everybody
        except (httpx.HTTPError, RuntimeError, ValueError, TypeError) as error:  # ValueError: an answer with no version
            reason = error.__cause__ or error
            yield fail(
                f"no Prefect server that can be used, and accepts the credentials, answers at {url} "
                f"({type(reason).__name__}: {reason})",
                "HTTP 401 or 403: set PREFECT_API_AUTH_STRING to the server's own PREFECT_SERVER_API_AUTH_STRING; on "
                "Prefect Cloud, or for a gateway, PREFECT_API_KEY or PREFECT_CLIENT_CUSTOM_HEADERS. Else start "
                "one with `prefect server start`, or correct PREFECT_API_URL, which ends with /api: `prefect "
                "config set PREFECT_API_URL=http://127.0.0.1:4200/api`",
            )
            return
        yield ok(f"the server at {url} accepts the credentials; the client is Prefect {client.client_version()}")


def check_cluster(spec: DriverSpec) -> Iterator[Finding]:
    """Join a cluster as a training would, a local one after starting it; of one that takes jobs ask the dashboard."""
    if not spec.cluster.is_submitted:
        yield _joined(spec, _SECONDS - _LEAVE_SECONDS)
        return
    from prefect_elastic_train.supervisor.job_client import JobClient, UnreachableError  # it loads Ray's client

    api = JobClient(spec.cluster)
    try:
        api.jobs()
        api.check_version()
    except UnreachableError as error:
        remedy = "correct the address of the RayCluster, or see whether the head of the cluster is up"
        yield fail(f"no Ray dashboard answers at {api.address} ({error})", remedy)
    else:
        yield ok(f"the dashboard at {api.address} answers, accepts the token, and has this Ray version")


def _joined(spec: DriverSpec, seconds: float) -> Finding:
    """Have a driver join the cluster, and end what was started."""
    deadline = time.monotonic() + seconds
    events: list[Event] = []

    def check_time() -> None:
        if time.monotonic() > deadline:
            raise TimeoutError("the cluster was not joined in time: see that memory, CPUs and room in /tmp are left")

    # What is sent along is for the loop.
    patience = min(spec.cluster.connect_timeout_seconds, max(1.0, seconds - _LEAVE_SECONDS))
    bare = {"runtime_env": {}, "working_dir": "", "connect_timeout_seconds": patience}
    settings = ElasticTrainSettings.model_construct(stop_grace_seconds=0.5)
    runtime = Runtime(settings, events.append, lambda source, line: None, check_time)
    runtime.driver_command = (sys.executable, "-m", "prefect_elastic_train.doctor.probe")
    try:
        ended = runtime.run_attempt(replace(spec, cluster=spec.cluster.model_copy(update=bare)))
    finally:
        runtime.close()
    for event in events:
        if isinstance(event, ClusterConnected):
            there = [f"{event.resources[name]:g} {name}" for name in ("CPU", "GPU", "TPU") if name in event.resources]
            return ok(f"joined the cluster at {event.address}: {', '.join(there)}")
    return fail(ended.message)


def check_block_types() -> Iterator[Finding]:
    """Look at the registered block types, and load every document of them."""
    if determine_server_type() is ServerType.EPHEMERAL:
        yield skip("saved blocks are looked at on a server that stays: set PREFECT_API_URL")
        return
    old, loaded = [], 0
    with _asking_prefect() as client:
        for kind in chain.from_iterable(BLOCK_TYPES.values()):
            slug, checksum = kind.get_block_type_slug(), kind._calculate_schema_checksum()
            documents: list[BlockDocument] = []
            try:
                client.read_block_type_by_slug(slug)
                documents = client.read_block_documents_by_type(slug, limit=_PAGE, include_secrets=True)
                client.read_block_schema_by_checksum(checksum, version=kind.get_block_schema_version())
            except ObjectNotFound:
                old.append(slug)
            for document in documents:
                try:
                    kind._load_from_block_document(document)
                    loaded += 1
                except ConfigurationError as error:
                    yield fail(str(error), "correct the value in the UI, or save the block again from code")
                except Exception as error:  # noqa: BLE001 - a document may hold anything, perhaps a secret
                    yield fail(f"block {slug}/{document.name} cannot be loaded: {type(error).__name__}")
    if old:
        told = f"block types not registered, or of another version: {', '.join(old)}"
        yield warn(told, "`prefect block register -m prefect_elastic_train`")
    yield ok(f"{loaded} saved blocks load")


@contextmanager
def _asking_prefect() -> Iterator[SyncPrefectClient]:
    """A client that repeats once what fails: whoever asks a doctor waits."""
    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 1}),
        get_client(httpx_settings={"timeout": _ANSWER_SECONDS}, sync_client=True) as client,
    ):
        yield client


def _clean(text: str) -> str:
    """Leave out line ends, and passwords that stand in a URL."""
    return without_credentials(" ".join(text.split()))
