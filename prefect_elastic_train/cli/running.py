"""``elastic-train run``: a training from a shell, as a flow run of the generic flow in this process."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefect_elastic_train.cli.errors import fail, input_errors, note, prefect_errors
from prefect_elastic_train.cli.tables import metrics_in_short, print_pairs
from prefect_elastic_train.core.outcomes import AttemptFailedError, ConfigurationError
from prefect_elastic_train.core.rank_errors import cause
from prefect_elastic_train.report.words import duration

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun, State

    from prefect_elastic_train.blocks._common import TrainingBlock
    from prefect_elastic_train.orchestration.result import TrainingResult

#: What shells give for a program that Ctrl-C has ended.
_INTERRUPTED = 130
_METRICS = 10

_CONFIG, _BLOCKS, _RUN = "Config of the loop", "Blocks", "Run"


@dataclass(frozen=True)
class _Plan:
    """A training that has been asked for, as far as it can be checked before anything starts.

    Attributes:
        arguments: Parameters of the generic flow that are no blocks.
        blocks: Those that are.
    """

    arguments: dict[str, Any]
    blocks: dict[str, TrainingBlock]


def run_training(
    loop: Annotated[
        str,
        typer.Argument(
            metavar="LOOP",
            help="The train loop: package.module:function, looked for in the current folder too, or "
            "path/to/file.py:function.",
        ),
    ],
    config: Annotated[
        list[Path] | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="JSON, YAML or TOML file with the config. May be given several times: tables are merged, the later "
            "value counts.",
            rich_help_panel=_CONFIG,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A value of the config, such as optimizer.lr=1e-3. Counts before files; may be given several times.",
            rich_help_panel=_CONFIG,
        ),
    ] = None,
    framework: Annotated[
        str, typer.Option(help="torch, jax, or none for a plain Python loop.", rich_help_panel=_RUN)
    ] = "torch",
    workers: Annotated[
        str,
        typer.Option(
            metavar="N|MIN:MAX", help="Number of workers, in place of that of the scaling.", rich_help_panel=_BLOCKS
        ),
    ] = "",
    profile: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Name that some of the blocks below are saved under. The others are as the settings say, else the "
            "defaults.",
            rich_help_panel=_BLOCKS,
        ),
    ] = "",
    scaling: Annotated[str, typer.Option(metavar="NAME", help="Saved block.", rich_help_panel=_BLOCKS)] = "",
    failures: Annotated[str, typer.Option(metavar="NAME", help="Saved block.", rich_help_panel=_BLOCKS)] = "",
    checkpoints: Annotated[str, typer.Option(metavar="NAME", help="Saved block.", rich_help_panel=_BLOCKS)] = "",
    storage: Annotated[
        str,
        typer.Option(
            metavar="STORAGE",
            help="Saved block, directory (./runs, /mnt/runs) or URL (s3://bucket/runs, with the ambient credentials).",
            rich_help_panel=_BLOCKS,
        ),
    ] = "",
    cluster: Annotated[str, typer.Option(metavar="NAME", help="Saved block.", rich_help_panel=_BLOCKS)] = "",
    run_name: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the run. [default: train-ID]", rich_help_panel=_RUN)
    ] = "",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run of this name.", rich_help_panel=_RUN)
    ] = False,
    resume_from: Annotated[
        str,
        typer.Option(
            metavar="RUN",
            help="Begin with the checkpoint of another run: RUN for its latest, RUN@best, RUN@FOLDER.",
            rich_help_panel=_RUN,
        ),
    ] = "",
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="End the training after so long.", rich_help_panel=_RUN)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would run, as JSON without secrets.")
    ] = False,
) -> None:
    """Train with a loop, without writing a flow for it. Logs go to standard error.

    It is a flow run of the flow "train", seen in Prefect's UI; drivers that are lost are replaced. Whatever ends it,
    the run directory stays, and the same command with --run-name and --resume goes on.

    Exit code 0 if the training has completed, 1 if it failed, 2 if it was refused before anything started, 130 after
    Ctrl-C.
    """
    names = {
        "scaling": scaling,
        "failures": failures,
        "checkpoints": checkpoints,
        "storage": storage,
        "cluster": cluster,
    }
    arguments = {
        "train_loop": loop,
        "framework": framework,
        "run_name": run_name,
        "resume": resume,
        "resume_from": resume_from,
    }
    # Standard output is the result's: what the user's modules print on their import goes elsewhere.
    with redirect_stdout(sys.stderr), prefect_errors():
        plan = _plan(arguments, timeout, config or [], settings or [], names, profile, workers)
        ended = None if dry_run else _train(plan)
    if ended is None:
        _print_plan(plan)
        return
    flow_run, state = ended
    result = _result(flow_run, state)
    if as_json:
        # A metric may be NaN, which is no JSON: it becomes null.
        typer.echo(_strict_json(result))
    else:
        _print_result(flow_run, result)


def _plan(
    arguments: dict[str, Any],
    timeout: float | None,
    files: list[Path],
    settings: list[str],
    names: dict[str, str],
    profile: str,
    workers: str,
) -> _Plan:
    """Check all that can be checked before anything starts."""
    from prefect_elastic_train.blocks.lookup import chosen_blocks
    from prefect_elastic_train.cli.loop_config import loop_config
    from prefect_elastic_train.orchestration.arguments import check_arguments
    from prefect_elastic_train.orchestration.train_loops import absolute, check

    with input_errors():
        check_arguments(
            arguments["framework"],
            arguments["run_name"] or None,
            arguments["resume"],
            arguments["resume_from"] or None,
            timeout,
        )
        config = loop_config(files, settings)
        loop = absolute(arguments["train_loop"])
        check(loop)
        blocks = chosen_blocks(names, profile)
        if workers:
            blocks["scaling"] = _with_workers(blocks["scaling"], workers)
    more = {"train_loop": loop, "train_loop_config": config, "timeout_seconds": timeout or 0.0}
    return _Plan({**arguments, **more}, blocks)


def _with_workers(scaling: TrainingBlock, workers: str) -> TrainingBlock:
    """Return a scaling with another number of workers, ``"4"`` or ``"1:8"``."""
    from pydantic import ValidationError

    least, colon, most = workers.partition(":")
    try:
        numbers = {"min_workers": int(least), "max_workers": int(most if colon else least)}
    except ValueError:
        raise ConfigurationError(f"--workers {workers}: expected a number (4) or a range (1:8)") from None
    values = {name: getattr(scaling, name) for name in type(scaling).model_fields}
    try:
        return type(scaling)(**{**values, **numbers})
    except ValidationError as error:
        problems = "; ".join(one["msg"].removeprefix("Value error, ") for one in error.errors())
        raise ConfigurationError(f"--workers {workers}: {problems}") from error


def _as_parameter(block: TrainingBlock) -> Any:
    """Return what stands for a block in the parameters of a flow run, which the server keeps and shows.

    For a saved block that is a reference, as the UI makes it: nothing of what the block holds is kept with the flow
    run, and a retry finds its secrets. The others have none.
    """
    document = block._block_document_id
    return block if document is None else {"$ref": {"block_document_id": str(document)}}


def _without_secrets(block: TrainingBlock) -> dict[str, Any]:
    """Return what may be shown of a block: which one it is, and its values, secrets as asterisks."""
    from prefect_elastic_train.blocks.lookup import saved_name

    values = block.model_dump(mode="json", include=set(type(block).model_fields))
    return {"block": saved_name(block) or f"{block.get_block_type_slug()} (not saved)", **values}


def _train(plan: _Plan) -> tuple[FlowRun, State[Any]]:
    """Run the generic flow in this process; give its flow run, and the state that it ended in."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.objects import State
    from prefect.exceptions import Abort
    from prefect.flow_engine import run_flow

    from prefect_elastic_train.runs.identity import default_run_name
    from prefect_elastic_train.train_flow import train

    parameters = plan.arguments | {argument: _as_parameter(block) for argument, block in plan.blocks.items()}
    with get_client(sync_client=True) as client:
        flow_run = client.create_flow_run(train, parameters=train.serialize_parameters(parameters))
    try:
        state = run_flow(train, flow_run=flow_run, parameters=parameters, return_type="state")
        assert isinstance(state, State)
    except KeyboardInterrupt:
        name = plan.arguments["run_name"] or default_run_name(train.name, str(flow_run.id), 1)
        note(f"interrupted; what run {name} has committed stays. To go on: --run-name {name} --resume")
        raise typer.Exit(_INTERRUPTED) from None
    except Abort as error:
        fail(f"{error}. Flow run {_where_to_look(flow_run)}")
    return flow_run, state


def _result(flow_run: FlowRun, state: State[Any]) -> TrainingResult:
    """Give the result of a flow run, or say why there is none and end."""
    from prefect_elastic_train.orchestration.result import TrainingResult

    if not state.is_completed():
        error = state.result(raise_on_failure=False)
        fail(f"{state.name}: {_reason(error) or state.message}. Flow run {_where_to_look(flow_run)}")
    return TrainingResult.model_validate(state.result())


def _reason(error: object) -> str:
    """Give in one line what went wrong, with the outcome; the log has all of it."""
    lines = [line.strip().rstrip(".") for line in str(error or "").splitlines() if line.strip()]
    words = lines[:1] + ([cause("\n".join(lines[1:]))] if len(lines) > 1 else [])
    if isinstance(error, AttemptFailedError) and not any(error.outcome.value in word for word in words):
        words.append(f"outcome {error.outcome.value}")
    return ": ".join(words)


def _where_to_look(flow_run: FlowRun) -> str:
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME
    from prefect.utilities.urls import url_for

    if PREFECT_API_URL.value():
        return f"{flow_run.name}: {url_for('flow-run', flow_run.id)}"
    return f"{flow_run.name}: `prefect server start` shows it (it is kept in {PREFECT_HOME.value()})"


def _strict_json(result: TrainingResult) -> str:
    from pydantic_core import to_json

    return to_json(result.model_dump(), inf_nan_mode="null", indent=2).decode()


def _print_plan(plan: _Plan) -> None:

    shown = plan.arguments | {argument: _without_secrets(block) for argument, block in plan.blocks.items()}
    typer.echo(json.dumps(shown, indent=2))


def _print_result(flow_run: FlowRun, result: TrainingResult) -> None:
    faults = [
        f"{number} {what}"
        for number, what in (
            (result.worker_failures, "worker failures"),
            (result.preemptions, "preemptions"),
            (result.resizes, "resizes"),
            (result.steps_lost, "reports done again"),
        )
        if number
    ]
    print_pairs(
        [
            ("run", result.run_name),
            ("state", result.status),
            ("where", result.run_uri),
            ("checkpoint", result.checkpoint_uri),
            ("metrics", metrics_in_short(result.metrics, _METRICS)),
            ("attempts", ", ".join([str(result.attempts), *faults])),
            ("goodput", f"{result.goodput:.1%} of {duration(result.time.wall_seconds)}"),
            ("flow run", _where_to_look(flow_run)),
        ]
    )
