"""Sessions through kills, growth, drains and losses: every sample once, and the weights of an undisturbed training."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import psutil
import pytest

from prefect_elastic_train import TrainingResult, loop
from prefect_elastic_train.runs.run_directory import RunDirectory
from prefect_elastic_train.runs.sample_check import check_samples
from prefect_elastic_train.storage.store import LocalRunStore
from tests.support.clusters import ElasticCluster
from tests.support.processes import FlowProcess, Start, commits, read_ledger, repeated, steps_of
from tests.support.session_loops import array_loop, jax_loop, problems, same_weights, score_of, torch_loop

STEPS = 800


class Training:
    """A training with a session, slow until it is let go."""

    def __init__(self, start: Start, cluster: ElasticCluster, folder: Path, name: str, **config: Any) -> None:
        self._loop = {"torch_loop": torch_loop, "jax_loop": jax_loop}[name]
        self.ledger, self.weights, self._slow = (folder / name for name in ("ledger.jsonl", "weights.npz", "slow"))
        self._slow.touch()
        self.config = {"length": 200, "global_batch": 20, "save_every": 25, **config}
        of_epoch = math.ceil(self.config["length"] / self.config["global_batch"])
        self.epochs = math.ceil(STEPS / of_epoch)
        self.config["steps"] = self.epochs * of_epoch
        files = {"ledger": str(self.ledger), "weights": str(self.weights), "slow": str(self._slow), "sleep": 0.1}
        resources = {"accelerator": "gpu", "resources_per_worker": {"GPU": 1}, "max_workers": 4, "standby": "auto"}
        self.flow: FlowProcess = start(
            loop=f"tests.support.session_loops:{name}",
            framework=name.partition("_")[0],
            torch_backend="gloo" if name == "torch_loop" else None,  # the GPUs are pretended ones
            config={**self.config, **files},
            scaling={**resources, "resize_check_interval_seconds": 1, "stability_delay_seconds": 1},
            failures={**dict.fromkeys(("driver_restarts", "max_attempts_without_progress"), 10), "max_failures": -1},
            cluster=cluster.block,
        )

    def lines(self) -> list[dict[str, Any]]:
        """The ledger as far as it is written."""
        return read_ledger(self.ledger) if self.ledger.exists() else []

    def wait_for_group(self, world: int, new: bool = True) -> list[dict[str, Any]]:
        """Wait until a group of so many workers has done some steps, and return its newest lines by rank."""
        known = {line["group"] for line in self.lines()} if new else set()

        def trains() -> list[dict[str, Any]] | None:
            of_group = [one for one in self.lines() if one["world"] == world and one["group"] not in known]
            newest = {one["rank"]: one for one in of_group}
            far = len({one["step"] for one in of_group}) >= 8
            return [newest[rank] for rank in sorted(newest)] if far and len(newest) == world else None

        return self.flow.wait_for(trains, 120, f"{world} workers") or []

    def end(self) -> dict[str, Any]:
        """Let it go, and return its result: each sample counted once, also by the ledger of the run itself.

        The weights are those of one worker that nobody disturbs.
        """
        self._slow.unlink()
        result, steps, length = self.flow.completed(300), self.config["steps"], self.config["length"]
        assert problems(str(self.ledger), steps, length) == []
        check = check_samples(RunDirectory(LocalRunStore(str(self.flow.run))))
        assert check is not None
        assert (check.steps, check.samples, check.wrong, check.exact) == (steps, self.epochs * length, [], True)
        undisturbed = str(self.weights.with_name("undisturbed.npz"))
        self._loop({**self.config, "weights": undisturbed, "fsdp": False})
        assert same_weights(self.weights, undisturbed, relative=1e-5)
        return result


def _kill(line: dict[str, Any]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(line["pid"]).kill()


def test_every_sample_counts_once_whatever_the_number_of_workers_and_whoever_dies(
    start: Start, cluster: ElasticCluster, tmp_path: Path
) -> None:
    training = Training(start, cluster, tmp_path, "torch_loop")
    cluster.add_gpu()
    training.wait_for_group(1)
    cluster.add_gpu()
    _kill(training.wait_for_group(2)[1])
    cluster.add_gpu()
    cluster.add_gpu()
    training.wait_for_group(4)
    training.flow.living_driver().kill()
    _kill(training.wait_for_group(4)[0])
    cluster.drain(training.wait_for_group(4)[2]["node"], 30)
    training.wait_for_group(3)
    result = training.end()
    assert (result["attempts"], result["worker_failures"], result["preemptions"]) == (2, 2, 1)
    assert {1, 2, 4, 3} <= {change["size"] for change in result["world_sizes"]}


@pytest.mark.full
@pytest.mark.parametrize(("name", "config"), [("torch_loop", {"fsdp": True}), ("jax_loop", {})])
def test_shards_of_two_workers_go_on_with_one_and_with_two_again(
    start: Start, cluster: ElasticCluster, tmp_path: Path, name: str, config: dict[str, Any]
) -> None:
    nodes = [cluster.add_gpu(), cluster.add_gpu()]
    training = Training(start, cluster, tmp_path, name, **config)
    lost = training.wait_for_group(2)[1]["node"]
    assert lost in nodes
    cluster.remove(lost)
    training.wait_for_group(1)
    cluster.add_gpu()
    training.wait_for_group(2)
    result = training.end()
    assert [change["size"] for change in result["world_sizes"]] == [2, 1, 2]


def test_scores_are_those_of_their_checkpoints_weights_and_a_killed_evaluation_is_done_again(
    start: Start, ledger: str
) -> None:
    config = {"steps": 100, "save_every": 12, "ledger": ledger, "dies": [[30, 0], [60, 0]]}
    policy = {"score_attribute": "val_loss", "score_order": "min"}
    flow = start(
        loop="tests.support.session_loops:evaluating_loop", framework="none", config=config, checkpoints=policy
    )
    result = TrainingResult.model_validate(flow.completed(180))
    assert result.worker_failures == 2
    table = result.metrics_dataframe().dropna(subset="val_loss")
    assert sorted(set(table["step"])) == [*range(10, 101, 10)], "no evaluation is lost"
    [newest] = commits(flow.run)[-1:]
    found = {}
    for made in newest["snapshot"]["checkpoint_results"]:
        weights = loop.ArrayState(weights=0.0)
        weights.read(flow.run / made["checkpoint_dir_name"])
        found[float(weights.weights)] = made["metrics"].get("val_loss")
    assert found == {
        step: score_of(step) if step % 10 == 0 else None for step in {*range(10, 101, 10), *range(12, 100, 12)}
    }
    with result.checkpoint_directory(best=True) as folder:
        weights.read(folder)
    assert weights.weights == 30


@pytest.mark.parametrize(
    ("relax", "dies"),
    [(True, False), *(pytest.param(*case, marks=pytest.mark.full) for case in ((False, False), (True, True)))],
)
def test_a_drain_commits_the_parts_of_all_ranks_or_nothing_also_if_the_drained_rank_is_slower_to_store_its_own(
    start: Start, cluster: ElasticCluster, tmp_path: Path, relax: bool, dies: bool
) -> None:
    cluster.add_gpu()
    cluster.add_gpu()
    ledger, weights, undisturbed = (tmp_path / name for name in ("ledger.jsonl", "weights.npz", "undisturbed.npz"))
    config = {"steps": 150, "save_every": 40, "weights": str(weights)}
    disturbed = {"ledger": str(ledger), "sleep": 0.05, "upload_seconds": 2.0, "dies": dies}
    flow: FlowProcess = start(
        loop="tests.support.session_loops:array_loop",
        config={**config, **disturbed},
        scaling={"accelerator": "gpu", "max_workers": 2, "resize_check_interval_seconds": 1},
        failures={"max_failures": 0, "driver_restarts": 0, "relax_collectives_on_preemption": relax},
        checkpoints={"keep": 1},
        cluster=cluster.block,
    )
    flow.wait_for(lambda: len(steps_of(ledger)) > 60 and commits(flow.run), 240, "a commit of two ranks")
    newest = [line for line in read_ledger(ledger) if line["rank"] == 1][-1]
    assert newest["world"] == 2
    cluster.drain(newest["node"], 10)
    result = flow.completed(240)
    assert (result["attempts"], result["worker_failures"], result["preemptions"]) == (1, 0, 1)
    assert [change["size"] for change in result["world_sizes"]] == [2, 1]
    assert repeated(steps_of(ledger)) <= (40 if dies else 0)
    for commit in commits(flow.run):
        for files in commit["manifest"].values():
            sizes = {int(file.partition("-of-")[2][:5]) for file in files if "-of-" in file}
            assert [sum("-of-" in file for file in files)] == list(sizes), files
    array_loop({**config, "weights": str(undisturbed)})
    assert same_weights(weights, undisturbed)
    run = RunDirectory(LocalRunStore(str(flow.run)))
    check = check_samples(run)
    assert check is not None
    assert (run.resume_point.repairs, check.wrong, check.exact) == ([], [], True)


def test_a_training_does_not_grow_beyond_the_samples_of_its_global_batch(
    start: Start, cluster: ElasticCluster, tmp_path: Path
) -> None:
    cluster.add_gpu()
    ledger = tmp_path / "ledger.jsonl"
    flow: FlowProcess = start(
        loop="tests.support.session_loops:array_loop",
        config={
            "steps": 400,
            "save_every": 20,
            "global_batch": 1,
            "sleep": 0.05,
            "weights": str(tmp_path / "weights.npz"),
            "ledger": str(ledger),
        },
        scaling={
            "accelerator": "gpu",
            "max_workers": 2,
            "resize_check_interval_seconds": 1,
            "stability_delay_seconds": 0,
        },
        failures={"max_failures": 0, "driver_restarts": 0},
        cluster=cluster.block,
    )
    flow.wait_for(lambda: len(steps_of(ledger)) > 40, 150, "steps")
    cluster.add_gpu()
    result = flow.completed(180)
    assert (result["attempts"], result["resizes"], result["metrics"]["step"]) == (1, 0, 400)
    assert flow.log.count("At most 1 worker(s) will train") == 1
