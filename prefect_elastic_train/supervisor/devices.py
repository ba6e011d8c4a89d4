"""Claims of local clusters on the GPUs and CPUs of their machine, so that each GPU is used by one cluster at a time.

A claim is an abstract Unix socket whose name says what is claimed and by whom. The kernel lists all names in
``/proc/net/unix``, for all users of the machine, and removes a name when the last process that holds the socket has
exited, however it ended. There is no file that could be left behind, deleted or unreadable. The flow process and the
head of the cluster hold the sockets. Containers with a network of their own do not see each other's claims, nor are
processes seen that are no local clusters of this package.
"""

from __future__ import annotations

import errno
import math
import os
import re
import secrets
import socket
import subprocess
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.request import DriverSpec

_PREFIX, _MAX_BYTES = "elastic-train", 107
_SMI_SECONDS = 20.0


@dataclass(frozen=True)
class Claim:
    """An entry of the kernel's list: ``kind`` is ``gpu`` or ``cpu``, ``what`` a GPU's UUID or a number of CPUs."""

    kind: str
    what: str
    owner: str  # process id of the flow and a random suffix
    run_name: str

    def __str__(self) -> str:
        return f"training {self.run_name!r} (pid {self.owner.partition('-')[0]})"


class DeviceClaims:
    """The claims of one training's local cluster, kept until :meth:`release`.

    Attributes:
        gpus: The claimed GPUs, as CUDA_VISIBLE_DEVICES names them. Empty where the GPUs of the machine are not known.
    """

    def __init__(self) -> None:
        self.gpus: list[str] = []
        self._owner = f"{os.getpid()}-{secrets.token_hex(3)}"
        self._sockets: list[socket.socket] = []
        self._needed = 0, 0  # what they were claimed for
        self._visible: dict[str, str] | None = None
        _all.add(self)

    @property
    def descriptors(self) -> list[int]:
        """File descriptors for the head to inherit."""
        return [one.fileno() for one in self._sockets]

    def take(self, spec: DriverSpec) -> tuple[bool, str]:
        """Try to claim what a training's local cluster needs; return whether it may start, and a message for the log.

        Raises:
            AttemptFailedError: The cluster needs more GPUs than this process may use.
        """
        least, most = needed = _gpus_needed(spec)
        if self._sockets and needed == self._needed:
            return True, ""
        self.release()
        self._needed = needed
        if least and self._visible is None:
            self._visible = _visible_gpus()
        gpus = (self._visible or {}) if least else {}
        if gpus and least > len(gpus):
            message = f"the local cluster needs {least} GPUs, and this process may use {len(gpus)}: {', '.join(gpus)}"
            raise AttemptFailedError(f"{message}. Lower min_workers or num_gpus", outcome=Outcome.INVALID)
        try:
            with _bind("lock"):  # one process at a time looks and claims
                others = list(_claims())
                held = {claim.what: claim for claim in others if claim.kind == "gpu"}
                free = [entry for entry, identity in gpus.items() if identity not in held]
                in_use = "; ".join(
                    f"GPU {entry} is used by {held[identity]}" for entry, identity in gpus.items() if identity in held
                )
                if gpus and len(free) < least:
                    return False, f"{in_use}; the local cluster waits for {least} GPU{'s' * (least > 1)}"
                self.gpus = free[: min(most, len(free))]
                cpus = _cpus_needed(spec)
                names = [f"gpu {gpus[entry]}" for entry in self.gpus] + [f"cpu {cpus:g}"]
                self._sockets = [_bind(f"{name} {self._owner} {spec.request.run_name}") for name in names]
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False, ""
            return True, f"GPUs are not divided between the trainings of this machine: {error}"
        return True, f"{in_use}; the local cluster has GPU {', '.join(self.gpus)}" if in_use else ""

    def crowding(self) -> str:
        """Return a warning if local clusters may use more CPUs together than the machine has; empty otherwise."""
        with suppress(OSError):
            claims = [claim for claim in _claims() if claim.kind == "cpu"]
            others = [claim for claim in claims if claim.owner != self._owner]
            total, there = sum(float(claim.what) for claim in claims), os.cpu_count() or math.inf
            if others and total > there:
                shares = ", ".join(f"{claim} {claim.what}" for claim in others)
                return (
                    f"The workers of the local clusters on this machine may use {total:g} CPUs together, and it has "
                    f"{there:g}: they slow each other down. Besides this training, {shares}. Run fewer at a time, or "
                    "have them join one Ray cluster, in which each waits for free CPUs"
                )
        return ""

    def release(self) -> None:
        """Give all claims back."""
        for one in self._sockets:
            one.close()
        self._sockets, self.gpus = [], []


#: Those of this process. A process that is forked from it holds none of them.
_all: weakref.WeakSet[DeviceClaims] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [*map(DeviceClaims.release, _all)])


def _bind(name: str) -> socket.socket:
    found = socket.socket(socket.AF_UNIX)
    try:
        found.bind(f"\0{_PREFIX} {name}".encode()[:_MAX_BYTES])
    except BaseException:
        found.close()
        raise
    return found


def _claims() -> Iterator[Claim]:
    with open("/proc/net/unix", errors="replace") as sockets:
        for line in sockets:
            fields = line.rstrip("\n").partition(f" @{_PREFIX} ")[2].split(" ", 3)
            if len(fields) == 4:
                yield Claim(*fields)


def _gpus_needed(spec: DriverSpec) -> tuple[int, int]:
    """Return the smallest and the largest number of GPUs that a local cluster takes."""
    if spec.cluster.num_gpus >= 0:
        return spec.cluster.num_gpus, spec.cluster.num_gpus
    if spec.scaling.accelerator != "gpu":
        return 0, 0
    each = spec.scaling.resources_per_worker.get("GPU", 1)
    # What datasets need is not known.
    most = math.ceil(each * spec.scaling.max_workers) if spec.is_alone else 1_000_000
    return math.ceil(each * spec.scaling.min_workers), most


def _cpus_needed(spec: DriverSpec) -> float:
    """Return how many CPUs the workers of a local cluster may use; each worker uses one at least."""
    of_cluster = float(spec.cluster.num_cpus or len(os.sched_getaffinity(0)))
    each = max(1.0, spec.scaling.resources_per_worker.get("CPU", 1))
    return min(of_cluster, each * spec.scaling.max_workers) if spec.is_alone else of_cluster


def _visible_gpus() -> dict[str, str]:
    """Return the GPUs that this process may use: UUID, else name, by name in CUDA_VISIBLE_DEVICES; empty if unknown.

    An index may mean another GPU to another process, such as a job of Slurm.
    """
    listed = ""
    with suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_SMI_SECONDS).stdout
    by_index = dict(re.findall(r"^GPU (\d+):.*\(UUID: ([^)\s]+)\)", listed, re.MULTILINE))
    known = re.findall(r"\(UUID: ([^)\s]+)\)", listed)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = list(by_index) if visible is None else [one.strip() for one in visible.split(",")]
    names = [name for name in names if name not in ("", "-1", "NoDevFiles")]
    return {name: by_index.get(name) or next((one for one in known if one.startswith(name)), name) for name in names}
