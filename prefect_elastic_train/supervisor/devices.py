"""Claims of local clusters on the GPUs and CPUs of their machine, so that trainings wait for room.

A GPU is used by one cluster at a time. CPUs are counted, among the processes that may use the same set of CPUs.

A claim is an abstract Unix socket whose name contains the GPU, or the number of CPUs, and the claiming training. The
kernel lists all names in
``/proc/net/unix``, for all users of the machine, and removes a name when the last process that holds the socket has
exited, however it ended. There is no file that could be left behind, deleted or unreadable. The flow process and the
head of the cluster hold the sockets. Containers with their own network do not see each other's claims. Processes
other than local clusters of this package make no claims, so GPUs and CPUs that they use count as free.
"""

import errno
import math
import os
import re
import secrets
import socket
import subprocess
import sys
import zlib
from contextlib import suppress
from functools import cache
from pathlib import Path

from prefect_elastic_train.core.outcomes import AttemptFailedError
from prefect_elastic_train.core.request import DriverSpec

#: After a random part: UUID of the GPU, process id of the flow, and run name.
_CLAIM = re.compile("@elastic-train [0-9a-f]+ gpu (.+?) ([0-9]+) (.*)")
#: The same with checksums of the set of CPUs and of the run name, and the number of CPUs.
_CPU_CLAIM = re.compile("@elastic-train [0-9a-f]+ cpus ([0-9]+) ([0-9]+) ([0-9]+) ([0-9]+) (.*)")
_SMI_SECONDS = 20.0
BUSY = "another local cluster makes its claims"  # a reason to wait that passes at once


class DeviceClaims:
    """The claims of one training's local clusters, kept until :meth:`release`.

    Attributes:
        sockets: The socket of each claimed GPU, by the GPU's name in CUDA_VISIBLE_DEVICES. Empty if the GPUs of the
            machine are unknown.
        cpu_sockets: The socket of the claim on CPUs, if there is one.
        num_cpus: The number of CPUs that the local cluster is limited to; 0: all of the machine, since its workers
            cannot use more than are claimed.
        warning: Text for the user if local clusters may use more CPUs than the machine has, else empty.
    """

    def __init__(self) -> None:
        self.sockets: dict[str, socket.socket] = {}
        self.cpu_sockets: list[socket.socket] = []
        self.num_cpus = 0
        self.warning = ""
        os.register_at_fork(after_in_child=self.release)  # a forked process must not keep the claims

    def claim(self, spec: DriverSpec) -> str:
        """Claim the GPUs and CPUs that a training's local cluster needs, all or none, unless they are claimed already.

        Returns the reason why the local cluster must wait for them, or an empty text if it need not.

        Raises:
            AttemptFailedError: The local cluster needs more GPUs than this process may use.
        """
        if self.sockets or self.cpu_sockets:
            return ""
        given = spec.cluster.num_gpus
        least, most = (given, given) if given >= 0 else _needed(spec, "GPU")
        gpus = visible_gpus() if least else {}
        if gpus and least > len(gpus):
            raise AttemptFailedError(
                f"the local cluster needs {least} GPUs, and this process may use {len(gpus)}: "
                f"{', '.join(gpus)}. Lower min_workers or num_gpus"
            )
        try:
            with _bind("lock"):  # one process at a time reads the claims and makes its own
                names = Path("/proc/net/unix").read_text(errors="replace")
                claims = _CLAIM.findall(names)
                users = {uuid: f"training {run!r} (pid {pid})" for uuid, pid, run in claims}
                free = [name for name, uuid in gpus.items() if uuid not in users]
                if gpus and len(free) < least:
                    used = "; ".join(f"GPU {name} is used by {users[gpus[name]]}" for name in gpus if name not in free)
                    return f"{used}; the local cluster waits for GPUs: {least}"
                if reason := self._claim_cpus(spec, names):
                    return reason
                self.sockets = {
                    name: _bind(f"{secrets.token_hex(3)} gpu {gpus[name]} {os.getpid()} {spec.request.run_name}")
                    for name in free[:most]
                }
        except OSError as error:  # without abstract sockets nothing is claimed
            return BUSY if error.errno == errno.EADDRINUSE else ""
        return ""

    def _claim_cpus(self, spec: DriverSpec, names: str) -> str:
        """Claim CPUs beside the claims in ``names``. Return the reason why the cluster must wait, or an empty text."""
        run_name = spec.request.run_name
        cpu_set = str(abs(hash(frozenset(os.sched_getaffinity(0)))))  # the same in all processes
        claimant = str(zlib.crc32(run_name.encode()))
        given = spec.cluster.num_cpus
        total = usable_cpus()
        least, most = (min(number, given or total) for number in _needed(spec, "CPU"))
        # A training does not wait for an earlier process of the same run, which it may have to end.
        others = sorted(
            (int(count), f"training {run!r} (pid {pid}) has {count}")
            for cpus, other, count, pid, run in _CPU_CLAIM.findall(names)
            if cpus == cpu_set and other != claimant
        )
        free = max(0, total - sum(count for count, _ in others))
        used = f"this machine has {total} CPUs" + "".join(f"; {text}" for _, text in others)
        if free < least and not given:
            return f"{used}; the local cluster waits for CPUs: {least}"
        count = most if given else min(most, free)
        if count > free:
            self.warning = f"This machine is oversubscribed, so trainings are slow: {used}; this one has {count}"
        if count:
            name = f"{secrets.token_hex(3)} cpus {cpu_set} {claimant} {count} {os.getpid()} {run_name}"
            self.cpu_sockets = [_bind(name)]
        self.num_cpus = count if count < most else 0
        return ""

    def release(self) -> None:
        """Release all claims of the training."""
        for claim in [*self.sockets.values(), *self.cpu_sockets]:
            claim.close()
        self.sockets = {}
        self.cpu_sockets = []


def _needed(spec: DriverSpec, kind: str) -> tuple[int, int]:
    """Return the minimum and maximum number of ``"GPU"`` or ``"CPU"`` that the workers of a training use."""
    scaling = spec.scaling
    # Ray adds a GPU to resources that have none, and no CPU.
    default = scaling.accelerator == kind.lower() and (kind == "GPU" or not scaling.resources_per_worker)
    each = scaling.resources_per_worker.get(kind, float(default))
    # The tasks of datasets use an unknown number.
    return math.ceil(each * scaling.min_workers), math.ceil(
        each * scaling.max_workers
    ) if spec.is_alone else sys.maxsize


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use, with the limit of its container."""
    cpus = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # there is no limit
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cpus = min(cpus, math.ceil(int(quota) / int(period)))
    return cpus


def _bind(name: str) -> socket.socket:
    claim = socket.socket(socket.AF_UNIX)
    claim.bind(f"\0elastic-train {name}".encode()[:107])  # the longest name
    return claim


@cache
def _uuids() -> dict[str, str]:
    """Return the UUIDs of the NVIDIA GPUs by index. In Slurm, an index may mean another GPU to another process."""
    listed = ""
    with suppress(OSError, subprocess.SubprocessError):
        smi = subprocess.Popen(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            listed = smi.communicate(timeout=_SMI_SECONDS)[0]
        finally:
            smi.kill()  # without a wait: with a GPU that hangs it does not exit even then
    return dict(re.findall(r"^GPU (\d+):.*UUID: (.+)\)", listed, re.MULTILINE))


def visible_gpus() -> dict[str, str]:
    """Map each GPU that this process may use, as named in CUDA_VISIBLE_DEVICES, to its UUID; empty if none is known.

    A GPU whose UUID is unknown is mapped to its name.
    """
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(_uuids())).split(",")
    return {name: _uuids().get(name, name) for name in map(str.strip, names) if name not in ("", "-1")}
