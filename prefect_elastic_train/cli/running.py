"""``elastic-train run``: a training from a shell, as a flow run of the generic flow in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic_core import to_json
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from prefect_elastic_train.cli.common import Json, errors, fail, faults, metrics_in_short, print_pairs
from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.ray_output import cause
from prefect_elastic_train.report.markdown import duration

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun, State

    from prefect_elastic_train.blocks._common import TrainingBlock

#: Exit code for wrong usage, the same as typer's.
WRONG_USAGE = 2

_CONFIG, _BLOCKS, _RUN = "Config of the loop", "Blocks", "Run"


def _option(panel: str, help: str, metavar: str | None = None, *names: str) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel)


Loop = Annotated[
    str, typer.Argument(metavar="LOOP", help="Train loop: package.module:function or path/to/file.py:function.")
]
ConfigFiles = Annotated[
    list[Path] | None,
    _option(_CONFIG, "YAML or JSON file with it; of several, the later value counts.", "FILE"),
]
ConfigValues = Annotated[
    list[str] | None,
    _option(_CONFIG, "A value of it, such as optimizer.lr=1e-3; counts before files.", "KEY=VALUE", "--set"),
]
Framework = Annotated[str, _option(_RUN, "torch, jax, or none for a plain Python loop.")]
_SavedBlock = Annotated[str, _option(_BLOCKS, "Saved block.", "NAME")]


def run_training(
    loop: Loop,
    config: ConfigFiles = None,
    settings: ConfigValues = None,
    framework: Framework = "torch",
    workers: Annotated[str, _option(_BLOCKS, "Number of workers, in place of the scaling's.", "N|MIN:MAX")] = "",
    profile: Annotated[
        str, _option(_BLOCKS, "Name of several saved blocks. Others: the settings', else defaults.", "NAME")
    ] = "",
    scaling: _SavedBlock = "",
    failures: _SavedBlock = "",
    checkpoints: _SavedBlock = "",
    storage: Annotated[
        str, _option(_BLOCKS, "Saved block, directory (./runs) or URL (s3://…, ambient credentials).", "STORAGE")
    ] = "",
    cluster: _SavedBlock = "",
    run_name: Annotated[str, _option(_RUN, "Name of the run. [default: train-ID]", "NAME")] = "",
    resume: Annotated[bool, _option(_RUN, "Go on with the run of this name.", None, "--resume")] = False,
    resume_from: Annotated[
        str, _option(_RUN, "Begin with the latest checkpoint of another run, RUN@best or RUN@FOLDER.", "RUN")
    ] = "",
    timeout: Annotated[float | None, _option(_RUN, "End the training after so long.", "SECONDS")] = None,
    as_json: Json = False,
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
    # Standard output is the result's: what the user's modules print on their import goes elsewhere.
    with redirect_stdout(sys.stderr), errors(WRONG_USAGE):
        from prefect_elastic_train.blocks.lookup import chosen_blocks, saved_name, values_of
        from prefect_elastic_train.orchestration.arguments import absolute, check_arguments, check_named_loop
        from prefect_elastic_train.orchestration.result import TrainingResult

        check_arguments(framework, run_name or None, resume, resume_from or None, timeout)
        parameters: dict[str, Any] = {
            "train_loop": absolute(loop),
            "train_loop_config": loop_config(config or [], settings or []),
            "framework": framework,
            "run_name": run_name,
            "resume": resume,
            "resume_from": resume_from,
            "timeout_seconds": timeout or 0.0,
        }
        check_named_loop(parameters["train_loop"])
        named = {
            "scaling": scaling,
            "failures": failures,
            "checkpoints": checkpoints,
            "storage": storage,
            "cluster": cluster,
        }
        blocks = chosen_blocks(named, profile)
        if workers:
            blocks["scaling"] = _with_workers(blocks["scaling"], workers)
        ended = None if dry_run else _train(parameters, blocks)
    if ended is None:
        for argument, block in blocks.items():
            name = saved_name(block) or f"{block.get_block_type_slug()} (not saved)"
            parameters[argument] = {"block": name, **values_of(block)}  # secrets as asterisks
        typer.echo(json.dumps(parameters, indent=2))
        return
    flow_run, state = ended
    if not state.is_completed():
        # In one line what went wrong; the log has all of it.
        first, _, rest = str(state.result(raise_on_failure=False) or state.message).strip().partition("\n")
        words = f"{first.strip().rstrip('.')}: {cause(rest)}" if rest.strip() else first
        fail(f"{state.name}: {words}. Flow run {_where_to_look(flow_run)}")
    result = TrainingResult.model_validate(state.result())
    if as_json:
        # A metric may be NaN, which is no JSON: it becomes null.
        typer.echo(to_json(result.model_dump(), inf_nan_mode="null", indent=2).decode())
        return
    print_pairs(
        [
            ("run", result.run_name),
            ("where", result.run_uri),
            ("checkpoint", result.checkpoint_uri),
            ("metrics", metrics_in_short(result.metrics, 10)),
            ("attempts", f"{result.attempts}, {faults(result)}"),
            ("goodput", f"{result.goodput:.1%} of {duration(result.time.wall_seconds)}"),
            ("flow run", _where_to_look(flow_run)),
        ]
    )


def _with_workers(scaling: TrainingBlock, workers: str) -> TrainingBlock:
    """Return a scaling with another number of workers, ``"4"`` or ``"1:8"``."""
    least, colon, most = workers.partition(":")
    try:
        numbers = {"min_workers": int(least), "max_workers": int(most if colon else least)}
        return type(scaling)(**{**dict(scaling), **numbers})
    except ValueError as error:
        raise ConfigurationError(
            f"--workers {workers}: expected a number (4) or a range (1:8) that fits to the scaling: {error}"
        ) from error


def _train(parameters: dict[str, Any], blocks: dict[str, TrainingBlock]) -> tuple[FlowRun, State[Any]]:
    """Run the generic flow in this process; return its flow run, and the state that it ended in."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import Abort
    from prefect.flow_engine import run_flow

    from prefect_elastic_train.blocks.lookup import reference_to
    from prefect_elastic_train.train_flow import train

    # Of a saved block the flow run keeps a reference, as the UI makes it: no secret, and a retry finds it mended.
    parameters = parameters | {
        argument: reference_to(block) if block._block_document_id else block for argument, block in blocks.items()
    }
    with get_client(sync_client=True) as client:
        flow_run = client.create_flow_run(train, parameters=train.serialize_parameters(parameters))
    try:
        state: Any = run_flow(train, flow_run=flow_run, parameters=parameters, return_type="state")
    except KeyboardInterrupt:
        typer.echo("interrupted; checkpoints are kept. To continue: --run-name TASK_RUN_NAME --resume", err=True)
        raise typer.Exit(130) from None  # as shells do after Ctrl-C
    except Abort as error:
        fail(f"{error}. Flow run {_where_to_look(flow_run)}")
    return flow_run, state


def _where_to_look(flow_run: FlowRun) -> str:
    from prefect.utilities.urls import url_for

    return f"{flow_run.name}: {url_for('flow-run', flow_run.id) or flow_run.id}"


def loop_config(files: Sequence[Path], settings: Sequence[str]) -> dict[str, Any]:
    """Put a config together: the files one after the other, then the settings; what comes later counts."""
    # Files are YAML 1.2, and so JSON; tables in tables are merged. Of settings, such as optimizer.lr=0.1, dots nest.
    from prefect.utilities.collections import deep_merge

    parts: list[tuple[str, Path | str, list[str]]] = [(f"config {file}", file, []) for file in files]
    for setting in settings:
        path, separator, value = setting.partition("=")
        keys = path.strip().split(".")
        if not separator or not all(keys):
            raise ConfigurationError(f"--set {setting}: expected key=value or key.key=value")
        parts.append((f"--set {setting}", value, keys))
    config: dict[str, Any] = {}
    for source, text, keys in parts:
        try:
            # Not PyYAML, which reads YAML 1.1: 1e-3 is text there, and no and off are booleans. And Prefect keeps the
            # config with the flow run as JSON, which also makes tables of their own of those that anchors share.
            more = json.loads(json.dumps(YAML(typ="safe", pure=True).load(text), allow_nan=False))
        except (OSError, TypeError, ValueError, YAMLError) as error:
            raise ConfigurationError(
                f"{source} is no YAML that JSON can hold (write dates and the like in quotes, as text): {error}"
            ) from error
        for key in reversed(keys):
            more = {key: more}
        if not isinstance(more, dict | None):
            raise ConfigurationError(f"{source} must be a table of keys and values, got a {type(more).__name__}")
        config = deep_merge(config, more or {})
    if (size := len(to_json(config))) > 500_000:  # leaves room for the other parameters
        raise ConfigurationError(
            f"the config has {size:,} bytes, and Prefect keeps at most 512 KiB of parameters with a flow run: "
            "put large values into a file that the loop reads"
        )
    return config
