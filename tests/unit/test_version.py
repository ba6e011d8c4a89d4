"""Where the version comes from: from the tag to what an import says, in a job's package, too."""

from __future__ import annotations

import re
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path
from zipfile import ZipFile

import pytest

import prefect_elastic_train
from prefect_elastic_train.core.version import UNKNOWN
from prefect_elastic_train.supervisor.job_client import job_package
from tests.support.distribution import PATCH, TAG, VERSION, commit_tree
from tests.support.processes import ROOT, call
from tests.unit.test_following import SPEC


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What of this repository its version depends on, without what git knows of it."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", ".git_archival.txt", ".gitattributes"):
        (tree / name).write_bytes((ROOT / name).read_bytes())
    return tree


def _version_of(tree: Path) -> str:
    """The version that a build of a tree has."""
    return call(sys.executable, "-W", "ignore", "-m", "setuptools_scm", folder=tree).splitlines()[-1].strip()


def test_the_version_of_a_commit_is_its_tag_also_in_an_archive(tree: Path, tmp_path: Path) -> None:
    assert _version_of(tree) == "0.1.0.dev0", "git knows nothing of it"
    commit_tree(tree, TAG)
    assert _version_of(tree) == VERSION
    call("git", "archive", "--output", tmp_path / "archive.tar", TAG, folder=tree)
    with tarfile.open(tmp_path / "archive.tar") as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    assert _version_of(tmp_path / "unpacked") == VERSION
    (tree / "more").touch()
    commit_tree(tree)
    assert re.fullmatch(rf"7\.8\.{PATCH + 1}\.dev1\+g[0-9a-f]+", _version_of(tree)), "of the next release"


def _said_by(package: Path, *metadata: Path) -> str:
    """The version that a package says it has, in a Python with nothing but the metadata in some folders."""
    path = f"import sys; sys.path[:0] = {[str(package.parent), *map(str, metadata)]!r}\n"
    say_it = "import prefect_elastic_train; print(prefect_elastic_train.__version__)"
    return call(sys.executable, "-S", "-c", path + say_it, folder="/").strip()


@pytest.fixture
def another_version(tmp_path: Path) -> Path:
    """A folder that has the metadata of another version, as the image of a cluster may."""
    metadata = tmp_path / "site-packages" / "prefect_elastic_train-99.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: prefect-elastic-train\nVersion: 99.0\n")
    return tmp_path / "site-packages"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The package, as far as its version goes, in a folder without metadata."""
    package = tmp_path / "source" / "prefect_elastic_train"
    (package / "core").mkdir(parents=True)
    for name in ("__init__.py", "core/__init__.py", "core/version.py"):
        (package / name).write_bytes((ROOT / "prefect_elastic_train" / name).read_bytes())
    return package


def test_the_version_is_that_of_the_installed_package_if_there_is_one(source: Path, another_version: Path) -> None:
    assert prefect_elastic_train.__version__ == version("prefect-elastic-train")
    assert _said_by(source, another_version) == "99.0"
    assert _said_by(source) == UNKNOWN


def test_the_package_of_a_job_says_the_version_of_the_flow_whatever_the_cluster_has(
    tmp_path: Path, another_version: Path
) -> None:
    with job_package(SPEC, tmp_path) as archive:
        ZipFile(archive).extractall(tmp_path)
        package = tmp_path / "prefect_elastic_train"
        assert _said_by(package) == prefect_elastic_train.__version__
        assert _said_by(package, another_version) == prefect_elastic_train.__version__
