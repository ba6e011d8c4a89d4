"""A loop whose module exits in each worker that imports it."""

from __future__ import annotations

import os
import sys
from typing import Any

if getattr(sys.modules.get("ray.train.v2._internal.execution.context"), "_train_context", None) is not None:
    os._exit(3)


def loop(config: dict[str, Any]) -> None:
    """Do nothing, since no worker gets as far as this."""
