"""``python -m prefect_elastic_train.supervisor.fork_server <framework> <threads>``: forks a local cluster's workers.

Most of the boot of one of Ray's workers is imports, the same for all of them. This process does them once, and forks
for each worker that Ray starts: that is there in some milliseconds, and shares the memory of the imports. Ray starts
:mod:`prefect_elastic_train.supervisor.forked_worker` in place of its own program, which asks here, and becomes Ray's
own program if nobody answers.

What is imported leaves no thread behind that a child would miss, and touches no GPU. What Ray reads from its
environment when it is imported comes with the first request, and is that of one node, whose end the children look for.
Workers with variables or an interpreter of their own are refused: modules may have read the others by now.

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
from prefect_elastic_train.elastic.warming import TORCH_MODULES, TORCH_RAY_MODULES, import_ahead

#: What comes before the first step of a loop: what does not import Ray, and what does, as all that follows it.
_MODULES = {"torch": TORCH_MODULES, "jax": ("jax.numpy",)}
_RAY_MODULES = {"torch": TORCH_RAY_MODULES}
_CONTROLLER = "prefect_elastic_train.elastic.controller"
_RAYS = ("RAY_", "SPT_", "PREFECT_ELASTIC_TRAIN_WORKER")  # what Ray, or its node, adds to the environment of workers
_OF_NO_JOB = {"RAY_JOB_ID": "ffffffff"}  # as Ray's own that boot ahead: they may serve any
_REQUEST_SECONDS = 5.0


def serve(framework: str, threads: str) -> dict[str, Any]:
    """Fork for each request; return what is asked for in the process that it is asked for."""
    environment = _plain(os.environ)
    is_first = True
    # Read when torch, numpy or JAX is imported; Ray tells the one its actors, and we the others.
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
                connection.settimeout(_REQUEST_SECONDS)
                connection.sendall(b".")
                _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
                try:
                    request = json.load(connection.makefile("rb"))
                    if is_first:
                        os.environ.update(request["environment"] | _OF_NO_JOB)
                        _import_ray(framework)
                        is_first = False
                    is_same = (_plain(request["environment"]), request["python"]) == (environment, sys.executable)
                    if is_same and os.fork() == 0:
                        listener.close()
                        try:
                            connection.sendall(b".")  # by the child: if none was forked, there is no answer
                        except OSError:  # nobody waits for it any more
                            os._exit(0)
                        return {**request, "descriptors": [os.dup(one) for one in descriptors]}
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)


def become(request: Mapping[str, Any]) -> None:
    """Be what was asked for, with its environment, folder, and standard streams."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()  # Ray ends the process group of a worker that is gone
    for number, descriptor in enumerate(request["descriptors"]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if jax := sys.modules.get("jax"):
        jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or None)  # no longer that of the imports
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(request["oom_score_adj"])
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # Python's own generator has a new seed by now
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()  # those of GPUs come later, with the first use of one
    sys.argv = request["arguments"]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _import_ray(framework: str) -> None:
    """Import what imports Ray, without a draw from Ray's generator, whose state all children would have.

    They would give the same ids to different tasks.
    """
    from ray import actor

    kind = actor.ActorClassID  # each class of actors gets one
    actor.ActorClassID = SimpleNamespace(from_random=lambda: kind(os.urandom(kind.size())))
    import_ahead((*_RAY_MODULES.get(framework, ()), _CONTROLLER))
    actor.ActorClassID = kind
    gc.freeze()  # what is never collected stays shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets children that have ended
    if _draw() == _draw():
        sys.exit("an import has drawn from Ray's generator, or used a GPU: workers are not forked")


def _draw() -> bytes:
    """Return what a child draws; nothing if it could not use a GPU."""
    from ray._raylet import WorkerID

    reader, writer = os.pipe()
    if os.fork() == 0:
        devices = [one for name in ("torch.cuda", "torch.xpu") if (one := sys.modules.get(name))]
        if not any(one._is_in_bad_fork() for one in devices):
            os.write(writer, WorkerID.from_random().binary())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as stream:
        return stream.read()


def _plain(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(_RAYS)}


if __name__ == "__main__":
    sys.path[:] = [folder for folder in sys.path if folder != os.getcwd()]  # there since this is run as a module
    become(serve(*sys.argv[1:]))
