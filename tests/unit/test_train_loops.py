"""Train loops by their names, and the generic flow that takes them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.orchestration.train_loops import LOOP_PATTERN, absolute, check, named_loop
from tests.unit.support import python


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a package and a script that imports its neighbour."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "beside_it.py").write_text("NAME = 'beside'\n")
    (tmp_path / "scripts" / "train-it.py").write_text(
        "from beside_it import NAME\n\n\nclass Loops:\n    @staticmethod\n    def loop(config):\n        return NAME\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def test_an_import_path_stays_one_and_is_looked_for_in_the_current_folder(folder: Path) -> None:
    assert named_loop("my_project.loops:train_loop") == "my_project.loops:train_loop"
    assert sys.path[0] == str(folder)


def test_a_function_of_a_file_is_given_with_what_lies_beside_the_file() -> None:
    loop = named_loop("scripts/train-it.py:Loops.loop")
    assert callable(loop)
    assert loop({}) == "beside"
    assert named_loop("scripts/train-it.py:Loops.loop") is loop, "the file is run once"


@pytest.mark.parametrize("name", ["ending_as_file.py:train_loop", "ending_as_module:train_loop"])
def test_a_script_that_ends_the_program_is_refused(folder: Path, name: str) -> None:
    file = f"{name.partition(':')[0].removesuffix('.py')}.py"
    (folder / file).write_text("import sys\n\n\ndef train_loop():\n    pass\n\n\nsys.exit(0)\n")
    with pytest.raises(ConfigurationError, match=r"ends the program while it is imported .exit code 0.*__main__"):
        check(name)


def test_only_the_name_of_a_file_depends_on_the_folder(folder: Path) -> None:
    assert absolute("scripts/train-it.py:Loops.loop") == f"{folder}/scripts/train-it.py:Loops.loop"
    assert absolute("my_project.loops:train_loop") == "my_project.loops:train_loop"


@pytest.mark.parametrize("name", ["a:b", "a.b.c:d", "a:B.c", "x.py:f", "../some where/x-y.py:f", "/a/b.py:F.g"])
def test_a_form_takes_both_ways_to_name_a_loop(name: str) -> None:
    assert re.match(LOOP_PATTERN, name)


@pytest.mark.parametrize("name", ["", "a", "a.b", ":f", "a:", "a b:c", "x.py", "x.py:", "x.py:f g", "1:f"])
def test_a_form_refuses_what_names_no_loop(name: str) -> None:
    assert not re.match(LOOP_PATTERN, name)


def test_the_generic_flow_loads_neither_ray_nor_torch_nor_jax() -> None:
    code = (
        "import prefect_elastic_train.train_flow\n"
        "print([name for name in ('ray', 'torch', 'jax', 'matplotlib', 'pyarrow') if name in sys.modules])"
    )
    assert python(code).stdout.strip() == "[]"


def test_the_generic_flow_is_described_in_the_form_with_each_of_its_parameters() -> None:
    from prefect.utilities.callables import parameter_schema

    from prefect_elastic_train.train_flow import train

    assert train.description is not None
    assert train.description.startswith("Run a Ray Train loop elastically")
    parameters = parameter_schema(train)
    assert parameters.required == ["train_loop", "storage"]
    assert [name for name, shown in parameters.properties.items() if not shown.get("description")] == []
    assert parameters.properties["train_loop"]["pattern"] == LOOP_PATTERN
