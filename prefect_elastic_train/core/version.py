"""Version of this package, and the versions of Ray that it was tested with. Belongs to all processes."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

#: File with the version of a copy that travels without its metadata, such as the one in a job's package. It has
#: priority over metadata, which may belong to another version that the cluster has installed.
VERSION_FILE = "VERSION"
UNKNOWN = "0+unknown"  # the version of a source tree that is not installed

_file = Path(__file__).parents[1] / VERSION_FILE
try:
    __version__ = _file.read_text(encoding="utf-8").strip() if _file.exists() else version("prefect-elastic-train")
except PackageNotFoundError:
    __version__ = UNKNOWN

#: Minor versions of Ray that `make matrix` has passed with.
TESTED_RAY = ("2.58", "2.59", "2.60")


def ray_minor() -> tuple[int, ...]:
    """Return the first two numbers of the installed Ray's version."""
    return tuple(int(number) for number in version("ray").split(".")[:2])


def untested_ray() -> str:
    """Return a warning if this package was not tested with the installed minor version of Ray, else ""."""
    if "{}.{}".format(*ray_minor()) in TESTED_RAY:
        return ""
    return f"prefect-elastic-train {__version__} was tested with Ray {', '.join(TESTED_RAY)}, not with {version('ray')}"
