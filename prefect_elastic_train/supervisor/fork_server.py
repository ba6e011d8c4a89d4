"""``python -m prefect_elastic_train.supervisor.fork_server <framework> <threads>``: forks a local cluster's workers.

Most of the start of a Ray worker is imports, the same for all workers. This process imports them once, and forks for
each worker that Ray starts. A forked worker starts in milliseconds and shares the memory of the imports. Ray starts
:mod:`prefect_elastic_train.supervisor.forked_worker` in place of its own worker program. That process connects to the
fork server and waits. The forked worker reads arguments, environment and folder of the waiting process from ``/proc``.
If no worker is forked, the waiting process runs Ray's own program.

The imports start no thread that a child would miss, and use no GPU. The first request brings the variables that Ray
reads when it is imported. They belong to one node; the children exit when that node exits. Workers with other
variables or another interpreter are refused: imported modules may have read the variables by then.

Uses ``ray._raylet``, whose ids come from a generator that processes must not share.
"""

import gc
import os
import runpy
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil

from prefect_elastic_train.core.request import FORK_SERVER_VARIABLE
from prefect_elastic_train.worker.preimports import TORCH_MODULES, TORCH_RAY_MODULES, import_ahead

from .forked_worker import WORKER_VARIABLE

#: Modules imported before the first request, which must not import Ray, and after it.
_MODULES = {"torch": TORCH_MODULES, "jax": ("jax.numpy",)}
_RAY_MODULES = {"torch": TORCH_RAY_MODULES}
_CONTROLLER = "prefect_elastic_train.controller.controller"
#: Prefixes of the variables that Ray, or its node, adds to the environment of workers.
_RAY_PREFIXES = ("RAY_", "SPT_", "PREFECT_ELASTIC_TRAIN_WORKER")


def serve_requests(framework: str, threads: str) -> None:
    """Fork this process for each request to start a Ray worker.

    Returns only in the forked child processes, never in the fork server itself.

    Args:
        framework: Framework whose modules are imported before the first request.
        threads: Default of ``OMP_NUM_THREADS``.
    """
    environment = _without_ray_variables(os.environ)
    is_first = True
    # Read when torch, numpy or JAX is imported. Ray sets it for actors, but not before these imports.
    os.environ.setdefault("OMP_NUM_THREADS", threads)
    if framework == "jax":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.environ[FORK_SERVER_VARIABLE])
        listener.listen(128)
        import_ahead(_MODULES.get(framework, ()))
        while True:
            connection, _ = listener.accept()
            with connection, suppress(OSError, psutil.Error):
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                requester = psutil.Process(struct.unpack("3i", credentials)[0])
                requested = requester.environ()
                if (_without_ray_variables(requested), requester.cmdline()[:1]) != (environment, [sys.executable]):
                    continue
                if is_first:
                    # No job, as for workers that Ray starts ahead: they may serve any job.
                    os.environ.update(requested, RAY_JOB_ID="ffffffff")
                    _import_ray(framework)
                    is_first = False
                if os.fork() == 0:
                    listener.close()
                    try:
                        _copy_process_settings(requester)
                        connection.sendall(b".")  # sent by the child, so there is no answer if the fork failed
                    except (OSError, psutil.Error):  # the requester no longer waits
                        os._exit(0)
                    return


def _copy_process_settings(requester: psutil.Process) -> None:
    """Copy arguments, environment, folder, output and memory priority of the waiting requester to this process."""
    for number in (1, 2):
        os.dup2(os.open(f"/proc/{requester.pid}/fd/{number}", os.O_WRONLY | os.O_APPEND), number)
    Path("/proc/self/oom_score_adj").write_text(Path(f"/proc/{requester.pid}/oom_score_adj").read_text())  # set by Ray
    os.chdir(requester.cwd())
    sys.argv = requester.cmdline()[1:]
    os.environ.clear()
    os.environ.update(requester.environ())


def run_worker() -> None:
    """Run Ray's worker program in this forked process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()  # Ray kills the process group of a worker that has exited
    if jax := sys.modules.get("jax"):
        jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or None)  # replaces that of the imports
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # Python's own generator is seeded at each fork
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()  # generators of GPUs are made with the first use of a GPU
    sys.argv[0] = os.environ[WORKER_VARIABLE]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _import_ray(framework: str) -> None:
    """Import Ray and the modules that import it, without drawing an id from Ray's random generator.

    The forked children would all have the generator's state after that draw, and assign the same ids to different
    tasks.
    """
    from ray import actor

    id_type = actor.ActorClassID  # each actor class draws an id
    actor.ActorClassID = SimpleNamespace(from_random=lambda: id_type(os.urandom(id_type.size())))
    import_ahead((*_RAY_MODULES.get(framework, ()), _CONTROLLER))
    actor.ActorClassID = id_type
    gc.freeze()  # objects that are never collected stay in shared memory
    if _id_of_child() == _id_of_child():
        sys.exit("an import has drawn from Ray's generator, or used a GPU: workers are not forked")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the workers


def _id_of_child() -> bytes:
    """Return an id of Ray that a forked child process draws; empty if the child could not use a GPU."""
    from ray._raylet import WorkerID

    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        devices = [sys.modules[name] for name in ("torch.cuda", "torch.xpu") if name in sys.modules]
        if not any(device._is_in_bad_fork() for device in devices):
            os.write(writer, WorkerID.from_random().binary())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader, "rb") as stream:
        return stream.read()


def _without_ray_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(_RAY_PREFIXES)}


if __name__ == "__main__":
    sys.path[:] = [folder for folder in sys.path if folder != os.getcwd()]  # added by `python -m`
    serve_requests(*sys.argv[1:])
    run_worker()
