"""A training as a user of the Prefect UI has it: blocks from forms, a run from a form, its report, its end.

All tests look at one training on one server, which the fixtures bring as far as the test needs it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import psutil
import pytest
from playwright.sync_api import expect
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

from prefect_elastic_train import ElasticScaling, LocalStorage, RayCluster
from prefect_elastic_train.core.spec import MARK_VARIABLE
from prefect_elastic_train.supervisor.processes import end_marked, marked_processes
from tests.support.browser import PrefectUI, prefect_ui, require_chromium
from tests.support.deployments import Program, api_client, project_served
from tests.support.processes import generations, steps_of, wait_for
from tests.support.ui_loops import CHECKPOINT_EVERY, ERROR, FAILING_STEP

pytestmark = pytest.mark.full

#: Name of the flow run, and of the training's run.
RUN = "from-the-browser"
SCALING, STORAGE, CLUSTER = "typed-into-the-form", "folder-of-the-browser", "one-cpu"


@dataclass
class StartedRun:
    """The training that was started from the UI."""

    client: SyncPrefectClient
    id: UUID
    ledger: Path
    mark: str = ""

    def read(self) -> FlowRun:
        return self.client.read_flow_run(self.id)

    @property
    def state(self) -> State:
        state = self.read().state
        assert state is not None
        return state

    def wait_for_steps(self, steps: int, timeout: float) -> None:
        """Wait until the loop has taken so many steps; a training that has ended before takes no more."""

        def taken() -> bool:
            assert not self.state.is_final(), self.state.message
            return len(steps_of(self.ledger)) >= steps

        wait_for(taken, timeout, f"{steps} steps")


@pytest.fixture(scope="module")
def client(api_url: str) -> Iterator[SyncPrefectClient]:
    """A client of the session's server, which knows the blocks."""
    require_chromium()
    with (
        temporary_settings({PREFECT_API_URL: api_url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),
        api_client() as client,
    ):
        ElasticScaling.register_type_and_schema(_sync=True)
        yield client


@pytest.fixture(scope="module")
def served(client: SyncPrefectClient, api_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """The deployments that come with the project."""
    with project_served(tmp_path_factory.mktemp("served-for-ui"), api_url, "browser") as program:
        yield program


@pytest.fixture(scope="module")
def ui(api_url: str, served: Program, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectUI]:
    """The UI of the session's server."""
    # While this is open, Prefect takes the tests for asynchronous code, and is told `_sync=True`.
    with prefect_ui(api_url, tmp_path_factory.getbasetemp() / "ui") as ui:
        yield ui


@pytest.fixture(autouse=True)
def _picture(request: pytest.FixtureRequest, ui: PrefectUI) -> Iterator[None]:
    """Keep what a test, passed or failed, has seen last."""
    yield
    ui.screenshot(request.node.name)


@pytest.fixture(scope="module")
def scaling(ui: PrefectUI) -> str:
    """Name of a scaling block, made in the UI."""
    form = ui.new_block("Elastic Scaling")
    form.page.get_by_role("textbox", name="Name").fill(SCALING)
    form.fill("Minimum workers (Optional)", 1)
    form.fill("Maximum workers (Optional)", 2)
    form.fill_json("Resources per worker (Optional)", {"CPU": 1})
    ui.screenshot("block-form")
    form.submit("Save", ui.main.get_by_role("term").filter(has_text="Maximum workers"))
    return SCALING


def _mark_of_driver(served: Program) -> str:
    """Give what marks all processes of a training that the deployments run, once it has a driver."""
    for process in served.tree():
        with contextlib.suppress(psutil.Error):
            if "prefect_elastic_train.driver" in process.cmdline():
                return process.environ().get(MARK_VARIABLE, "")
    return ""


@pytest.fixture(scope="module")
def training(
    ui: PrefectUI, client: SyncPrefectClient, served: Program, scaling: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartedRun]:
    """A training that was started in the UI, with its page open there."""
    folder = tmp_path_factory.mktemp("training-of-ui")
    ledger = folder / "ledger.jsonl"
    LocalStorage(path=str(folder / "runs")).save(STORAGE, overwrite=True, _sync=True)
    RayCluster(num_cpus=1).save(CLUSTER, overwrite=True, _sync=True)
    form = ui.custom_run("train/train")
    form.page.get_by_role("textbox", name="Run Name").fill(RUN)
    form.fill("train_loop", "tests.support.ui_loops:failing_once_loop")
    form.choose("storage", STORAGE)
    form.fill_json("train_loop_config (Optional)", {"steps": 6000, "sleep": 0.1, "ledger": str(ledger)})
    form.choose("framework (Optional)", "none")
    form.choose("scaling (Optional)", scaling)
    form.choose("cluster (Optional)", CLUSTER)
    form.fill("run_name (Optional)", RUN)
    ui.screenshot("run-form")
    form.submit("Submit", ui.main.get_by_role("tab", name="Runs"))
    ui.open_run(RUN)
    (run,) = client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate({"name": {"any_": [RUN]}}))
    training = StartedRun(client, run.id, ledger)
    try:
        training.mark = wait_for(lambda: _mark_of_driver(served), 60, "the driver")
        yield training
    finally:
        if training.mark:
            end_marked(training.mark, 15)


def test_block_is_made_in_a_form_with_numbers_and_json(ui: PrefectUI, scaling: str) -> None:
    made = ElasticScaling.load(scaling, _sync=True)
    assert (made.min_workers, made.max_workers, made.resources_per_worker) == (1, 2, {"CPU": 1})


def test_run_is_started_from_a_form_with_blocks_from_its_lists(ui: PrefectUI, training: StartedRun) -> None:
    expect(ui.state("Running")).to_be_visible(timeout=60_000)
    assert training.state.type == StateType.RUNNING
    parameters = training.read().parameters
    for name, block, kind in (
        ("scaling", SCALING, ElasticScaling),
        ("storage", STORAGE, LocalStorage),
        ("cluster", CLUSTER, RayCluster),
    ):
        chosen = kind.load(block, _sync=True)._block_document_id
        assert parameters[name] == {"$ref": {"block_document_id": str(chosen)}}
    training.wait_for_steps(1, 120)


def test_report_of_a_running_training_shows_a_picture_and_the_failure_with_its_cause(
    ui: PrefectUI, training: StartedRun
) -> None:
    training.wait_for_steps(2 * FAILING_STEP, 120)
    before, after = generations(training.ledger)
    assert before == (0, FAILING_STEP - 1)
    assert after[0] in (CHECKPOINT_EVERY, 2 * CHECKPOINT_EVERY), "it went on from a checkpoint"
    ui.open_run(RUN)
    report = ui.open_artifact(f"elastic-train-{RUN}", timeout=30)
    ui.reload_until(report.filter(has_text=ERROR), 30)
    item = report.get_by_role("listitem").filter(has_text="worker failure: the workers are restarted")
    expect(item.filter(has_text=ERROR)).to_have_count(1)
    pictures = report.get_by_role("img")
    expect(pictures.first).to_be_visible()
    for picture in pictures.all():
        assert picture.evaluate("picture => picture.decode().then(() => picture.naturalWidth)") > 0
    ui.screenshot("report")


def test_cancel_button_ends_the_training_and_all_its_processes(ui: PrefectUI, training: StartedRun) -> None:
    training.wait_for_steps(1, 120)
    assert marked_processes(training.mark)
    ui.open_run(RUN)
    ui.cancel_run()
    expect(ui.state("Cancelled")).to_be_visible(timeout=60_000)
    assert training.state.type == StateType.CANCELLED
    wait_for(lambda: not marked_processes(training.mark), 30, "the end of its processes")
    report = ui.open_artifact(f"elastic-train-{RUN}", timeout=30)
    ui.reload_until(report.filter(has_text="cancelled"), 30)
