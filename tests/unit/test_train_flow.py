"""Train loops by their names, and the deployable flow that takes them: which loop and which blocks it trains with."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect.utilities.callables import parameter_schema

from prefect_elastic_train import CheckpointPolicy, ElasticScaling, FailureBudget, LocalStorage, RayCluster, train_flow
from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.orchestration.train_loops import (
    LOOP_PATTERN,
    load_named_loop,
    resolve_loop_name,
)


@pytest.fixture
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


def test_a_loop_is_named_by_an_import_path_or_by_a_file_which_is_run_once(folder: Path) -> None:
    assert load_named_loop("my_project.loops:train_loop") == "my_project.loops:train_loop"
    assert sys.path[0] == str(folder), "modules are looked for in the current folder"
    loop = load_named_loop("scripts/train-it.py:Loops.loop")
    assert callable(loop)
    assert loop({}) == "beside"
    assert load_named_loop("scripts/train-it.py:Loops.loop") is loop
    assert resolve_loop_name("scripts/train-it.py:Loops.loop") == f"{folder}/scripts/train-it.py:Loops.loop"


@pytest.mark.parametrize("name", ["ending_as_file.py:train_loop", "ending_as_module:train_loop"])
def test_a_script_that_ends_the_program_is_refused(folder: Path, name: str) -> None:
    file = f"{name.partition(':')[0].removesuffix('.py')}.py"
    (folder / file).write_text("import sys\n\n\ndef train_loop():\n    pass\n\n\nsys.exit(0)\n")
    with pytest.raises(ConfigurationError, match="cannot be imported: SystemExit: 0"):
        resolve_loop_name(name)


def test_a_form_takes_both_ways_to_name_a_loop_and_nothing_else() -> None:
    good = ["a:b", "a.b.c:d", "a:B.c", "x.py:f", "../some where/x-y.py:f", "/a/b.py:F.g"]
    bad = ["", "a", "a.b", ":f", "a:", "a b:c", "x.py", "x.py:", "x.py:f g", "1:f"]
    assert [name for name in [*good, *bad] if re.match(LOOP_PATTERN, name)] == good


def test_the_generic_flow_is_described_in_the_form_with_each_of_its_parameters() -> None:
    assert (train_flow.train.description or "").startswith("Run a Ray Train loop elastically")
    parameters = parameter_schema(train_flow.train)
    assert parameters.required == ["train_loop", "storage"]
    assert [name for name, shown in parameters.properties.items() if not shown.get("description")] == []
    assert parameters.properties["train_loop"]["pattern"] == LOOP_PATTERN


def test_a_saved_block_is_trained_with_by_name_and_one_that_is_unsaved_or_was_changed_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train_flow, "load_saved", lambda kinds, name: kinds[0](max_workers=4))
    saved = ElasticScaling(max_workers=4)
    saved._block_document_name, saved._is_anonymous = "lab", False
    assert train_flow._argument(saved) == "elastic-scaling/lab"
    for block in (
        LocalStorage(path="/runs"),
        ElasticScaling(max_workers=2),
        saved.model_copy(update={"max_workers": 8}),
    ):
        assert train_flow._argument(block) is block


@pytest.mark.parametrize("block", [train_flow.DEFAULT_SCALING, RayCluster(), FailureBudget(), CheckpointPolicy()])
def test_what_is_left_as_it_is_in_the_form_is_for_the_settings_to_say(block: Any) -> None:
    assert train_flow._argument(block) is None
    assert train_flow._argument(type(block)(**dict(block))) is None, "as it comes back from a server"
