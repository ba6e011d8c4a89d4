"""Which checks there are, in which order, and for how long; and those of this machine: versions, settings, storage."""

from __future__ import annotations

import contextvars
import os
import platform
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from prefect_elastic_train.blocks.lookup import chosen_blocks, saved_name
from prefect_elastic_train.core.masking import without_credentials
from prefect_elastic_train.core.operator_settings import get_settings
from prefect_elastic_train.core.outcomes import ElasticTrainError
from prefect_elastic_train.core.records import Owner
from prefect_elastic_train.core.request import RunRequest
from prefect_elastic_train.core.spec import DriverSpec
from prefect_elastic_train.core.storage_settings import LocalStorageSettings, StorageSettings
from prefect_elastic_train.doctor import Finding, fail, ok, skip, warn
from prefect_elastic_train.doctor.clusters import check_cluster
from prefect_elastic_train.doctor.prefect_server import check_block_types, check_server
from prefect_elastic_train.orchestration.arguments import driver_spec
from prefect_elastic_train.runs.identity import fingerprint
from prefect_elastic_train.storage.preflight import preflight

_PACKAGE = "prefect-elastic-train"
#: Extras that a training can use.
_EXTRAS = ("torch", "jax", "s3")
_QUICK_SECONDS = 10.0
#: Share of a check's time in which a storage operation is repeated. A connection that nobody answers takes ten seconds
#: before the first failure, and again at the end of that.
_RETRY_SHARE = 1 / 6


def examine(storage: str = "", cluster: str = "", profile: str = "", seconds: float = 45.0) -> Iterator[Finding]:
    """Run all checks; a check that needs what another one has not found is skipped.

    What is not named here is what the settings name as default, else what trainings use without one: a directory in
    the home folder, and a local cluster.

    Args:
        storage: A directory, a URL, or a saved storage block.
        cluster: A saved ``RayCluster``.
        profile: Name that blocks of several types are saved under; those of them stand before the settings.
        seconds: How long the checks of blocks, storage and cluster may take each.
    """
    specs: list[DriverSpec] = []

    def check_blocks() -> Iterator[Finding]:
        yield from check_block_types()
        blocks = chosen_blocks({"storage": storage, "cluster": cluster}, profile)
        request = RunRequest("doctor", Owner(flow_run_id="doctor"), fingerprint("doctor:none", "none", None))
        specs.append(driver_spec(request, blocks))
        yield ok(f"a training takes {', '.join(saved_name(one) or type(one).__name__ for one in blocks.values())}")

    yield from run_check("versions", lambda: check_versions(requires(_PACKAGE) or []), _QUICK_SECONDS)
    yield from run_check("settings", _settings, _QUICK_SECONDS)
    server = run_check("server", check_server, _QUICK_SECONDS)
    yield from server
    if all(one.level != "fail" for one in server):
        yield from run_check("blocks", check_blocks, seconds)
    else:
        yield skip("cannot be looked at without the server", check="blocks")
    if specs:
        yield from run_check("storage", lambda: check_storage(specs[0].storage, seconds), seconds)
        yield from run_check("cluster", lambda: check_cluster(specs[0], seconds), seconds)
    else:
        for name in ("storage", "cluster"):
            yield skip("which one to try is not known without the blocks", check=name)


def run_check(name: str, look: Callable[[], Iterable[Finding]], seconds: float) -> list[Finding]:
    """Run a check in a thread, which is left to itself when its time is up; return what it has found, no password.

    Args:
        name: Of the check.
        look: Yields what it finds; must end by itself what it has started.
        seconds: How long it may take.
    """
    found: list[Finding] = []

    def run() -> None:
        try:
            for one in look():
                found.append(one)
        except ElasticTrainError as error:
            found.append(fail(str(error)))
        except Exception as error:  # noqa: BLE001 - whatever goes wrong in a check is a finding
            found.append(fail(f"{type(error).__name__}: {error}"))

    # Prefect's settings live in context variables.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name=f"doctor-{name}", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        found.append(fail(f"no answer within {seconds:g} s", "see what is slow, or give more --timeout"))
    return [replace(one, check=name, message=_clean(one.message), remedy=_clean(one.remedy)) for one in [*found]]


def check_versions(requirements: Iterable[str]) -> Iterator[Finding]:
    """Compare what is installed with requirements; those of extras only if they are installed."""
    is_well = True
    for one in map(Requirement, requirements):
        marker, there = one.marker, _installed(one.name)
        is_needed = marker is None or marker.evaluate({"extra": ""})
        is_used = marker is not None and there and any(marker.evaluate({"extra": extra}) for extra in _EXTRAS)
        # Builds of one's own count as the version that they are built from.
        if (is_needed or is_used) and not (there and one.specifier.contains(there, prereleases=True)):
            is_well = False
            told = f"{one.name} is {there or 'not installed'}, and {_PACKAGE} needs {one.specifier}"
            yield (fail if is_needed else warn)(told, f"`pip install '{one.name}{one.specifier}'`")
    if is_well:
        told = ", ".join(f"{name} {_installed(name)}" for name in (_PACKAGE, "ray", "prefect"))
        yield ok(f"Python {platform.python_version()}, {told}")


def check_storage(settings: StorageSettings, seconds: float) -> Iterator[Finding]:
    """Write, read, list, create exclusively and delete in a storage, and leave nothing there.

    Args:
        settings: Of the storage.
        seconds: How long that may take.

    Raises:
        StorageFaultError: It does not do what a run needs; the message says what to do.
        OSError: The directory cannot be used.
    """
    is_local, path = isinstance(settings, LocalStorageSettings), Path(settings.root)
    made = [folder for folder in (path, *path.parents) if is_local and not folder.exists()]
    try:
        with preflight(settings, _RETRY_SHARE * seconds):
            yield ok(f"{settings.uri} can be written, read, created in exclusively and deleted from")
    finally:
        with suppress(OSError):  # a training may have begun there meanwhile
            for folder in made:
                os.rmdir(folder)


def _settings() -> Iterator[Finding]:
    settings = get_settings()
    given = [f"{name} = {getattr(settings, name)}" for name in sorted(settings.model_fields_set)]
    yield ok(", ".join(given) or "all have their defaults")


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _clean(text: str) -> str:
    """Leave out line ends, and passwords that stand in a URL."""
    return without_credentials(" ".join(text.split()))
