"""Whether what is installed is what the package's own metadata asks for."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from prefect_elastic_train.doctor.findings import Finding, fail, ok, warn

__all__ = ["check_versions"]

_PACKAGE = "prefect-elastic-train"
#: What people ask for first; the rest is named only if it is wrong.
_NAMED = ("ray", "prefect", "fastapi", "sqlalchemy")
_EXTRAS = ("torch", "jax", "s3")


def check_versions() -> Iterator[Finding]:
    """Compare what is installed with the bounds in the package's metadata."""
    try:
        requirements = [Requirement(text) for text in requires(_PACKAGE) or []]
        pythons = str(metadata(_PACKAGE).json.get("requires_python", ""))
    except PackageNotFoundError:
        yield warn(
            f"{_PACKAGE} is not installed, so nothing tells which versions it needs",
            f"install it: `pip install {_PACKAGE}`, or `pip install -e .` in its source",
        )
        return
    python = platform.python_version()
    if not _fits(SpecifierSet(pythons), python):
        yield fail(f"Python is {python}, and {_PACKAGE} needs {pythons}", "make the environment with such a Python")
    bad = [finding for one in requirements if (finding := _problem(one)) is not None]
    yield from bad
    names = [f"{name} {there}" for name in _NAMED if (there := _installed(name))]
    optional = [
        f"{one.name} {there}" for one in requirements if _extra_of(one) and (there := _installed(one.name)) is not None
    ]
    told = f"Python {python}, {_PACKAGE} {version(_PACKAGE)}, {', '.join(names)}"
    if not bad:
        yield ok(f"{told}; of the extras {', '.join(optional) or 'nothing'}")


def _problem(requirement: Requirement) -> Finding | None:
    """Say what is wrong with one requirement; an extra is wrong only if it is there in another version."""
    extra = _extra_of(requirement)
    if not extra and requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return None
    there = _installed(requirement.name)
    install = f"`pip install '{requirement.name}{requirement.specifier}'`"
    if there is None:
        return None if extra else fail(f"{requirement.name} is not installed", install)
    if _fits(requirement.specifier, there):
        return None
    told = f"{requirement.name} is {there}, and {_PACKAGE} needs {requirement.specifier}"
    return warn(told, install) if extra else fail(told, install)


def _extra_of(requirement: Requirement) -> str:
    """Give the extra that a requirement belongs to, of those that a training can use."""
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        return ""
    return next((extra for extra in _EXTRAS if requirement.marker.evaluate({"extra": extra})), "")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _fits(wanted: SpecifierSet, there: str) -> bool:
    """Tell whether a version is in the bounds; builds of one's own count as the version that they are built from."""
    return wanted.contains(there, prereleases=True)
