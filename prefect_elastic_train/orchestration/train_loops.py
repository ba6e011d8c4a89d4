"""Train loops by name, as users type them in a form or a shell: ``package.module:function`` or ``file.py:function``."""

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
from prefect_elastic_train.driver.user_code import check_loop, import_loop, loop_in_module

#: Matches both forms of a name.
LOOP_PATTERN = r"^([A-Za-z_][\w.]*|[^:]+\.py):[A-Za-z_][\w.]*$"


def load_named_loop(name: str) -> Callable[..., Any] | str:
    """Return the train loop for a name.

    For ``file.py:function``, import the file and return the function. For ``package.module:function``, return the name,
    which the driver imports. The file's folder, or the current folder, is added to the import path.
    """
    module, _, function = name.rpartition(":")
    if module.endswith(".py"):
        return loop_in_module(_import_file(os.path.abspath(module)), function, name)
    _add_to_import_path(os.getcwd())
    return name


def resolve_loop_name(name: str) -> str:
    """Check a train loop's name, by importing the loop. Return the name, with an absolute path if it has a file.

    Raises:
        ConfigurationError: The name is neither ``package.module:function`` nor ``path/to/file.py:function``, or it is
            not that of a train loop.
    """
    if ".py:" in name:
        name = os.path.abspath(os.path.expanduser(name))
    if not re.match(LOOP_PATTERN, name):
        raise ConfigurationError(
            f"train loop {name!r} is neither 'package.module:function' nor 'path/to/file.py:function'"
        )
    loop = load_named_loop(name)
    check_loop(import_loop(loop) if isinstance(loop, str) else loop)
    return name


@cache
def _import_file(file: str) -> ModuleType:
    """Import a Python file as a module, and return it. Each file is executed once a process.

    Raises:
        ConfigurationError: The file cannot be imported.
    """
    _add_to_import_path(os.path.dirname(file))
    try:
        return load_script_as_module(file)
    except (ScriptError, SystemExit) as error:
        cause = error.user_exc if isinstance(error, ScriptError) else error
        raise ConfigurationError(f"{file} cannot be imported: {type(cause).__name__}: {cause}") from error


def _add_to_import_path(folder: str) -> None:
    """Add a folder to the import path of this process, which the training's processes inherit."""
    if folder not in map(os.path.abspath, sys.path):
        sys.path.insert(0, folder)
