"""Version of this package. Belongs to all processes."""

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
