"""Asking a cluster's head whether it lets us in, before Ray's client tries and cannot say why it failed.

Uses ``ray._raylet`` and ``ray._private.services``: ``ray.init`` answers a refused token with the same "Failed to
connect" as a dead head, waits without a bound of its own for something that accepts connections and says nothing,
and does not tell what it takes for the address ``"auto"``.
"""

from __future__ import annotations

import enum
import threading

_TIMEOUT_SECONDS = 5


class HeadAnswer(enum.Enum):
    """What the head at an address says."""

    WELCOME = "welcome"
    REFUSED = "refused"
    SILENT = "silent"


def ask_head(address: str, timeout_seconds: float) -> HeadAnswer:
    """Ask the head at ``host:port``, with the token of this process.

    Args:
        address: Where it should be.
        timeout_seconds: How long to wait for an answer.
    """
    answers: list[HeadAnswer] = []
    thread = threading.Thread(target=_ask, args=(address, answers), daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    return answers[0] if answers else HeadAnswer.SILENT


def find_address() -> str:
    """Give ``host:port`` of the cluster that ``"auto"`` means: ``RAY_ADDRESS``, or the one started on this machine.

    Raises:
        ConnectionError: There is none, or more than one.
        ValueError: ``RAY_ADDRESS`` is no address.
    """
    from ray._private.services import canonicalize_bootstrap_address_or_die

    return str(canonicalize_bootstrap_address_or_die("auto"))


def _ask(address: str, answers: list[HeadAnswer]) -> None:
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.exceptions import AuthenticationError

    try:
        GcsClient(address=address).internal_kv_keys(b"session_name", timeout=_TIMEOUT_SECONDS)
    except AuthenticationError:
        answers.append(HeadAnswer.REFUSED)
    except Exception:  # noqa: BLE001 - whatever else it says is no welcome
        answers.append(HeadAnswer.SILENT)
    else:
        answers.append(HeadAnswer.WELCOME)
