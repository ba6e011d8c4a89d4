"""Save the profiles as block documents: `python -m blocks.apply [PROFILE]... [--dry-run]`. It can be repeated."""

import os
from typing import Annotated

import typer

from blocks.profiles import PROFILES, Blocks, Environment, UnsetVariableError, profile_blocks
from prefect_elastic_train.blocks.documents import apply
from prefect_elastic_train.cli.common import exit_on_error
from prefect_elastic_train.core.outcomes import ConfigurationError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def chosen_documents(names: list[str], environment: Environment) -> tuple[dict[str, Blocks], list[str]]:
    """Create the blocks of profiles.

    Args:
        names: Names of profiles. Empty: all whose environment variables are set.
        environment: Environment variables.

    Returns:
        The blocks by profile, and a message for each profile that is skipped.

    Raises:
        ConfigurationError: There is no profile of that name, or one of its variables is not set or is invalid.
    """
    if unknown := [name for name in names if name not in PROFILES]:
        raise ConfigurationError(f"there is no profile {unknown[0]!r}; profiles are {', '.join(PROFILES)}")
    documents: dict[str, Blocks] = {}
    skipped: list[str] = []
    for name in dict.fromkeys(names or PROFILES):
        try:
            documents[name] = profile_blocks(name, environment)
        except UnsetVariableError as error:
            if names:
                raise ConfigurationError(f"profile {name}: {error}") from error
            skipped.append(f"skipped {name}: {error}")
    return documents, skipped


@app.command()
def main(
    profiles: Annotated[
        list[str] | None, typer.Argument(help=f"{', '.join(PROFILES)}; default all.", metavar="[PROFILE]...")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be saved.")] = False,
) -> None:
    """Create or update the block documents of the profiles, and print their names.

    Values in the code replace values that were entered in the UI. A secret that the code does not set is kept. If a
    required environment variable is not set, its profile is skipped, or is an error if it was named.
    """
    with exit_on_error():
        documents, skipped = chosen_documents(profiles or [], os.environ)
        saved = apply(documents, dry_run=dry_run)
    for line in [*saved, *skipped]:
        typer.echo(line)
    if dry_run:
        typer.echo("dry run: nothing was written")


if __name__ == "__main__":
    app(prog_name="python -m blocks.apply")
