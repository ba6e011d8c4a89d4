"""What raw Ray Train does with a damaged run directory: `python -m benchmarks.torn_state`."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from benchmarks.common import POLL_SECONDS, base_environment, descendants, machine_lines, markdown_table

STEPS = 4
MORE_STEPS = 2
"""What the second start does beyond the steps of the first, so that it has to go on and not only to resume."""

OTHER_STEPS = 2
"""The other run is shorter, so that resuming at its state can be told from resuming at this run's."""

CHECKPOINT_FILE = "state.json"
SNAPSHOT = "checkpoint_manager_snapshot.json"
FIT_TIMEOUT_SECONDS = 120.0
END_TIMEOUT_SECONDS = 20.0
LINE_CHARACTERS = 190


@dataclass(frozen=True)
class Case:
    """One kind of damage.

    Attributes:
        name: What the table calls it.
        damage: Does it to the first run directory; the second is that of another run.
        other_prefix: What the names of the other run's checkpoints begin with; this run's begin with "step".
    """

    name: str
    damage: Callable[[Path, Path], object]
    other_prefix: str = ""


def cut(file: Path) -> None:
    """Leave the first half of a file."""
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


CASES = (
    Case("nothing", lambda run, other: None),
    Case("snapshot emptied", lambda run, other: (run / SNAPSHOT).write_bytes(b"")),
    Case("snapshot cut in half", lambda run, other: cut(run / SNAPSHOT)),
    Case("snapshot replaced by garbage", lambda run, other: (run / SNAPSHOT).write_bytes(bytes(range(256)))),
    Case(
        "snapshot replaced by another run's, with other checkpoint names",
        lambda run, other: shutil.copy(other / SNAPSHOT, run),
        other_prefix="other",
    ),
    Case(
        "snapshot replaced by another run's, with the same checkpoint names",
        lambda run, other: shutil.copy(other / SNAPSHOT, run),
        other_prefix="step",
    ),
    Case("snapshot removed", lambda run, other: (run / SNAPSHOT).unlink()),
    Case("oldest checkpoint directory removed", lambda run, other: shutil.rmtree(run / "step-1")),
    Case("middle checkpoint directory removed", lambda run, other: shutil.rmtree(run / "step-2")),
    Case("newest checkpoint directory removed", lambda run, other: shutil.rmtree(run / f"step-{STEPS}")),
    Case("file in newest checkpoint cut", lambda run, other: cut(run / f"step-{STEPS}" / CHECKPOINT_FILE)),
)


def train_loop(config: dict[str, Any]) -> None:
    """Report a checkpoint with its step's number at each step, from the checkpoint that Ray Train hands out."""
    from ray import train

    restored = 0
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            restored = json.loads((Path(directory) / CHECKPOINT_FILE).read_text())["step"]
    for step in range(restored + 1, config["steps"] + 1):
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / CHECKPOINT_FILE).write_text(json.dumps({"step": step}))
            train.report(
                {"step": step, "restored": restored},
                checkpoint=train.Checkpoint.from_directory(directory),
                checkpoint_dir_name=f"{config['prefix']}-{step}",
            )


def fit(run: Path, steps: int, prefix: str = "step") -> int:
    """Start raw Ray Train on a run directory.

    Returns:
        The step that it resumed at; 0 for the beginning.

    Raises:
        TimeoutError: It did not end within `FIT_TIMEOUT_SECONDS`.
    """
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    trainer = DataParallelTrainer(
        train_loop,
        train_loop_config={"steps": steps, "prefix": prefix},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name=run.name, storage_path=str(run.parent)),
    )
    with at_most(FIT_TIMEOUT_SECONDS):
        metrics = trainer.fit().metrics
    if metrics["step"] != steps:
        raise RuntimeError(f"ended at step {metrics['step']} instead of {steps}")
    return int(metrics["restored"])


def outcome(case: Case, storage: Path) -> str:
    """Make a run, damage it, start it again, and say what became of it."""
    run, other = storage / "run", storage / "other"
    fit(run, STEPS)
    if case.other_prefix:
        fit(other, OTHER_STEPS, case.other_prefix)
    case.damage(run, other)
    try:
        restored = fit(run, STEPS + MORE_STEPS)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
        return describe(error, run)
    return f"resumes at step {restored}" if restored else "starts again at step 0"


def describe(error: Exception, run: Path) -> str:
    """Return an error's type and first line, and its last line, which in Ray's errors names the cause."""
    text = re.sub(r"\x1b\[\d+m", "", str(error)).replace(str(run), "RUN").replace("|", "\\|").replace("`", "'")
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    first = f"{type(error).__name__}: {lines[0].partition(' (pid=')[0]}"
    # The cause stands there as "package.module.Type: message".
    last = re.sub(r"^(?:\w+\.)+(\w+):", r"\1:", lines[-1])
    shown = [first] if len(lines) == 1 else [first, last]
    return ", … ".join(f"`{textwrap.shorten(line, LINE_CHARACTERS, placeholder=' …')}`" for line in shown)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Bound what is done inside; only in the main thread.

    Raises:
        TimeoutError: It took longer.
    """

    def give_up(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"did not end within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def local_cluster(directory: Path) -> Iterator[None]:
    """Start a local Ray cluster, and leave nothing of it running.

    Raises:
        RuntimeError: Processes that cannot be ended.
    """
    clean = base_environment() | {
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(POLL_SECONDS),
        # Ray would otherwise create a token in the user's home directory.
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    for name in os.environ.keys() - clean.keys():
        del os.environ[name]
    os.environ.update(clean)
    # Ray reads its environment when it is imported.
    import ray

    try:
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=str(directory))
        yield
    finally:
        started = descendants()
        ray.shutdown()
        _, left = psutil.wait_procs(started, timeout=END_TIMEOUT_SECONDS)
        for process in left:
            process.kill()
        _, left = psutil.wait_procs(left, timeout=END_TIMEOUT_SECONDS)
        if left:
            raise RuntimeError(f"cannot end {left}")


def main() -> int:
    """Go through all cases and print the table.

    Returns:
        1 if an undamaged run does not resume at its last step, so that the table means nothing; else 0.
    """
    load_before = os.getloadavg()[0]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    rows = []
    # Unix sockets of Ray live below this directory, and their paths may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="b", dir="/tmp") as root, local_cluster(Path(root, "ray")):
        for number, case in enumerate(CASES):
            row = [case.name, outcome(case, Path(root, str(number)))]
            print(f"# {number + 1}/{len(CASES)} {': '.join(row)}", flush=True)
            rows.append(row)
    print(f"\n{machine_lines('benchmarks.torn_state', load_before)}\n")
    print(markdown_table(["damage", "what raw Ray Train does"], rows))
    return 0 if rows[0][1] == f"resumes at step {STEPS}" else 1


if __name__ == "__main__":
    raise SystemExit(main())
