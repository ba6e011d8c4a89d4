"""Which version of this package is imported."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

#: Says the version of a copy that travels without its metadata, such as the one in a job's package. It comes before
#: metadata, which may be those of another version that the cluster has installed.
VERSION_FILE = "VERSION"
UNKNOWN = "0+unknown"  # of a source tree that nobody has installed

_file = Path(__file__).parents[1] / VERSION_FILE
try:
    __version__ = _file.read_text(encoding="utf-8").strip() if _file.exists() else version("prefect-elastic-train")
except PackageNotFoundError:
    __version__ = UNKNOWN
