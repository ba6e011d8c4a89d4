"""Daemon threads."""

import contextvars
import threading
from collections.abc import Callable
from typing import Any


def start_thread(run: Callable[..., object], *arguments: Any) -> threading.Thread:
    """Start a daemon thread in the context of the caller, which may have Prefect's settings, flow run and task run.

    The process can exit while the thread runs. The thread's name is ``elastic-train <name of the function>``.
    """
    thread = threading.Thread(
        target=contextvars.copy_context().run,
        args=(run, *arguments),
        name=f"elastic-train {run.__qualname__}",
        daemon=True,
    )
    thread.start()
    return thread
