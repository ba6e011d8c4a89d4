"""State has an owner: no module of the flow process, the driver or the controller has a variable that changes."""

import ast
import re
from collections.abc import Iterator

from tests.unit.support import REPOSITORY

PACKAGE = REPOSITORY / "prefect_elastic_train"

#: Modules whose state belongs to the process as a whole, and why.
EXCEPTIONS = {
    "driver/termination_signals.py": "Python has one pipe for signals in a process, which set_wakeup_fd() sets",
    "storage/retries.py": "a process waits for its storage as a whole, whichever of its objects makes the request",
    "orchestration/client_metrics.py": "Prometheus has one registry in a process, with one object for each metric",
    "orchestration/position.py": "the names of the trainings of a flow run, of which each call knows only its own",
}
_MUTATING = re.compile("append|add|update|pop|setdefault|clear|extend|remove|discard|insert|popitem")
_CONTAINERS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
#: Calls whose values do not change, or that are a framework's registry, filled as modules are imported.
_CONSTANT_CALLS = re.compile(
    "Annotated|NewType|Path|TypeAdapter|TypeVar|Typer|compile|frozenset|getLogger|partial|range|tuple"
    "|wait_random_exponential|Option|Argument|_ElasticTrain"
)


def _changing_names(tree: ast.Module) -> Iterator[str]:
    """Find names of a module that functions assign anew or change, or that hold an object of a class."""
    variables = {}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            variables |= {target.id: node.value for target in targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and _MUTATING.fullmatch(node.attr):
            if isinstance(variables.get(node.value.id), _CONTAINERS):
                yield node.value.id
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            name = getattr(node.value, "id", "")
            if name in variables:
                yield name
    for name, value in variables.items():
        if isinstance(value, ast.Call) and not name.isupper():
            called = value.func.value if isinstance(value.func, ast.Subscript) else value.func
            if not _CONSTANT_CALLS.fullmatch(getattr(called, "attr", getattr(called, "id", ""))):
                yield name


def test_modules_outside_of_a_worker_and_its_loop_have_no_state() -> None:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        names = set(_changing_names(ast.parse(path.read_text())))
        if names and not file.startswith(("worker/", "loop/")):
            found[file] = names
    assert found.keys() == EXCEPTIONS.keys(), found
