"""What this machine has: versions, settings, a storage, leftovers of trainings. Needs no server and no cluster."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from prefect_elastic_train.core import operator_settings
from prefect_elastic_train.core.spec import MARK_VARIABLE
from prefect_elastic_train.core.storage_settings import LocalStorageSettings, StorageSettings
from prefect_elastic_train.doctor.findings import Finding, fail, ok, warn
from prefect_elastic_train.report.words import size
from prefect_elastic_train.storage.preflight import preflight

_PACKAGE = "prefect-elastic-train"
#: What people ask for first, and the extras that a training can use; the rest is named only if it is wrong.
_NAMED, _EXTRAS = ("ray", "prefect", "fastapi", "sqlalchemy"), ("torch", "jax", "s3")
#: Share of a check's time in which a storage operation is repeated. A connection that nobody answers takes ten seconds
#: before the first failure, and again at the end of that.
_RETRY_SHARE = 1 / 6
#: A training's checkpoints rarely take less.
_LITTLE_ROOM = 2**30
#: A training that begins just now has a folder before it has processes.
_YOUNG_SECONDS = 60.0
_NAMED_FOLDERS = 5


def check_versions() -> Iterator[Finding]:
    """Compare what is installed with the bounds in the package's metadata."""
    requirements = [Requirement(text) for text in requires(_PACKAGE) or []]
    wrong = list(check_requirements(requirements))
    yield from wrong
    named = dict.fromkeys([*_NAMED, *(one.name for one in requirements if _is_extra(one))])
    told = [f"{name} {there}" for name in named if (there := _installed(name))]
    if not wrong:
        yield ok(f"Python {platform.python_version()}, {_PACKAGE} {version(_PACKAGE)}, {', '.join(told)}")


def check_requirements(requirements: Sequence[Requirement]) -> Iterator[Finding]:
    """Find those that are not met; those of an extra only if it is installed in another version."""
    for one in requirements:
        is_extra, there = _is_extra(one), _installed(one.name)
        is_wanted = is_extra or one.marker is None or one.marker.evaluate({"extra": ""})
        # Builds of one's own count as the version that they are built from.
        if not is_wanted or (is_extra if there is None else one.specifier.contains(there, prereleases=True)):
            continue
        tell = warn if is_extra else fail
        yield tell(
            f"{one.name} is {there or 'not installed'}, and {_PACKAGE} needs {one.specifier}",
            f"`pip install '{one.name}{one.specifier}'`",
        )


def check_settings() -> Iterator[Finding]:
    """Say which settings are in force, where they stand, and what looks like one and is none.

    Raises:
        ConfigurationError: One has a value that is not allowed.
    """
    settings, given = operator_settings.get_settings(), operator_settings.given_settings()
    shown = {name: _shown(value) for name, value in settings}
    for name, found in given.items():
        told = f"{name} = {shown[name]}, from {found.source}"
        if found.source == operator_settings.PROFILE:
            yield warn(
                told,
                "Prefect does not know settings of other packages: it warns of them, and `prefect config set` removes "
                f"them from a profile; put it into prefect.toml or set {operator_settings.variable_of(name)}",
            )
        else:
            yield ok(told)
    if defaults := [f"{name} = {value}" for name, value in shown.items() if name not in given]:
        yield ok(f"by default {', '.join(defaults)}")
    for name, source in operator_settings.unknown_settings():
        yield warn(f"{name}, from {source}, is no setting", "correct its name, or remove it")


def check_storage(settings: StorageSettings, seconds: float) -> Iterator[Finding]:
    """Write, read, list, create exclusively and delete in a storage, and leave nothing there.

    Args:
        settings: Of the storage.
        seconds: How long that may take.

    Raises:
        StorageFaultError: It does not do what a run needs; the message says what to do.
        OSError: The directory cannot be used.
    """
    is_local = isinstance(settings, LocalStorageSettings)
    path = Path(settings.root)
    made = [folder for folder in (path, *path.parents) if is_local and not folder.exists()]
    try:
        with preflight(settings, _RETRY_SHARE * seconds):
            room = shutil.disk_usage(path).free if is_local else None
    finally:
        with suppress(OSError):  # a training may have begun there meanwhile
            for folder in made:
                os.rmdir(folder)
    yield ok(f"{settings.uri} can be written, read, created in exclusively and deleted from")
    if room is not None and room < _LITTLE_ROOM:
        yield warn(
            f"{settings.uri} has {size(room)} left",
            "make room with `elastic-train runs prune`, keep fewer checkpoints (CheckpointPolicy), or use another disk",
        )
    elif room is not None:
        yield ok(f"{settings.uri} has {size(room)} left")


def check_leftovers(bases: Sequence[str] = ()) -> Iterator[Finding]:
    """Find private folders of trainings whose processes are gone, as a power cut or two kills at once leave behind.

    Args:
        bases: Folders to look in. Default: those that private folders are made in.
    """
    places = dict.fromkeys(os.path.realpath(base) for base in bases or ("/tmp", tempfile.gettempdir()))
    old = [str(folder) for base in places for folder in Path(base).glob("elt-*") if _is_old_and_ours(folder)]
    used = _used_folders() if old else set()
    left = [folder for folder in old if folder not in used]
    if left:
        more = f" and {len(left) - _NAMED_FOLDERS} more" if len(left) > _NAMED_FOLDERS else ""
        yield warn(
            f"nobody uses {', '.join(left[:_NAMED_FOLDERS])}{more}: the private folders of trainings that were killed "
            "together with their guard",
            f"`rm -r {' '.join(left[:_NAMED_FOLDERS])}`",
        )
    else:
        yield ok(f"no training has left anything in {', '.join(places)}")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _is_extra(requirement: Requirement) -> bool:
    """Whether a requirement belongs to an extra that a training can use."""
    marker = requirement.marker
    return (
        marker is not None
        and not marker.evaluate({"extra": ""})
        and any(marker.evaluate({"extra": extra}) for extra in _EXTRAS)
    )


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value) or "none"


def _is_old_and_ours(folder: Path) -> bool:
    """Whether a folder is this user's, the only one whose processes can be seen, and not just being made."""
    with suppress(OSError):
        found = folder.stat()
        return found.st_uid == os.getuid() and time.time() - found.st_mtime > _YOUNG_SECONDS
    return False


def _used_folders() -> set[str]:
    """Return the private folders that living processes carry as their mark, or guard."""
    used: set[str] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            used.add(process.environ().get(MARK_VARIABLE, ""))
            used |= {word.removeprefix("--folder=") for word in process.cmdline() if word.startswith("--folder=")}
    return used
