"""Train loops as people name them in a form or a shell: by an import path, or by a file and a function in it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

from prefect.exceptions import ScriptError
from prefect.utilities.importtools import load_script_as_module

from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.driver.fit import check_loop, ends_at_import, function_in, resolve_loop

#: A pattern that both ways to name a loop match.
LOOP_PATTERN = r"^([A-Za-z_][\w.]*|[^:]+\.py):[A-Za-z_][\w.]*$"


def named_loop(name: str) -> Callable[..., Any] | str:
    """Return what ``elastic_train`` takes for a loop that a person names.

    Modules are looked for in the current folder too, as by ``python -m``; those that a file imports, in its folder.

    Args:
        name: ``"package.module:function"``, or ``"path/to/file.py:function"``.

    Raises:
        ConfigurationError: The file cannot be read or run, or has no such function.
    """
    place, _, function = name.rpartition(":")
    if place.endswith(".py"):
        return function_in(_module_of(os.path.abspath(place)), function, name)
    _search(os.getcwd())
    return name


def absolute(name: str) -> str:
    """Return a loop's name as it may be used in any folder of this machine; an import path stays what it is."""
    place, _, function = name.rpartition(":")
    return f"{os.path.abspath(os.path.expanduser(place))}:{function}" if place.endswith(".py") else name


def check(name: str) -> None:
    """Check, by importing it, that a named loop is one.

    Raises:
        ConfigurationError: It is not, or cannot be imported here.
    """
    if not re.match(LOOP_PATTERN, name):
        raise ConfigurationError(
            f"train loop {name!r} is neither 'package.module:function' nor 'path/to/file.py:function'"
        )
    loop = named_loop(name)
    check_loop(resolve_loop(loop) if isinstance(loop, str) else loop)


@cache
def _module_of(file: str) -> ModuleType:
    """Run a file as a module, once."""
    _search(os.path.dirname(file))
    try:
        return load_script_as_module(file)
    except SystemExit as error:
        raise ConfigurationError(f"{file} {ends_at_import(error)}") from error
    except ScriptError as error:
        cause = error.user_exc
        raise ConfigurationError(f"{file} cannot be imported: {type(cause).__name__}: {cause}") from error


def _search(folder: str) -> None:
    """Have modules looked for in a folder, here and in the processes of the training."""
    if folder not in map(os.path.abspath, sys.path):
        sys.path.insert(0, folder)
