"""Sessions through kills, growth, drains and losses: every sample once, and the weights of an undisturbed training."""

from pathlib import Path

import pytest

from prefect_elastic_train import TrainingResult, loop
from prefect_elastic_train.core.version import ray_minor
from prefect_elastic_train.runs.run_directory import RunDirectory
from prefect_elastic_train.runs.sample_check import check_samples
from prefect_elastic_train.storage.store import LocalRunStore
from tests.support.clusters import ElasticCluster
from tests.support.processes import FlowProcess, Start, commits, read_ledger, repeated, steps_of
from tests.support.session_loops import array_loop, same_weights, score_of
from tests.support.session_training import SessionTraining

pytestmark = pytest.mark.full

OFTEN = {"resize_check_interval_seconds": 1, "stability_delay_seconds": 1}
GPUS = {"accelerator": "gpu", "resources_per_worker": {"GPU": 1}, "max_workers": 3, "standby": "auto", **OFTEN}


@pytest.mark.parametrize("shards", [0, 16])
def test_every_sample_counts_once_whatever_the_number_of_workers_and_whoever_dies(
    start: Start, cluster: ElasticCluster, tmp_path: Path, shards: int
) -> None:
    """With shards, the weights are also those of one undisturbed worker, bit for bit."""
    training = SessionTraining(start, tmp_path, "torch", GPUS, cluster=cluster.block, shards=shards)
    cluster.add_gpu()
    training.group(1)
    cluster.add_gpu()
    cluster.add_gpu()
    three = training.group(3)
    three = training.group(3, dead=[three[1]["pid"]])
    three = training.group(3, dead=[training.flow.living_driver().pid])
    cluster.drain(three[2]["node"], 30)
    training.group(2)
    assert {1, 3, 2} <= {*training.end(attempts=2, worker_failures=1, preemptions=1)}


@pytest.mark.parametrize(("framework", "fsdp"), [("torch", True), ("jax", False)])
def test_shards_of_two_workers_go_on_with_one_and_with_two_again(
    start: Start, cluster: ElasticCluster, tmp_path: Path, framework: str, fsdp: bool
) -> None:
    cluster.add_gpu(), cluster.add_gpu()
    training = SessionTraining(start, tmp_path, framework, GPUS, fsdp, cluster=cluster.block)
    cluster.remove(training.group(2)[1]["node"])
    training.group(1)
    cluster.add_gpu()
    training.group(2)
    assert training.end(attempts=1, worker_failures=1) == [2, 1, 2]


@pytest.mark.parametrize("points", ["off", 1])
def test_scores_are_those_of_their_checkpoints_weights_and_a_killed_evaluation_is_done_again(
    start: Start, ledger: str, points: int | str
) -> None:
    config = {"recovery_points": points, "steps": 100, "save_every": 12, "ledger": ledger, "dies": [[30, 0], [60, 0]]}
    policy = {"score_attribute": "val_loss", "score_order": "min"}
    flow = start(loop="tests.support.session_loops:evaluating_loop", config=config, checkpoints=policy)
    result = TrainingResult.model_validate(flow.completed(180))
    assert result.worker_failures == 2
    table = result.metrics_dataframe().dropna(subset="val_loss")
    assert sorted(set(table["step"])) == [*range(10, 101, 10)], "no evaluation is lost"
    found, weights = {}, loop.ArrayState(weights=0.0)
    for made in commits(flow.run)[-1]["snapshot"]["checkpoint_results"]:
        weights.read(flow.run / made["checkpoint_dir_name"])
        found[float(weights.weights)] = made["metrics"].get("val_loss")
    evaluated = {step: score_of(step) for step in range(10, 101, 10)}
    assert found == {**dict.fromkeys(range(12, 100, 12)), **evaluated}
    with result.checkpoint_directory(best=True) as folder:
        weights.read(folder)
    assert weights.weights == 30


#: The setting that a session ignores, where Ray has it.
RELAXED = {"relax_collectives_on_preemption": True} if ray_minor() >= (2, 60) else {}


@pytest.mark.parametrize("dies", [False, True])
def test_a_drain_commits_the_parts_of_all_ranks_or_nothing_also_if_the_drained_rank_is_slower_to_store_its_own(
    start: Start, cluster: ElasticCluster, tmp_path: Path, dies: bool
) -> None:
    cluster.add_gpu(), cluster.add_gpu()
    ledger, weights, undisturbed = (tmp_path / name for name in ("ledger.jsonl", "weights.npz", "undisturbed.npz"))
    config = {"steps": 150, "save_every": 40, "weights": str(weights)}
    disturbed = {"ledger": str(ledger), "sleep": 0.05, "upload_seconds": 2.0, "dies": dies}
    flow: FlowProcess = start(
        loop="tests.support.session_loops:array_loop",
        config={**config, **disturbed},
        scaling={"accelerator": "gpu", "max_workers": 2, "resize_check_interval_seconds": 1},
        failures={"max_failures": 0, "driver_restarts": 0} | RELAXED,
        checkpoints={"keep": 1},
        cluster=cluster.block,
    )
    flow.wait_for(lambda: len(steps_of(ledger)) > 60 and commits(flow.run), 240, "a commit of two ranks")
    newest = [line for line in read_ledger(ledger) if line["rank"] == 1][-1]
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
    assert (run.resume_point.repairs, check.wrong, check.exact) == ([], [], True)
