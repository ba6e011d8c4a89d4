"""`elastic-train run`: a training from a shell, with saved blocks, a config file and settings."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, StateType
from typer.testing import CliRunner

from prefect_elastic_train import FailureBudget, LocalStorage, RayCluster, S3Storage, TrainingResult
from prefect_elastic_train.cli import app
from tests.support.processes import attempts, free_port, run_folder, steps_of, wait_for

pytestmark = pytest.mark.usefixtures("api")

TOKEN, LOOP = "CANARY seven sisters", "my_project/loops.py:train_loop"
LOOPS = '''
"""Loops of a project that is not installed."""

import tempfile
import time

print("printed by the module")


def train_loop(config):
    import ray.train

    from beside_it import write_step

    checkpoint = ray.train.get_checkpoint()
    first = int(open(f"{checkpoint.path}/step").read()) + 1 if checkpoint else 1
    for step in range(first, config["steps"] + 1):
        time.sleep(config.get("sleep", 0))
        write_step(config, step, first)
        folder = tempfile.mkdtemp()
        open(f"{folder}/step", "w").write(str(step))
        metrics = {"step": step, "first": first, "lr": config["optimizer"]["lr"], "nothing": float("nan")}
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))
'''
BESIDE_IT = """
import json


def write_step(config, step, first):
    with open(config["ledger"], "a") as file:
        file.write(json.dumps({"rank": 0, "step": step}) + "\\n")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a loop, what it imports, and its config."""
    (tmp_path / "my_project").mkdir()
    (tmp_path / "my_project" / "loops.py").write_text(LOOPS)
    (tmp_path / "my_project" / "beside_it.py").write_text(BESIDE_IT)
    config = f"steps: 50\noptimizer: {{lr: 1e-3, name: sgd}}\nledger: {tmp_path}/ledger.jsonl\n"
    (tmp_path / "config.yaml").write_text(config)
    return tmp_path


def _command(project: Path, api_url: str, *arguments: str) -> subprocess.Popen[str]:
    """Start `elastic-train run` as its user does."""
    streams = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(
        [Path(sys.executable).parent / "elastic-train", "run", *arguments],
        cwd=project,
        env={**os.environ, "PREFECT_API_URL": api_url},
        text=True,
        start_new_session=True,
        **streams,
    )


def _ended(command: subprocess.Popen[str], timeout: float) -> tuple[int, str, str]:
    """Wait for the end of the command, and return its exit code and its output."""
    try:
        out, log = command.communicate(timeout=timeout)
    finally:
        command.kill()
    return command.returncode, out, log


def _flow_run(log: str) -> FlowRun:
    """Read the flow run that a log tells the page of."""
    found = re.search(r"/runs/flow-run/([0-9a-f-]{36})", log)
    with get_client(sync_client=True) as client:
        return client.read_flow_run(UUID(found[1]))


@pytest.mark.full
def test_a_training_from_the_shell_is_a_flow_run_without_secrets(project: Path, api_url: str) -> None:
    blocks = {"cluster": RayCluster(num_cpus=1, auth_token=TOKEN), "failures": FailureBudget(max_failures=0)}
    for block in blocks.values():
        block.save("shell", overwrite=True)
    command = _command(
        project,
        api_url,
        LOOP,
        *("--profile", "shell", "--framework", "none", "--storage", "./runs", "--workers", "1"),
        *("--config", "config.yaml", "--set", "steps=2", "--set", "optimizer.lr=2e-3", "--json"),
    )
    code, out, log = _ended(command, 180)
    assert code == 0, log
    json.loads(out, parse_constant=pytest.fail)
    result = TrainingResult.model_validate_json(out)
    assert result.metrics == {"step": 2, "first": 1, "lr": 0.002, "nothing": None}
    assert steps_of(project / "ledger.jsonl") == [1, 2]
    assert result.run_uri.startswith(f"{project}/runs/train-")
    assert Path(result.checkpoint_uri).is_dir()
    assert "printed by the module" in log

    run = _flow_run(log)
    assert run.state.type == StateType.COMPLETED
    assert result.run_name == f"train-{str(run.id)[:8]}"
    for name, block in blocks.items():
        assert run.parameters[name] == {"$ref": {"block_document_id": str(block._block_document_id)}}
    assert run.parameters["train_loop_config"]["optimizer"] == {"lr": 0.002, "name": "sgd"}
    assert TOKEN not in run.model_dump_json() + out + log


def test_a_training_that_fails_is_exit_code_1_with_the_reason_in_one_line(project: Path, api_url: str) -> None:
    RayCluster(address=f"127.0.0.1:{free_port()}", connect_timeout_seconds=1).save("nowhere", overwrite=True)
    where = ("--cluster", "nowhere", "--storage", "./runs", "--framework", "none")
    code, out, log = _ended(_command(project, api_url, LOOP, *where), 120)
    assert (code, out) == (1, "")
    last = log.splitlines()[-1]
    assert last.startswith("error: Failed: training 'train-"), last
    assert "cluster_lost: no Ray cluster answers" in last
    assert str(_flow_run(last).id) in last


def test_blocks_that_do_not_exist_are_refused_before_anything_starts(project: Path) -> None:
    LocalStorage(path=str(project)).save("both", overwrite=True)
    S3Storage(bucket_path="bucket").save("both", overwrite=True)
    for given, says in (
        ("--profile=none-such", "--profile none-such"),
        ("--profile=both", "training-storage-directory/both, training-storage-s3/both"),
        ("--cluster=none-such", "ray-cluster-training/none-such"),
        ("--storage=none-such", "'none-such'"),
    ):
        refused = CliRunner().invoke(app, ["run", f"{project}/{LOOP}", given])
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert says in refused.stderr.splitlines()[-1]


@pytest.mark.full
def test_ctrl_c_ends_the_training_and_the_next_command_goes_on_with_it(project: Path, api_url: str) -> None:
    RayCluster(num_cpus=1).save("one-cpu", overwrite=True)
    common = (LOOP, "--config", "config.yaml", "--framework", "none", "--storage", "./runs", "--cluster", "one-cpu")
    first = _command(project, api_url, *common, "--set", "sleep=0.3")
    ledger = project / "ledger.jsonl"
    try:
        wait_for(lambda: len(steps_of(ledger)) >= 5, 180, "five steps")
        first.send_signal(signal.SIGINT)
    finally:
        code, out, log = _ended(first, 45)
    assert (code, out) == (130, ""), log
    run = run_folder(project / "runs")
    assert f"--run-name {run.name} --resume" in log.splitlines()[-1]
    steps = len(steps_of(ledger))
    again = _command(project, api_url, *common, "--run-name", run.name, "--resume", "--set", "steps=8")
    code, out, log = _ended(again, 180)
    assert code == 0, log
    assert len(attempts(run)) == 2
    assert "metrics:        step=8" in out
    assert steps_of(ledger)[-1] == 8
    assert steps_of(ledger)[steps] > 1, "it went on from a checkpoint"
