"""How often, and how late, a dead flow run is resumed by itself, unless an operator says otherwise."""

from __future__ import annotations

__all__ = ["DEFAULT_HEARTBEAT_TIMEOUT_SECONDS", "DEFAULT_MAX_RESUMES"]

DEFAULT_MAX_RESUMES = 10
#: Three of Prefect's heartbeat intervals (180 s) and some.
DEFAULT_HEARTBEAT_TIMEOUT_SECONDS = 600.0
