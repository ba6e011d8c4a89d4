"""What a job brings along: this package, what the driver is told, and the user's code.

All of it lies in the cluster's package store and on its nodes, readable for whoever can use the cluster.
"""

from __future__ import annotations

import json
import os
import pickle
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

from pydantic import SecretStr

from prefect_elastic_train.core.settings import ClusterSettings
from prefect_elastic_train.core.spec import DriverSpec
from prefect_elastic_train.core.storage_settings import FsspecStorageSettings, S3StorageSettings
from prefect_elastic_train.core.version import VERSION_FILE, __version__

_PACKAGE = Path(__file__).parents[1]
_MODULE = "elastic_train_job"
#: What the driver imports besides the standard library, as it is installed.
_NEEDED = ("ray", "pyarrow", "pydantic", "psutil", "tenacity", "cloudpickle")
_STORES = {S3StorageSettings: ("s3fs", "botocore"), FsspecStorageSettings: ("fsspec",)}
#: What the flow's objects are pickled by.
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
#: How long Ray lets a job that is stopped end by itself; the driver takes up to five seconds.
_STOP_SECONDS = 8
#: The command of a job; an image may call its Python either way.
_PYTHON = 'exec "$(command -v python || command -v python3)"'
ENTRYPOINT = f"{_PYTHON} -m {_MODULE}"


def end_pending(submission_id: str) -> str:
    """Return the command of a job that ends another one which waits for its start.

    Ray's own stop waits for that start, too. What it waits for is an actor with this name, in the Ray of our bounds.
    """
    code = (
        "import ray; ray.init(log_to_driver=False); "
        f"ray.kill(ray.get_actor({f'_ray_internal_job_actor_{submission_id}'!r}, "
        "namespace='SUPERVISOR_ACTOR_RAY_NAMESPACE'))"
    )
    return f"{_PYTHON} -c {shlex.quote(code)}"


def make_runtime_env(cluster: ClusterSettings) -> dict[str, Any]:
    """Return the runtime environment of a driver, with folders of this machine that are still to be uploaded."""
    environment = dict(cluster.runtime_env)
    if cluster.working_dir:
        environment["working_dir"] = os.path.expanduser(cluster.working_dir)
    environment["env_vars"] = {
        "RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_SECONDS),
        # A person's prints are not to be guessed at; the run's log has a limit of its own.
        "RAY_DEDUP_LOGS": "0",
        **(environment.get("env_vars") or {}),
    }
    return environment


@contextmanager
def job_package(spec: DriverSpec, folder: Path) -> Iterator[Path]:
    """An archive of this package, and of the one that a job starts, with what its driver is told.

    Args:
        spec: What the driver is told.
        folder: Private folder of the training, where the archive lies meanwhile.
    """
    framework = [] if spec.request.framework == "none" else [spec.request.framework]
    wanted = {"python": PYTHON, "modules": [*_NEEDED, *framework, *_STORES.get(type(spec.storage), ())]}
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
            archive.write(_PACKAGE / "driver" / "job_entry.py", f"{_MODULE}/__main__.py")
            archive.writestr(f"{_MODULE}/__init__.py", "")
            archive.writestr(f"{_MODULE}/wanted.json", json.dumps(wanted))
            archive.writestr(f"{_MODULE}/spec", pickle.dumps(spec))
        yield file
    finally:
        file.unlink(missing_ok=True)
