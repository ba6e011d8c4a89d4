"""Claims of local clusters on the GPUs of their machine, so that a GPU is used by one cluster at a time.

A claim is an abstract Unix socket whose name contains the GPU and the claiming training. The kernel lists all names in
``/proc/net/unix``, for all users of the machine, and removes a name when the last process that holds the socket has
exited, however it ended. There is no file that could be left behind, deleted or unreadable. The flow process and the
head of the cluster hold the sockets. Containers with their own network do not see each other's claims. Processes
other than local clusters of this package make no claims, so GPUs that they use count as free.
"""

import errno
import math
import os
import re
import secrets
import socket
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path

from prefect_elastic_train.core.outcomes import AttemptFailedError
from prefect_elastic_train.core.request import DriverSpec

#: After a random part: UUID of the GPU, process id of the flow, and run name.
_CLAIM = re.compile("@elastic-train [0-9a-f]+ gpu (.+?) ([0-9]+) (.*)")
_SMI_SECONDS = 20.0


class DeviceClaims:
    """The GPU claims of one training's local clusters, kept until :meth:`release`.

    Attributes:
        sockets: The socket of each claimed GPU, by the GPU's name in CUDA_VISIBLE_DEVICES. Empty if the GPUs of the
            machine are unknown.
    """

    def __init__(self) -> None:
        self.sockets: dict[str, socket.socket] = {}
        os.register_at_fork(after_in_child=self.release)  # a forked process must not keep the claims

    def claim(self, spec: DriverSpec) -> str:
        """Claim the GPUs that a training's local cluster needs, unless they are claimed already.

        Returns the reason why the local cluster must wait for GPUs, or an empty text if it need not.

        Raises:
            AttemptFailedError: The local cluster needs more GPUs than this process may use.
        """
        least, most = _needed_gpus(spec)
        if self.sockets or not least:
            return ""
        gpus = visible_gpus()
        if gpus and least > len(gpus):
            raise AttemptFailedError(
                f"the local cluster needs {least} GPUs, and this process may use {len(gpus)}: "
                f"{', '.join(gpus)}. Lower min_workers or num_gpus"
            )
        try:
            with _bind("lock"):  # one process at a time reads the claims and makes its own
                claims = _CLAIM.findall(Path("/proc/net/unix").read_text(errors="replace"))
                users = {uuid: f"training {run!r} (pid {pid})" for uuid, pid, run in claims}
                free = [name for name, uuid in gpus.items() if uuid not in users]
                if gpus and len(free) < least:
                    used = "; ".join(f"GPU {name} is used by {users[gpus[name]]}" for name in gpus if name not in free)
                    return f"{used}; the local cluster waits for GPUs: {least}"
                self.sockets = {
                    name: _bind(f"{secrets.token_hex(3)} gpu {gpus[name]} {os.getpid()} {spec.request.run_name}")
                    for name in free[:most]
                }
        except OSError as error:  # without abstract sockets nothing is claimed
            return "another local cluster claims its GPUs" if error.errno == errno.EADDRINUSE else ""
        return ""

    def release(self) -> None:
        """Release all GPU claims of the training."""
        for claim in self.sockets.values():
            claim.close()
        self.sockets = {}


def _needed_gpus(spec: DriverSpec) -> tuple[int, int | None]:
    """Return the minimum and maximum number of GPUs of a local cluster; maximum None: as many as are free."""
    if spec.cluster.num_gpus >= 0:
        return spec.cluster.num_gpus, spec.cluster.num_gpus
    scaling = spec.scaling
    each = scaling.resources_per_worker.get("GPU", float(scaling.accelerator == "gpu"))
    # The tasks of datasets use an unknown number of GPUs.
    most = math.ceil(each * scaling.max_workers) if spec.is_alone else None
    return math.ceil(each * scaling.min_workers), most


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
