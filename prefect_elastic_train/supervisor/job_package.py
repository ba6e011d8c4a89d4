"""What a job brings along: this package, what the driver is told, and the user's code.

All of it lies in the cluster's package store and on its nodes, readable for whoever can use the cluster.
"""

from __future__ import annotations

import pickle
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from pydantic import SecretStr

from prefect_elastic_train.core.request import DriverSpec
from prefect_elastic_train.core.version import VERSION_FILE, __version__

_PACKAGE = Path(__file__).parents[1]
_MODULE = "elastic_train_job"
#: The first code that runs in a job. What keeps the driver from running here is an ImportError.
_ENTRY = """\
import sys
from pathlib import Path

python = "%d.%d" % sys.version_info[:2]
if python != "{python}":
    raise ImportError(f"the cluster runs Python {{python}} and the flow Python {python}")
from prefect_elastic_train.driver.__main__ import main

main([str(Path(__file__).with_name("spec"))])
"""
#: What the flow's objects are pickled by.
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
#: An image may call its Python either way.
_EXECUTE = 'exec "$(command -v python || command -v python3)"'
#: The command of a job that trains.
ENTRYPOINT = f"{_EXECUTE} -m {_MODULE}"


def end_pending(submission_id: str) -> str:
    """Return the command of a job that ends another one which waits for its start.

    Ray's own stop waits for that start, too. What it waits for is an actor with this name, in the Ray of our bounds.
    """
    code = (
        "import ray; ray.init(log_to_driver=False); "
        f"ray.kill(ray.get_actor({f'_ray_internal_job_actor_{submission_id}'!r}, "
        "namespace='SUPERVISOR_ACTOR_RAY_NAMESPACE'))"
    )
    return f"{_EXECUTE} -c {shlex.quote(code)}"


@contextmanager
def job_package(spec: DriverSpec, folder: Path) -> Iterator[Path]:
    """An archive of this package and of the one that a job starts, with the spec; it lies in a private folder."""
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
            archive.writestr(f"{_MODULE}/__main__.py", _ENTRY.format(python=PYTHON))
            archive.writestr(f"{_MODULE}/__init__.py", "")
            archive.writestr(f"{_MODULE}/spec", pickle.dumps(spec))
        yield file
    finally:
        file.unlink(missing_ok=True)
