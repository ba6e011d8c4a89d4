"""The ids of a run: which of them stay over what, and how a train loop gets at them."""

import json
import re
from typing import Any

import pytest

from prefect_elastic_train.loop import RunContext, run_context, use_run_context
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.attempts import end_attempt
from prefect_elastic_train.storage.store import LocalRunStore, RunStore
from tests.unit.support import OTHER_FLOW_RUN, Training, begin, claim, python, tear


@pytest.mark.parametrize("store", ["disk", "memory"], indirect=True)
@pytest.mark.parametrize("lose", [lambda *_: None, tear, RunStore.delete])
def test_the_run_id_stays_over_drivers_flow_runs_changed_configurations_and_a_lost_record(
    store: RunStore, lose: Any
) -> None:
    first = begin(store)
    Training(store, first.attempt).report("a")
    end_attempt(store, first.attempt, "driver_lost")
    lose(store, layout.RUN)
    restarted = begin(store)
    end_attempt(store, restarted.attempt, "completed")
    lose(store, layout.RUN)
    resumed = begin(store, claim(OTHER_FLOW_RUN, resume=True, config={"lr": 0.2}))
    begun = [(one.attempt, one.run_id) for one in (first, restarted, resumed)]
    assert begun == [(attempt, first.run_id) for attempt in (1, 2, 3)]
    assert re.fullmatch("[0-9a-f]{32}", first.run_id)


def test_a_run_elsewhere_and_one_that_starts_from_it_have_ids_of_their_own(store: RunStore) -> None:
    elsewhere = begin(LocalRunStore(f"{store.path}-elsewhere"))
    seeded = begin(LocalRunStore(f"{store.path}-seeded"), claim(resume_from="mnist"))
    assert len({begin(store).run_id, elsewhere.run_id, seeded.run_id}) == 3


def test_a_loop_can_be_tried_out_without_a_training_and_the_error_says_how() -> None:
    context = RunContext("mnist", "0" * 32, 3, "s3://runs", "s3://runs/mnist", flow_name="nightly")
    with use_run_context(context):
        assert run_context() == context
    with pytest.raises(RuntimeError, match=r"outside of a training.*use_run_context\(RunContext\(\.\.\.\)\)"):
        run_context()


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import prefect_elastic_train.loop", {"ray", "torch", "jax", "prefect", "pydantic", "pyarrow"}),
        (
            "from prefect_elastic_train.core.settings import ScalingSettings as S; "
            "S(accelerator='gpu', max_workers=8, resources_per_worker={'GPU': 2})",
            {"ray"},
        ),
    ],
)
def test_what_loops_import_and_a_form_for_cpus_and_gpus_load_none_of_the_heavy_packages(
    code: str, heavy: set[str]
) -> None:
    assert not heavy & set(json.loads(python(f"import json, sys; {code}; print(json.dumps([*sys.modules]))").stdout))
