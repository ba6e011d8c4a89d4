"""``loop.track``: shows a training in trackers."""

import re
from collections.abc import Mapping
from importlib.util import find_spec
from inspect import signature
from typing import Any

from prefect_elastic_train.trackers.tracked_run import TrackedRun
from prefect_elastic_train.trackers.tracker import Tracker

from . import context
from .restart_notice import local_context, train_context

#: Ids and names of the training that trackers get.
_IDS = ("run_id", "run_name", "run_uri", "flow_run_id", "flow_name", "deployment_name")
#: Options of ``wandb.init`` by which a restart continues the run.
_FIXED = ("id", "resume", "reinit")


def track(
    *,
    mlflow: Mapping[str, str] | None = None,
    wandb: Mapping[str, str] | None = None,
    tensorboard: Mapping[str, str] | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> Tracker:
    """Show this training in trackers: as one run in each, over all restarts, with each step once.

    Call it on all ranks before the session, and pass the result as ``loop.session(..., tracker=tracker)``. Only rank 0
    sends, in the background. A tracker that does not answer never stops the training, and gets later what it missed.
    Trackers read their credentials from their own environment variables.

    Args:
        mlflow: ``tracking_uri``: a directory, ``file:///…``, ``sqlite:///…`` or the URL of a server. ``experiment``:
            its name (default: ``"elastic-train"``), created if missing. Default: no MLflow.
        wandb: ``dir``: the folder for W&B's files; to work offline, on storage that all nodes mount. ``project``:
            its name (default: ``"elastic-train"``). Also other arguments of ``wandb.init``, such as ``name`` and
            ``mode``, but not ``id``, ``resume`` and ``reinit``. Default: no W&B.
        tensorboard: ``log_dir``: the folder of all runs, on storage that all nodes mount. Default: no TensorBoard.
        parameters: Parameters of the training, which MLflow and W&B show. Default: none.

    Raises:
        ValueError: A folder is relative, or a URL contains credentials.
        ModuleNotFoundError: The tracker's package is not installed.
        TypeError: An option is missing, unknown, no string, or one that this function sets.

    Example::

        tracker = loop.track(tensorboard={"log_dir": "/mnt/shared/tensorboard"}, parameters={"lr": 0.1})
        with loop.session(state, steps=1000, global_batch=256, tracker=tracker) as session:
            ...
    """
    train = train_context() or local_context()
    run = context.of_worker(train)
    ids = {name: getattr(run, name) for name in _IDS}
    trackers = {"mlflow": mlflow, "wandb": wandb, "tensorboard": tensorboard}
    runs = [TrackedRun(kind, ids, dict(options)) for kind, options in trackers.items() if options is not None]
    for tracked in runs:
        if not find_spec(tracked.kind):
            raise ModuleNotFoundError(
                f"not installed on this node: pip install 'prefect-elastic-train[{tracked.kind}]'"
            )
        signature(tracked.backend).bind(ids, {}, **tracked.options)
        for name, value in tracked.options.items():
            if not isinstance(value, str) or name in _FIXED:
                raise TypeError(
                    f"{tracked.kind}: leave out the option {name}. Options are strings, since they are stored in the "
                    f"run directory, and loop.track sets {', '.join(_FIXED)} itself. Use the environment variables of "
                    f"{tracked.kind} for other settings"
                )
        for name in ("tracking_uri", "dir", "log_dir"):
            uri = tracked.options.get(name, "/")
            if not re.match("/|(file|sqlite):|[a-z0-9+]+:[^@?]*$|(databricks|uc)$", uri):
                raise ValueError(
                    f"{name} of {tracked.kind} must be an absolute path, or a URL without credentials, for which"
                    f" {tracked.kind} has environment variables"
                )
    return Tracker(runs if not train or train.get_world_rank() == 0 else [], parameters or {})
