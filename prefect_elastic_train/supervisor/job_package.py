"""What a job brings along: this package, what the driver is told, and the user's code.

All of it lies in the cluster's package store and on its nodes, readable for whoever can use the cluster.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import SecretStr

import prefect_elastic_train
from prefect_elastic_train.core.events import EVENT_TAG, AttemptEnded, encode_event
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.settings import ClusterSettings
from prefect_elastic_train.core.spec import DriverSpec, write_spec
from prefect_elastic_train.core.storage_settings import FsspecStorageSettings, S3StorageSettings
from prefect_elastic_train.core.version import VERSION_FILE, __version__
from prefect_elastic_train.driver import job_entry as entry

_MODULE = "elastic_train_job"
#: What the driver imports besides the standard library, as it is installed.
_NEEDED = ("ray.train", "pyarrow", "pydantic", "psutil", "tenacity", "cloudpickle")
_FRAMEWORKS = {"torch": ("torch",), "jax": ("jax",), "none": ()}
#: What the flow's objects are pickled by.
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
#: How long Ray lets a job that is stopped end by itself; the driver takes up to five seconds.
_STOP_SECONDS = 8


def _no_python() -> str:
    message = (
        "there is no Python with Ray on the PATH of the node that the job started on: start Ray there from its "
        "activated environment"
    )
    event = AttemptEnded(outcome=Outcome.INVALID, final=True, message=message)
    return EVENT_TAG + encode_event(event)


def _command(arguments: str) -> str:
    """Return the command of a job. The Python of the cluster is looked for, since an image may call it either way."""
    return (
        "for python in python python3; do "
        'if "$python" -c "import importlib.util as u; raise SystemExit(not u.find_spec(\'ray\'))" 2>/dev/null; then '
        f'exec "$python" {arguments}; fi; done; '
        f"echo {shlex.quote(_no_python())}; exit 1"
    )


#: The command of a job that trains.
ENTRYPOINT = _command(f"-m {_MODULE}")


def end_pending(submission_id: str) -> str:
    """Return the command of a job that ends another one which waits for its start.

    Ray's own stop waits for that start, too. What it waits for is an actor with this name, in the Ray of our bounds.
    """
    code = (
        "import ray; ray.init(log_to_driver=False); "
        f"ray.kill(ray.get_actor({f'_ray_internal_job_actor_{submission_id}'!r}, "
        "namespace='SUPERVISOR_ACTOR_RAY_NAMESPACE'))"
    )
    return _command(f"-c {shlex.quote(code)}")


def make_runtime_env(cluster: ClusterSettings) -> dict[str, Any]:
    """Return the runtime environment of a job, with folders of this machine that are still to be uploaded.

    Raises:
        AttemptFailedError: A folder of the user's is not there; outcome ``invalid``.
    """
    environment = dict(cluster.runtime_env)
    if cluster.working_dir:
        environment["working_dir"] = os.path.expanduser(cluster.working_dir)
    modules = [os.path.expanduser(str(module)) for module in environment.get("py_modules") or []]
    for local in [str(environment.get("working_dir") or ""), *modules]:
        if local and "://" not in local and not os.path.exists(local):
            raise AttemptFailedError(
                f"{local!r}, which the RayCluster sends to the cluster, does not exist on this machine; correct its "
                "working_dir or the py_modules of its runtime_env",
                outcome=Outcome.INVALID,
            )
    environment["py_modules"] = modules
    environment["env_vars"] = {
        "RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_SECONDS),
        # A person's prints are not to be guessed at; the run's log has a limit of its own.
        "RAY_DEDUP_LOGS": "0",
        **(environment.get("env_vars") or {}),
    }
    return environment


@contextmanager
def job_modules(spec: DriverSpec, folder: Path) -> Iterator[list[Path]]:
    """The Python packages that a job brings along: this one, and the one that it starts; what a driver is told with it.

    Args:
        spec: What the driver is told.
        folder: Private folder of the training, where they are put together.
    """
    package, job = folder / "package" / "prefect_elastic_train", folder / "package" / _MODULE
    if not package.exists():
        source = os.path.dirname(prefect_elastic_train.__file__)
        shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
        (package / VERSION_FILE).write_text(f"{__version__}\n", encoding="utf-8")
    try:
        _write_job(spec, job)
        yield [package, job]
    finally:
        shutil.rmtree(job, ignore_errors=True)


def _write_job(spec: DriverSpec, job: Path) -> None:
    job.mkdir(parents=True)
    (job / "__init__.py").touch()
    shutil.copyfile(entry.__file__, job / "__main__.py")
    stores = {S3StorageSettings: ("s3fs", "botocore"), FsspecStorageSettings: ("fsspec",)}
    wanted = {
        "python": PYTHON,
        "ray": version("ray"),
        "package": __version__,
        "modules": [*_NEEDED, *_FRAMEWORKS[spec.request.framework], *stores.get(type(spec.storage), ())],
    }
    (job / "wanted.json").write_text(json.dumps(wanted))
    # The driver is inside by then.
    cluster = spec.cluster.model_copy(update={"auth_token": SecretStr("")})
    # Nor is there any of this machine's folders where the driver runs.
    write_spec(replace(spec, cluster=cluster, sys_path=[]), job / "spec")
