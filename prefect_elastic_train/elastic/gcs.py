"""Asking a cluster's head whether it lets us in, before Ray's client tries and cannot say why it failed.

Uses ``ray._raylet``: ``ray.init`` answers a refused token with the same "Failed to connect" as a dead head.
"""

from __future__ import annotations

__all__ = ["refuses_token"]

_TIMEOUT_SECONDS = 5


def refuses_token(address: str) -> bool:
    """Tell whether the head at ``host:port`` answers and refuses the token of this process."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.exceptions import AuthenticationError

    try:
        GcsClient(address=address).internal_kv_keys(b"session_name", timeout=_TIMEOUT_SECONDS)
    except AuthenticationError:
        return True
    except Exception:  # noqa: BLE001 - whatever else is wrong, ray.init meets it and tells it
        return False
    return False
