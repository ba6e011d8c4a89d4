"""``elastic-train kubernetes``: the manifests of a cluster for trainings."""

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ValidationError

from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.settings import FailureSettings, KubeRaySettings, ScalingSettings

from .common import exit_on_error, option, print_lines
from .running import WRONG_USAGE, ConfigFiles, loop_config

app = typer.Typer(no_args_is_help=True)


class _Tables(BaseModel, extra="forbid"):
    """Values that replace those of blocks."""

    scaling: dict[str, Any] = {}
    failures: dict[str, Any] = {}
    kuberay: dict[str, Any] = {}


@app.callback()
def kubernetes() -> None:
    """Keep ``render`` a command of its own."""


@app.command("render")
def render_manifests(
    output: Annotated[Path, typer.Argument(help="Directory for the files. Files of these names are replaced.")],
    image: Annotated[str, option("Container image of all pods.", "IMAGE")],
    namespace: Annotated[str, option("Namespace of all objects.", "NAMESPACE")] = "default",
    profile: Annotated[
        str, option("Name of saved blocks: ElasticScaling and FailureBudget. Others: from the settings.", "NAME")
    ] = "",
    config: ConfigFiles = None,
    values: Annotated[
        list[str] | None,
        option("A value, such as scaling.max_workers=8 or kuberay.spot=gke; overrides all.", "KEY=VALUE", "--set"),
    ] = None,
    command: Annotated[
        str, option("Also write a RayJob that runs this, such as 'elastic-train run …'.", "COMMAND", "--job")
    ] = "",
) -> None:
    """Write the manifests of a Ray cluster on Kubernetes for trainings with these blocks, to be applied with kubectl.

    access.yaml has service accounts and rights, cluster.yaml the RayCluster, worker.yaml a Prefect worker, and
    work-pool.json the base job template of its work pool. A --config file has tables scaling, failures and kuberay.
    """
    with exit_on_error(WRONG_USAGE):
        from prefect_elastic_train.blocks.lookup import chosen_blocks
        from prefect_elastic_train.kubernetes.manifests import render

        blocks = chosen_blocks({}, profile)
        try:
            tables = _Tables(**loop_config(config or [], values or []))
            texts = render(
                ScalingSettings(**dict(blocks.scaling.plain()) | tables.scaling),
                FailureSettings(**dict(blocks.failures.plain()) | tables.failures),
                KubeRaySettings(**{"image": image, "namespace": namespace} | tables.kuberay),
                command,
            )
        except ValidationError as error:
            raise ConfigurationError(str(error)) from error
        output.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            (output / file).write_text(text)
            print_lines(str(output / file))
