"""Lightning, transformers and a fine-tune by hand, as the documentation says: killed or not, the result is the same."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.doc_blocks import blocks_of
from tests.support.processes import ROOT, FlowProcess, Start, call

pytestmark = pytest.mark.full

#: Killed in the middle of an epoch, in an evaluation, and right after one.
KILLS = [[5, 0, "training"], [12, 0, "evaluation"], [18, 0, "after evaluation"], [20, 1, "evaluation"]]


def _block(page: str, beginning: str, folder: Path) -> Path:
    """Write the block of a page that contains a text into a file."""
    found = [block.code for block in blocks_of(ROOT / "docs" / page) if beginning in block.code]
    assert len(found) == 1, f"{page} has {len(found)} blocks with {beginning!r}"
    folder.mkdir()
    file = folder / "of_the_page.py"
    file.write_text(found[0])
    return file


def _begin(start: Start, file: Path, config: dict[str, Any], **more: Any) -> FlowProcess:
    of_torch = {"loop": "tests.support.trainer_loops:disturbed", "framework": "torch", "torch_backend": "gloo"}
    return start(
        file.parent.name,
        config={"file": str(file), "folder": str(file.parent), **config},
        scaling={"min_workers": 2, "max_workers": 2},
        failures={"max_failures": -1, "driver_restarts": 5},
        **(of_torch | more),
    )


def _lightning(folder: Path) -> Any:
    saved = torch.load(folder / "checkpoint.ckpt", weights_only=False)
    callbacks = {
        name: {key: value for key, value in state.items() if "path" not in key and key != "best_k_models"}
        for name, state in saved["callbacks"].items()
    }
    best = [torch.load(file, weights_only=False)["state_dict"] for file in sorted(folder.glob("models/*/*.ckpt"))]
    logged = torch.load(folder / "lightning-00000.pt", weights_only=False)["connector"]["_callback_metrics"]
    return saved["state_dict"], saved["lr_schedulers"], callbacks, best, logged


def _transformers(folder: Path) -> Any:
    from safetensors.torch import load_file

    state = json.loads((folder / "trainer_state.json").read_text())
    times = ("runtime", "per_second")
    log = [{k: v for k, v in line.items() if not k.endswith(times)} for line in state["log_history"]]
    weights = [load_file(folder / name) for name in ("model.safetensors", "best/model.safetensors")]
    own = torch.load(folder / "trainer-00000.pt", weights_only=False)
    return weights, log, state["best_global_step"], own["callbacks"]


def _by_hand(folder: Path) -> Any:
    return json.loads((folder / "loop.json").read_text())["step"]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


CASES = {
    "lightning": ("trainers.md", "SessionCallback(", _lightning, {"max_epochs": 12}),
    "transformers": ("trainers.md", "SessionTrainer(", _transformers, {"max_steps": 60}),
    "by hand": ("fine_tune.md", "loop.session(", _by_hand, {"epochs": 6}),
}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CASES)
def test_a_trainer_with_a_session_ends_as_if_it_had_not_been_killed(name: str, start: Start, tmp_path: Path) -> None:
    page, text, contents, config = CASES[name]
    files = [_block(page, text, tmp_path / folder) for folder in ("undisturbed", "killed")]
    flows = [_begin(start, files[0], config), _begin(start, files[1], {**config, "kills": KILLS})]
    flows[1].wait_for_commits(3)
    flows[1].living_driver().kill()
    undisturbed, killed = (flow.completed(500) for flow in flows)
    assert len(list((tmp_path / "killed").glob("killed-*"))) == len(KILLS), "not every kill happened"
    assert killed["worker_failures"] >= len(KILLS) - 1, "one may die with the driver, and is not counted"
    folders = [Path(result["checkpoint_uri"].removeprefix("file://")) for result in (undisturbed, killed)]
    assert _same(*(contents(folder) for folder in folders))
    names = {"step", "epoch", "total_steps", "samples"}
    assert {k: undisturbed["metrics"][k] for k in names} == {k: killed["metrics"][k] for k in names}
    digests = [(file.parent / f"weights-{rank}.json").read_text() for file in files for rank in range(2)]
    assert len({*digests}) == 1, "all ranks of both trainings end with the same weights"


def test_a_finished_run_of_transformers_trains_on_if_it_is_given_more_steps(start: Start, tmp_path: Path) -> None:
    file = _block("trainers.md", "SessionTrainer(", tmp_path / "longer")
    for steps, more in ((8, {}), (12, {"resume": True})):
        flow = _begin(start, file, {"max_steps": steps}, storage=str(tmp_path / "runs"), run_name="longer", **more)
        assert flow.completed(300)["metrics"]["step"] == steps


def test_the_fine_tune_of_the_page_runs_under_torchrun(tmp_path: Path) -> None:
    file = _block("fine_tune.md", "init_process_group", tmp_path / "torchrun")
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", file)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    assert "steps: 48" in call(*command, folder=file.parent, timeout=300, env=environment)
    assert (file.parent / "best.pt").exists()


@pytest.mark.parametrize("framework", ["xgboost", "lightgbm"])
def test_boosted_trees_continue_from_their_checkpoint_whatever_is_killed(
    framework: str, start: Start, tmp_path: Path
) -> None:
    file = _block("trainers.md", f"{framework}.train(", tmp_path / framework)
    loop = {"loop": "tests.support.trainer_loops:boosted", "framework": framework, "torch_backend": ""}
    flow = _begin(start, file, {"rounds": 40, "kills": [[7, 1], [12, 0]]}, **loop)
    flow.wait_for_commits(3)
    flow.living_driver().kill()
    result = flow.completed(300)
    assert len(list(file.parent.glob("killed-*"))) == 2, "not every kill happened"
    folder = Path(result["checkpoint_uri"].removeprefix("file://"))
    if framework == "xgboost":
        import xgboost

        assert xgboost.Booster(model_file=folder / "model.ubj").num_boosted_rounds() == 40
    else:
        import lightgbm

        assert lightgbm.Booster(model_file=folder / "model.txt").num_trees() == 40
