"""Deaths of a worker in the middle of what it does with recovery points, from inside its process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from prefect_elastic_train.loop import recovery_points
from tests.support.processes import titled


def die_within(steps: dict[str, int], ledger: str) -> None:
    """Let this worker die once in each place, at the step given for the place or later.

    Places: ``copy``, when an array is half written. ``seal``, before the header is written. ``transfer``, together with
    the keeper of this node, while the keeper of the other node does not answer. ``restore``, after an array was read.
    """
    write_state = recovery_points.write_state
    encode = recovery_points.StateHeader.encode
    read_array = recovery_points.StateReader._array
    at = [0, 0]  # step, and arrays that were copied of it

    def is_due(place: str, step: int) -> bool:
        mark = Path(f"{ledger}.{place}")
        if place not in steps or step < steps[place] or mark.exists():
            return False
        mark.touch()
        return True

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def copy(target: Any, source: Any) -> None:
        at[1] += 1
        if at[1] == 3 and is_due("copy", at[0]):
            target[: len(source) // 2] = source[: len(source) // 2]
            die()
        np.copyto(target, source)

    def write(target: Any, identity: Any, arrays: Any) -> None:
        at[:] = [identity[3], 0]
        if not is_due("transfer", identity[3]):
            write_state(target, identity, arrays)
            return
        keeper = int(recovery_points.memory._paths[0].split("/")[2])
        [other] = [one for one in titled(psutil.process_iter(), "ray::Keeper") if one.pid != keeper]
        other.suspend()
        write_state(target, identity, arrays)
        time.sleep(0.2)  # the transfer has begun
        os.kill(keeper, signal.SIGKILL)
        other.resume()
        die()

    def encode_or_die(header: Any) -> bytes:
        if is_due("seal", header.step):
            die()
        return encode(header)

    def read(reader: Any, number: int) -> Any:
        if number == 2 and is_due("restore", reader.header.step):
            die()
        return read_array(reader, number)

    recovery_points.np = type("Numpy", (), {**vars(np), "copyto": staticmethod(copy)})  # type: ignore[attr-defined]
    recovery_points.write_state = write
    recovery_points.StateHeader.encode = encode_or_die  # type: ignore[method-assign]
    recovery_points.StateReader._array = read  # type: ignore[method-assign]
