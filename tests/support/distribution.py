"""Wheel and sdist of this tree as it stands, and an environment of its own to install them in."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from pathlib import Path

from tests.support.processes import ROOT, call

#: The version that the tree is tagged with for the tests; another one each time, since uv would take the wheel of an
#: earlier run from its cache, if that had the same version.
PATCH = secrets.randbelow(10**9)
VERSION = f"7.8.{PATCH}"
TAG = f"v{VERSION}"

_SCRIPTS = Path(sys.executable).parent
#: How pip is told of an index, and how uv is.
_INDEX = {"PIP_INDEX_URL": "UV_DEFAULT_INDEX", "PIP_EXTRA_INDEX_URL": "UV_INDEX"}


def files_of_tree() -> list[str]:
    """The files of this tree: those that git knows, and new ones that it does not ignore."""
    listed = call("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", folder=ROOT)
    return sorted(name for name in listed.split("\0") if name and (ROOT / name).is_file())


def export_tree(folder: Path) -> None:
    """Copy the files of this tree into a folder, without what git knows of them."""
    for name in files_of_tree():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)


def commit_tree(folder: Path, tag: str = "") -> None:
    """Make a repository of a folder, with one commit and perhaps a tag."""
    somebody = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.com", "-c", "commit.gpgsign=false"]
    call("git", "init", "--quiet", folder=folder)
    call("git", "add", "--all", folder=folder)
    call("git", *somebody, "commit", "--quiet", "--message", "All of it", folder=folder)
    if tag:
        call("git", "tag", tag, folder=folder)


def build(tree: Path, into: Path) -> str:
    """Build the sdist of a tree, and the wheel from that sdist; returns what the build says."""
    with_uv = {**_kept(), **uv_settings(), "PATH": os.pathsep.join([str(_SCRIPTS), os.environ["PATH"]])}
    command = [sys.executable, "-m", "build", "--installer", "uv", "--outdir", into]
    return call(*command, folder=tree, env=with_uv, timeout=300)


def _kept() -> dict[str, str]:
    """What of this process's environment has nothing to do with Python and these tests."""
    foreign = ("PIP_", "PREFECT_", "PYTEST_", "PYTHON", "RAY_", "UV_", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


def uv_settings() -> dict[str, str]:
    """The settings by which uv finds packages where pip does, and keeps them where it always does."""
    cache = call(_SCRIPTS / "uv", "cache", "dir", folder=ROOT).strip()
    return {"UV_CACHE_DIR": cache} | {uv: os.environ[pip] for pip, uv in _INDEX.items() if pip in os.environ}


def bare_environment(folder: Path) -> dict[str, str]:
    """The environment of somebody at home in a folder, who has Python and uv and knows nothing of this tree."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    (programs / "python3").symlink_to(Path(sys.executable).resolve())
    (programs / "uv").symlink_to(_SCRIPTS / "uv")
    return {
        **_kept(),
        **uv_settings(),
        "HOME": str(folder),
        "PATH": os.pathsep.join([str(programs), os.defpath.lstrip(":"), "/usr/local/bin"]),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONUNBUFFERED": "1",
        "UV_COMPILE_BYTECODE": "1",  # as pip does
    }
