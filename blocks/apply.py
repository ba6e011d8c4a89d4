"""Save the profiles as block documents: `python -m blocks.apply [PROFILE]... [--dry-run]`, as often as you like."""

import os
from collections import Counter
from typing import Annotated

import typer

from blocks.profiles import PROFILES, Blocks, Environment, UnsetVariableError
from prefect_elastic_train.blocks.documents import apply
from prefect_elastic_train.cli.common import clean, errors
from prefect_elastic_train.core.outcomes import ConfigurationError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def chosen_documents(names: list[str], environment: Environment) -> tuple[dict[str, Blocks], list[str]]:
    """Make the blocks of profiles.

    Args:
        names: The profiles; empty for all whose environment variables are set.
        environment: Environment variables.

    Returns:
        The blocks by profile, and a line for each profile that is left out.

    Raises:
        ConfigurationError: There is no such profile, or a variable that it needs is not set or has a bad value.
    """
    if unknown := [name for name in names if name not in PROFILES]:
        raise ConfigurationError(f"there is no profile {unknown[0]!r}; profiles are {', '.join(PROFILES)}")
    documents: dict[str, Blocks] = {}
    skipped: list[str] = []
    for name in dict.fromkeys(names or PROFILES):
        try:
            documents[name] = PROFILES[name].blocks(environment)
        except UnsetVariableError as error:
            if names:
                raise ConfigurationError(f"profile {name}: {error}") from error
            skipped.append(f"- {name}  skipped: {error}")
    return documents, skipped


@app.command()
def main(
    profiles: Annotated[
        list[str] | None, typer.Argument(help=f"{', '.join(PROFILES)}; default all.", metavar="[PROFILE]...")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would change.")] = False,
) -> None:
    """Create or update the block documents of the profiles; print what changes, field by field.

    Values of the code replace what was typed in the UI. A secret that the code does not give stays as it is. A profile
    that needs an environment variable that is not set is left out, or an error if it was named.
    """
    with errors():
        documents, skipped = chosen_documents(profiles or [], os.environ)
        changes = apply(documents, dry_run=dry_run)
    for line in [*(line for change in changes for line in change.lines()), *skipped]:
        typer.echo(clean(line))
    counts = Counter(change.what for change in changes)
    told = ", ".join(f"{counts[what]} {what}" for what in ("created", "updated", "unchanged"))
    typer.echo(f"{told}{' (dry run: nothing was written)' if dry_run else ''}")


if __name__ == "__main__":
    app(prog_name="python -m blocks.apply")
