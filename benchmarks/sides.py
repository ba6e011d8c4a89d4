"""What is measured against what, each side as the script that a person would write.

One fresh process a side: `python -m benchmarks.sides SIDE SETTINGS`, with `SideSettings` as JSON.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Literal

from benchmarks.loops import WORKERS, SideSettings, metrics_loop, ray_loop, session_loop, torchrun_loop

NO_STANDBY = "BENCHMARK_NO_STANDBY"
"""Environment variable of a side of ours that shall have no standby workers."""
FORK = "BENCHMARK_FORK"
"""Environment variable of a side whose workers are forked, on a local cluster."""
PRESTART = "BENCHMARK_PRESTART"
"""Environment variable of a side whose next driver is started ahead of time."""
RESIZE_CHECK_SECONDS = 2.0
"""How often the growing sides look whether they could grow; both defaults are 60 s."""


def run_ours(settings: SideSettings) -> None:
    """Run a flow that trains with elastic_train."""
    from prefect_elastic_train import ElasticScaling

    _train(settings, scaling=ElasticScaling(min_workers=1, max_workers=WORKERS, standby=_standby()))


def run_ours_points(settings: SideSettings) -> None:
    """Run a flow that trains with elastic_train and a session with recovery points."""
    from prefect_elastic_train import ElasticScaling

    scaling = ElasticScaling(min_workers=1, max_workers=WORKERS, standby=_standby())
    _train(settings, train_loop=session_loop, scaling=scaling)


def run_ours_warm(settings: SideSettings) -> None:
    """Run a flow that trains with elastic_train, with the warm starts that environment variables select."""
    from prefect_elastic_train import ElasticScaling
    from prefect_elastic_train.supervisor import driver_handle

    # The next driver is started soon after the last one, so that kills need not be a minute apart.
    driver_handle._PRESTART_SECONDS = 5.0 if PRESTART in os.environ else float("inf")
    standby = "off" if NO_STANDBY in os.environ else "on"
    # Workers with a runtime environment of their own are not forked.
    environment = {} if settings.cluster_address or FORK in os.environ else {"env_vars": {"BENCHMARK": "1"}}
    scaling = ElasticScaling(min_workers=WORKERS, max_workers=WORKERS, standby=standby)
    _train(settings, environment, scaling=scaling)


def run_ours_growing(settings: SideSettings) -> None:
    """Run a flow that trains with elastic_train on an existing cluster, with as many workers as fit."""
    from prefect_elastic_train import ElasticScaling

    scaling = ElasticScaling(
        min_workers=1,
        max_workers=WORKERS,
        resize_check_interval_seconds=RESIZE_CHECK_SECONDS,
        stability_delay_seconds=0,
        standby=_standby(),
    )
    _train(settings, scaling=scaling)


def run_ours_reporting(settings: SideSettings) -> None:
    """Run a flow that trains with elastic_train, with a loop that reports at each step."""
    from prefect_elastic_train import ElasticScaling

    _train(
        settings,
        train_loop=metrics_loop,
        framework="none",
        scaling=ElasticScaling(min_workers=WORKERS, max_workers=WORKERS),
    )


def _train(settings: SideSettings, runtime_env: dict[str, Any] | None = None, **options: Any) -> None:
    """Run a flow that trains on the cluster of the settings, else on a local one; ``options`` are elastic_train's."""
    from prefect import flow

    from prefect_elastic_train import FailureBudget, LocalStorage, RayCluster, elastic_train

    if settings.cluster_address:
        cluster = RayCluster(address=settings.cluster_address, auth_token=os.environ["RAY_AUTH_TOKEN"])
    else:
        cluster = RayCluster(num_cpus=WORKERS, runtime_env=runtime_env or {})
    defaults = {
        "train_loop": ray_loop,
        "train_loop_config": settings.loop.to_config(),
        "framework": "torch",
        "failures": FailureBudget(
            max_failures=settings.failures,
            driver_restarts=settings.failures,
            max_attempts_without_progress=max(2, settings.failures),
            driver_restart_delay_seconds=0,
        ),
        "storage": LocalStorage(path=settings.storage),
        "cluster": cluster,
        "run_name": settings.run_name,
    }

    @flow(name="benchmark")
    def benchmark() -> None:
        elastic_train(**(defaults | options))

    benchmark()


def _standby() -> Literal["auto", "off"]:
    return "off" if os.environ.get(NO_STANDBY) else "auto"


def run_raw(settings: SideSettings) -> None:
    """Raw Ray Train on a cluster of its own. Run again, it resumes by its run name."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=WORKERS, _temp_dir=settings.temp_dir)
    TorchTrainer(
        ray_loop,
        train_loop_config=settings.loop.to_config(),
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(
            name=settings.run_name,
            storage_path=settings.storage,
            failure_config=FailureConfig(max_failures=settings.failures),
        ),
    ).fit()


def run_raw_growing(settings: SideSettings) -> None:
    """Raw Ray Train on a cluster that is there, with as many workers as fit."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(address=settings.cluster_address)
    TorchTrainer(
        ray_loop,
        train_loop_config=settings.loop.to_config(),
        scaling_config=ScalingConfig(num_workers=(1, WORKERS), elastic_resize_monitor_interval_s=RESIZE_CHECK_SECONDS),
        run_config=RunConfig(name=settings.run_name, storage_path=settings.storage),
    ).fit()


def run_raw_reporting(settings: SideSettings) -> None:
    """Raw Ray Train on a cluster of its own, with a loop that reports at each step."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    ray.init(num_cpus=WORKERS, _temp_dir=settings.temp_dir)
    DataParallelTrainer(
        metrics_loop,
        train_loop_config=settings.loop.to_config(),
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(name=settings.run_name, storage_path=settings.storage),
    ).fit()


def run_supervisor(settings: SideSettings) -> None:
    """A flow process that follows a simulated run."""
    from benchmarks.reporting import follow_simulated_run

    follow_simulated_run(settings)


def run_replay(settings: SideSettings) -> None:
    """The report of a simulated run's whole history."""
    from benchmarks.reporting import replay_history

    replay_history(settings)


def run_torchrun(settings: SideSettings) -> None:
    """One worker of torchrun."""
    torchrun_loop(settings.loop, settings.storage)


ENTRY_POINTS = {
    "ours": run_ours,
    "ours-growing": run_ours_growing,
    "ours-points": run_ours_points,
    "ours-reporting": run_ours_reporting,
    "ours-warm": run_ours_warm,
    "raw": run_raw,
    "raw-growing": run_raw_growing,
    "raw-reporting": run_raw_reporting,
    "replay": run_replay,
    "supervisor": run_supervisor,
    "torchrun": run_torchrun,
}


if __name__ == "__main__":
    ENTRY_POINTS[sys.argv[1]](SideSettings.from_json(sys.argv[2]))
