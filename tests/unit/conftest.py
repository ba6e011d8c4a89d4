"""Fixtures and the hypothesis profiles of the unit tier."""

import hashlib
import signal
import threading
import uuid
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from prefect.settings import PREFECT_SERVER_ALLOW_EPHEMERAL_MODE, temporary_settings

from prefect_elastic_train.core.settings import FsspecStorageSettings, LocalStorageSettings, S3StorageSettings
from prefect_elastic_train.storage.opening import Storage
from prefect_elastic_train.storage.store import LocalRunStore, RunStore
from tests.support.s3 import ACCESS_KEY, FaultProxy, MotoServer
from tests.unit.support import PROFILE, WIDER, private_folder, stop

# The same examples at every run; HYPOTHESIS_PROFILE=wide looks at many more, new ones each time.
_common = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", _common, max_examples=50, derandomize=True)
settings.register_profile("wide", _common, max_examples=50 * WIDER)
settings.load_profile(PROFILE)


@pytest.fixture(scope="package", autouse=True)
def _no_prefect_server() -> Iterator[None]:
    """Nothing in this tier may start a Prefect server."""
    with temporary_settings({PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: False}):
        yield


@pytest.fixture(autouse=True)
def _hearts_beat_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without a heartbeat is watched for a moment."""
    monkeypatch.setattr("prefect_elastic_train.runs.heartbeat.HEARTBEAT_SECONDS", 0.02)


@pytest.fixture(autouse=True)
def _no_details_are_written_later() -> Iterator[None]:
    """Stop what would write into the folder of a test that has ended; a driver's process ends with its timers."""
    yield
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer) and thread.function.__name__ == "write_details":
            thread.cancel()


@pytest.fixture
def stops_by_signal() -> Iterator[None]:
    """SIGUSR1 stops the flow run."""
    before = signal.signal(signal.SIGUSR1, stop)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[RunStore]:
    """A run directory that nobody has used yet, on a disk unless the test says otherwise."""
    if getattr(request, "param", "disk") == "memory":
        yield request.getfixturevalue("memory").run("mnist")
        return
    with private_folder() as folder:
        yield LocalRunStore(f"{folder}/runs/mnist")


@pytest.fixture(scope="session")
def server() -> Iterator[MotoServer]:
    """A real S3 server, which takes parts of any size."""
    with MotoServer(S3_UPLOAD_PART_MIN_SIZE="1") as server:
        yield server


@pytest.fixture(scope="session")
def _shared_proxy(server: MotoServer) -> Iterator[FaultProxy]:
    with FaultProxy(server.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def proxy(_shared_proxy: FaultProxy) -> Iterator[FaultProxy]:
    """A proxy in front of the S3 server that disturbs nothing yet."""
    _shared_proxy.reset_counters()
    yield _shared_proxy
    _shared_proxy.calm()
    _shared_proxy.allow_keys(None)
    _shared_proxy.allow_tokens(None)


@pytest.fixture
def bucket(server: MotoServer, request: pytest.FixtureRequest) -> str:
    """A bucket of the test's own."""
    return server.create_bucket(hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:20])


@pytest.fixture(scope="session")
def s3_settings(server: MotoServer, _shared_proxy: FaultProxy) -> S3StorageSettings:
    """A storage in a bucket of the S3 server, through the proxy."""
    server.create_bucket("training")
    return S3StorageSettings(
        bucket_path="training/unit/runs",
        endpoint_url=_shared_proxy.endpoint_url,
        region="us-east-1",
        access_key_id=ACCESS_KEY,
        secret_access_key="secret-of-the-tests",
        retry_seconds=30,
    )


@pytest.fixture(scope="session")
def s3(s3_settings: S3StorageSettings) -> Storage:
    """The storage in the bucket, opened: one for all, since its clients take half a second to make."""
    return Storage(s3_settings)


@pytest.fixture
def memory() -> Iterator[Storage]:
    """An object store in this process's memory, opened."""
    from fsspec.implementations.memory import MemoryFileSystem

    yield Storage(FsspecStorageSettings(url=f"memory://bucket-{uuid.uuid4().hex}/runs", retry_seconds=30))
    MemoryFileSystem.store.clear()


@pytest.fixture
def disk() -> Iterator[Storage]:
    """A directory for runs, opened."""
    with private_folder() as folder:
        yield Storage(LocalStorageSettings(path=f"{folder}/runs", retry_seconds=30))


@pytest.fixture
def storage(request: pytest.FixtureRequest) -> Storage:
    """The storage that a test names: ``disk``, ``memory`` or ``s3``."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def run(storage: Storage) -> RunStore:
    """A run directory in that storage that nobody has used yet."""
    return storage.run(f"run-{uuid.uuid4().hex[:12]}")
