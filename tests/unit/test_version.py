"""Which version an import says, in a job's package, too."""

import sys
from importlib.metadata import version
from pathlib import Path
from zipfile import ZipFile

import pytest

import prefect_elastic_train
from prefect_elastic_train.core.version import UNKNOWN
from prefect_elastic_train.supervisor.job_client import job_package
from tests.support.processes import ROOT, call
from tests.unit.test_following import SPEC


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


def test_the_version_is_that_of_the_installed_package_if_there_is_one(tmp_path: Path, another_version: Path) -> None:
    source = tmp_path / "source" / "prefect_elastic_train"
    (source / "core").mkdir(parents=True)
    for name in ("__init__.py", "core/__init__.py", "core/version.py"):
        (source / name).write_bytes((ROOT / "prefect_elastic_train" / name).read_bytes())
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
