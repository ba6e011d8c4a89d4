"""``elastic-train run``: run a training from a shell, as a flow run of the flow "train" in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from prefect_elastic_train.core.causes import short_message
from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.report.formats import duration, format_metrics

from .common import Json, exit_on_error, exit_with_error, format_faults, option, print_fields, print_json

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

    from prefect_elastic_train.blocks.lookup import Blocks
    from prefect_elastic_train.orchestration.arguments import TrainOptions

#: Exit code for wrong usage, as in typer.
WRONG_USAGE = 2
#: Less than Prefect's limit, to leave room for the other parameters.
_MAX_CONFIG_BYTES = 500_000


Loop = Annotated[
    str, typer.Argument(metavar="LOOP", help="Train loop: package.module:function or path/to/file.py:function.")
]
ConfigFiles = Annotated[
    list[Path] | None,
    option("YAML or JSON file with the config; later files override.", "FILE"),
]
ConfigValues = Annotated[
    list[str] | None,
    option("A value of the config, such as optimizer.lr=1e-3; overrides files.", "KEY=VALUE", "--set"),
]
Framework = Annotated[str, option("torch, jax, or none for a plain Python loop.")]
_SavedBlock = Annotated[str, option("Saved block.", "NAME")]


def run_training(
    loop: Loop,
    config: ConfigFiles = None,
    settings: ConfigValues = None,
    framework: Framework = "torch",
    workers: Annotated[str, option("Number of workers; replaces that of the scaling.", "N|MIN:MAX")] = "",
    profile: Annotated[
        str, option("Name that several saved blocks share. Other blocks: from the settings, else defaults.", "NAME")
    ] = "",
    scaling: _SavedBlock = "",
    failures: _SavedBlock = "",
    checkpoints: _SavedBlock = "",
    storage: Annotated[
        str, option("Saved block, directory (./runs) or URL (s3://…, ambient credentials).", "STORAGE")
    ] = "",
    cluster: _SavedBlock = "",
    run_name: Annotated[str, option("Name of the run. Default: train-ID.", "NAME")] = "",
    resume: Annotated[bool, option("Resume the run of this name.", None, "--resume")] = False,
    resume_from: Annotated[
        str, option("Start from the latest checkpoint of another run, RUN@best or RUN@FOLDER.", "RUN")
    ] = "",
    timeout: Annotated[float | None, option("Stop the training after this time.", "SECONDS")] = None,
    as_json: Json = False,
    dry_run: Annotated[bool, option("Only print what would run, as JSON without secrets.", None, "--dry-run")] = False,
) -> None:
    """Train with a loop, without writing a flow for it. Logs go to standard error.

    The training is a flow run of the flow "train", shown in Prefect's UI; lost drivers are restarted. However it ends,
    the run directory stays, and the same command with --run-name and --resume continues.

    Exit code 0 if the training completed, 1 if it failed, 2 if it was refused before anything started, 130 after
    Ctrl-C.
    """
    options: TrainOptions = {
        "framework": framework,
        "run_name": run_name or None,
        "resume": resume,
        "resume_from": resume_from,
        "timeout_seconds": timeout,
    }
    names = {
        "scaling": scaling,
        "failures": failures,
        "checkpoints": checkpoints,
        "storage": storage,
        "cluster": cluster,
    }
    # Standard output is for the result, and modules of the user may print when they are imported.
    with redirect_stdout(sys.stderr), exit_on_error(WRONG_USAGE):
        from prefect_elastic_train.orchestration.arguments import check_options
        from prefect_elastic_train.orchestration.train_loops import resolve_loop_name

        values = loop_config(config or [], settings or [])
        check_options(options)
        requested = {option: value for option, value in options.items() if value is not None}
        parameters = {"train_loop": resolve_loop_name(loop), "train_loop_config": values, **requested}
        blocks = _load_blocks(names, profile, workers)
        flow_run = None if dry_run else _run_flow(parameters, blocks)
    if flow_run:
        _print_result(flow_run, as_json)
    else:
        _print_plan(parameters, blocks)


def _load_blocks(names: dict[str, str], profile: str, workers: str) -> Blocks:
    """Load the blocks of a training by their names and the profile.

    ``workers``, such as ``"4"`` or ``"1:8"``, replaces the number of workers in the scaling; empty: it stays.
    """
    from prefect_elastic_train.blocks.lookup import chosen_blocks

    blocks = chosen_blocks(names, profile)
    if not workers:
        return blocks
    minimum, colon, maximum = workers.partition(":")
    try:
        numbers = {"min_workers": int(minimum), "max_workers": int(maximum if colon else minimum)}
        return blocks._replace(scaling=type(blocks.scaling)(**dict(blocks.scaling) | numbers))
    except ValueError as error:
        raise ConfigurationError(
            f"--workers {workers}: expected a number (4) or a range (1:8) that the scaling allows: {error}"
        ) from error


def _run_flow(parameters: dict[str, Any], blocks: Blocks) -> FlowRun:
    """Run the flow ``train`` in this process until it ends. Return its flow run with the final state.

    Exit the command after Ctrl-C, and if the flow ends without setting a state.
    """
    from prefect.client.orchestration import get_client
    from prefect.exceptions import Abort
    from prefect.flow_engine import run_flow

    from prefect_elastic_train.blocks.lookup import reference_to
    from prefect_elastic_train.runs.fingerprints import training_name
    from prefect_elastic_train.train_flow import train

    # The flow run keeps references to saved blocks, as from the UI: no secrets, and a retry uses the current values.
    parameters = parameters | {
        argument: reference_to(block) if block._block_document_id else block
        for argument, block in blocks._asdict().items()
    }
    with get_client(sync_client=True) as client:
        flow_run = client.create_flow_run(train, parameters=train.serialize_parameters(parameters))
    try:
        state: Any = run_flow(train, flow_run=flow_run, parameters=parameters, return_type="state")
    except KeyboardInterrupt:
        name = parameters.get("run_name") or training_name(train.name, str(flow_run.id), 1)
        typer.echo(f"interrupted; checkpoints are kept. To continue: --run-name {name} --resume", err=True)
        raise typer.Exit(130) from None  # the exit code of shells after Ctrl-C
    except Abort as error:
        exit_with_error(f"{error}. Flow run {_locate(flow_run)}")
    return flow_run.model_copy(update={"state": state})


def _locate(flow_run: FlowRun) -> str:
    """Return the name of a flow run and its URL in Prefect's UI; without a UI, its name and id."""
    from prefect.utilities.urls import url_for

    return f"{flow_run.name}: {url_for('flow-run', flow_run.id) or flow_run.id}"


def _print_plan(parameters: dict[str, Any], blocks: Blocks) -> None:
    from prefect_elastic_train.blocks.lookup import saved_name, values_of

    plan = dict(parameters)
    for argument, block in blocks._asdict().items():
        name = saved_name(block) or f"{block.get_block_type_slug()} (not saved)"
        plan[argument] = {"block": name, **values_of(block)}  # secrets as asterisks
    print_json(plan)


def _print_result(flow_run: FlowRun, as_json: bool) -> None:
    """Print the result of a completed training; exit with an error if it did not complete."""
    from prefect_elastic_train.orchestration.training_result import TrainingResult

    state: Any = flow_run.state
    if not state.is_completed():
        # One line; the log has all of it.
        first, _, rest = str(state.result(raise_on_failure=False) or state.message).strip().partition("\n")
        message = f"{first.strip().rstrip('.')}: {short_message(rest)}" if rest.strip() else first
        exit_with_error(f"{state.name}: {message}. Flow run {_locate(flow_run)}")
    result = TrainingResult.model_validate(state.result())
    if as_json:
        print_json(result)
        return
    print_fields(
        {
            "run": result.run_name,
            "where": result.run_uri,
            "checkpoint": result.checkpoint_uri,
            "metrics": format_metrics(result.metrics, 10),
            "attempts": f"{result.attempts}, {format_faults(result)}",
            "goodput": f"{result.goodput:.1%} of {duration(result.time.wall_seconds)}",
            "flow run": _locate(flow_run),
        }
    )


def loop_config(files: Sequence[Path], settings: Sequence[str]) -> dict[str, Any]:
    """Return the train loop's config: the files merged, then settings such as ``optimizer.lr=0.1``. Later values win.

    Raises:
        ConfigurationError: A file or a setting cannot be read, or the config is too large for a flow run.
    """
    from prefect.utilities.collections import deep_merge

    config: dict[str, Any] = {}
    for file in files:
        table = _parse_yaml(f"config {file}", file)
        if not isinstance(table, dict | None):
            raise ConfigurationError(f"config {file} must be a table of keys and values, got a {type(table).__name__}")
        config = deep_merge(config, table or {})
    for setting in settings:
        path, separator, text = setting.partition("=")
        keys = path.strip().split(".")
        if not separator or not all(keys):
            raise ConfigurationError(f"--set {setting}: expected key=value or key.key=value")
        value = _parse_yaml(f"--set {setting}", text)
        for key in reversed(keys):
            value = {key: value}
        config = deep_merge(config, value)
    size = len(json.dumps(config))
    if size > _MAX_CONFIG_BYTES:
        raise ConfigurationError(
            f"the config has {size:,} bytes, and Prefect keeps at most 512 KiB of parameters with a flow run: "
            "put large values into a file that the loop reads"
        )
    return config


def _parse_yaml(source: str, content: Path | str) -> Any:
    """Parse YAML 1.2 or JSON from a file or a text, and return it as JSON values.

    Prefect keeps the config of a flow run as JSON. ``source`` names the input in errors.
    """
    try:
        # PyYAML reads YAML 1.1, where 1e-3 is text, and no and off are booleans.
        # Also copies tables that anchors share.
        return json.loads(json.dumps(YAML(typ="safe", pure=True).load(content), allow_nan=False))
    except (OSError, TypeError, ValueError, YAMLError) as error:
        raise ConfigurationError(
            f"{source} cannot be read as YAML that JSON can represent (write dates in quotes): {error}"
        ) from error
