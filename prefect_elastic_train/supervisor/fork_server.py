"""``python -m prefect_elastic_train.supervisor.fork_server <framework> <threads>``: forks a local cluster's workers.

Most of the start of a Ray worker is imports, the same for all workers. This process imports them once, and forks for
each worker that Ray starts. A forked worker starts in milliseconds and shares the memory of the imports. Ray starts
:mod:`prefect_elastic_train.supervisor.forked_worker` in place of its own program. That sends a request to this
process, and becomes Ray's own program if no worker is forked.

The imports start no thread that a child would miss, and use no GPU. The first request brings the variables that Ray
reads when it is imported. They belong to one node; the children exit when that node exits. Workers with other
variables or another interpreter are refused: imported modules may have read the variables by then.

Uses ``ray._raylet``, whose ids come from a generator that processes must not share.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from prefect_elastic_train.core.request import FORK_SERVER_VARIABLE
from prefect_elastic_train.worker.preimports import TORCH_MODULES, TORCH_RAY_MODULES, import_ahead

#: Modules imported before the first request, which must not import Ray, and after it.
_MODULES = {"torch": TORCH_MODULES, "jax": ("jax.numpy",)}
_RAY_MODULES = {"torch": TORCH_RAY_MODULES}
_CONTROLLER = "prefect_elastic_train.controller.controller"
#: Prefixes of the variables that Ray, or its node, adds to the environment of workers.
_RAY_PREFIXES = ("RAY_", "SPT_", "PREFECT_ELASTIC_TRAIN_WORKER")
_NO_JOB = {"RAY_JOB_ID": "ffffffff"}  # as for workers that Ray starts ahead: they may serve any job
_FORK_REQUEST_SECONDS = 5.0


def serve_requests(framework: str, threads: str) -> dict[str, Any]:
    """Fork this process for each request to start a Ray worker; return the request in the forked child process.

    In the fork server itself, it does not return.

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
            with connection, suppress(OSError, ValueError):
                connection.settimeout(_FORK_REQUEST_SECONDS)
                connection.sendall(b".")
                _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
                try:
                    request = json.load(connection.makefile("rb"))
                    if is_first:
                        os.environ.update(request["environment"] | _NO_JOB)
                        _import_ray(framework)
                        is_first = False
                    requested = (_without_ray_variables(request["environment"]), request["python"])
                    if requested == (environment, sys.executable) and os.fork() == 0:
                        listener.close()
                        try:
                            connection.sendall(b".")  # sent by the child, so there is no answer if the fork failed
                        except OSError:  # the requesting process no longer waits
                            os._exit(0)
                        return {**request, "descriptors": [os.dup(descriptor) for descriptor in descriptors]}
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)


def run_worker(request: Mapping[str, Any]) -> None:
    """Run Ray's worker program in this forked process, with environment, folder and standard streams of a request."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()  # Ray kills the process group of a worker that has exited
    for number, descriptor in enumerate(request["descriptors"]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if jax := sys.modules.get("jax"):
        jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or None)  # replaces that of the imports
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(request["oom_score_adj"])
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # Python's own generator is seeded at each fork
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()  # generators of GPUs are made with the first use of a GPU
    sys.argv = request["arguments"]
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
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps children
    if _id_of_child() == _id_of_child():
        sys.exit("an import has drawn from Ray's generator, or used a GPU: workers are not forked")


def _id_of_child() -> bytes:
    """Return an id of Ray that a forked child process draws; empty if the child could not use a GPU."""
    from ray._raylet import WorkerID

    reader, writer = os.pipe()
    if os.fork() == 0:
        devices = [sys.modules[name] for name in ("torch.cuda", "torch.xpu") if name in sys.modules]
        if not any(device._is_in_bad_fork() for device in devices):
            os.write(writer, WorkerID.from_random().binary())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as stream:
        return stream.read()


def _without_ray_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(_RAY_PREFIXES)}


if __name__ == "__main__":
    sys.path[:] = [folder for folder in sys.path if folder != os.getcwd()]  # added by `python -m`
    run_worker(serve_requests(*sys.argv[1:]))
