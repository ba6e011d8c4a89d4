"""Claims of local clusters on the GPUs and CPUs of their machine, so that a GPU is used by one cluster at a time.

A claim is an abstract Unix socket whose name says what is claimed and by whom. The kernel lists all names in
``/proc/net/unix``, for all users of the machine, and removes a name when the last process that holds the socket has
exited, however it ended. There is no file that could be left behind, deleted or unreadable. The flow process and the
head of the cluster hold the sockets. Containers with a network of their own do not see each other's claims. Processes
other than local clusters of this package make no claims, so GPUs that they use count as free.
"""

from __future__ import annotations

import errno
import math
import os
import re
import secrets
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from logging import WARNING
from pathlib import Path

from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.request import DriverSpec

#: Kind, GPU's UUID or number of CPUs, process id of the flow, and run name; before that a random part.
_CLAIM = re.compile("@elastic-train [0-9a-f]+ (gpu|cpu) (.+?) ([0-9]+) (.*)")
_SMI_SECONDS = 20.0


class DeviceClaims:
    """The claims of one training's local clusters, kept until :meth:`release`.

    Attributes:
        gpus: The claimed GPUs, as CUDA_VISIBLE_DEVICES names them. Empty where the GPUs of the machine are not known.
    """

    def __init__(self) -> None:
        self.gpus: list[str] = []
        self.sockets: list[socket.socket] = []
        os.register_at_fork(after_in_child=self.release)  # or a forked process would keep them

    def take(self, spec: DriverSpec, tell: Callable[..., None]) -> str:
        """Claim the GPUs that a local cluster needs, unless it has them; return why it must wait, or an empty text.

        Raises:
            AttemptFailedError: It needs more GPUs than this process may use.
        """
        if self.sockets:
            return ""
        scaling = spec.scaling
        given = spec.cluster.num_gpus
        each = scaling.resources_per_worker.get("GPU", float(scaling.accelerator == "gpu"))
        least = math.ceil(each * scaling.min_workers)
        most: int | None = math.ceil(each * scaling.max_workers)
        if given >= 0:
            least = most = given
        elif not spec.is_alone:
            most = None  # what datasets need is not known
        gpus = _visible_gpus() if least else {}
        if gpus and least > len(gpus):
            raise AttemptFailedError(
                f"the local cluster needs {least} GPUs, and this process may use {len(gpus)}: {', '.join(gpus)}. Lower "
                "min_workers or num_gpus",
                outcome=Outcome.INVALID,
            )
        cpus = float(spec.cluster.num_cpus or len(os.sched_getaffinity(0)))
        if spec.is_alone:
            cpus = min(cpus, scaling.max_workers * max(1.0, scaling.resources_per_worker.get("CPU", 1)))
        try:
            with _bind("lock"):  # one process at a time looks and claims
                claims = _CLAIM.findall(Path("/proc/net/unix").read_text(errors="replace"))
                users = {what: f"training {run!r} (pid {pid})" for kind, what, pid, run in claims if kind == "gpu"}
                in_use = "; ".join(f"GPU {name} is used by {users[gpu]}" for name, gpu in gpus.items() if gpu in users)
                free = [name for name, gpu in gpus.items() if gpu not in users]
                if gpus and len(free) < least:
                    return f"{in_use}; the local cluster waits for GPUs: {least}"
                self.gpus = free[:most]
                self.sockets = [
                    _bind(f"{secrets.token_hex(3)} {what} {os.getpid()} {spec.request.run_name}")
                    for what in [f"cpu {cpus:g}", *(f"gpu {gpus[name]}" for name in self.gpus)]
                ]
        except OSError as error:  # where there is no such socket, nothing is divided
            return "another local cluster claims its GPUs" if error.errno == errno.EADDRINUSE else ""
        if in_use:
            tell(f"{in_use}; the local cluster has GPU {', '.join(self.gpus)}")
        others = {f"training {run!r} (pid {pid})": float(what) for kind, what, pid, run in claims if kind == "cpu"}
        total = cpus + sum(others.values())
        there = os.cpu_count() or math.inf
        if others and total > there:
            tell(
                f"The workers of the local clusters on this machine may use {total:g} CPUs together, and it has "
                f"{there:g}: they slow each other down. Besides this training, {', '.join(others)}. Run fewer at a "
                "time, or have them join one Ray cluster, in which each waits for free CPUs",
                WARNING,
            )
        return ""

    def release(self) -> None:
        """Release all claims."""
        for one in self.sockets:
            one.close()
        self.sockets = []
        self.gpus = []


def _bind(name: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(f"\0elastic-train {name}".encode()[:107])  # the longest name
    return made


@cache
def _uuids() -> dict[str, str]:
    """Return the UUIDs of NVIDIA's GPUs by index. An index may mean another GPU to another process, as in Slurm."""
    listed = ""
    with suppress(OSError, subprocess.SubprocessError):
        smi = subprocess.Popen(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            listed = smi.communicate(timeout=_SMI_SECONDS)[0]
        finally:
            smi.kill()  # and not waited for: where a GPU hangs, it does not end even then
    return dict(re.findall(r"^GPU (\d+):.*UUID: (.+)\)", listed, re.MULTILINE))


def _visible_gpus() -> dict[str, str]:
    """Map each GPU that this process may use, as named in CUDA_VISIBLE_DEVICES, to its UUID; empty if none is known.

    A GPU whose UUID is not known is mapped to its name.
    """
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(_uuids())).split(",")
    return {name: _uuids().get(name, name) for name in map(str.strip, names) if name not in ("", "-1")}
