"""The code blocks of the documentation, run as they stand, page by page."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import TERMINAL_STATES
from prefect.states import Pending, Running

from flows.digits import digits
from flows.evaluate import evaluate
from prefect_elastic_train import LocalStorage, RayCluster
from prefect_elastic_train.core.operator_settings import get_settings
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.attempts import end_attempt
from prefect_elastic_train.storage.store import LocalRunStore
from prefect_elastic_train.train_flow import train
from tests.support.deployments import deployment_id
from tests.support.doc_blocks import blocks_of, page_id, pages, run_block
from tests.unit.support import Training, begin, claim, empty_snapshot, with_result

pytestmark = pytest.mark.full

#: Run by a test of their own.
ELSEWHERE = {"quickstart.md", "trainers.md", "fine_tune.md"}
PAGES = [page for page in pages() if page.name not in ELSEWHERE and any(block.is_run for block in blocks_of(page))]

#: Counts epochs, and goes on where its checkpoint says.
LOOPS = """
import json, tempfile
from pathlib import Path


def train_loop(config):
    import ray.train

    checkpoint = ray.train.get_checkpoint()
    done = json.loads(Path(checkpoint.path, "state.json").read_text())["epoch"] if checkpoint else 0
    for epoch in range(done + 1, config["epochs"] + 1):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "state.json").write_text(json.dumps({"epoch": epoch}))
            saved = ray.train.Checkpoint.from_directory(folder)
            first = ray.train.get_context().get_world_rank() == 0
            ray.train.report({"epoch": epoch}, checkpoint=saved if first else None)


fine_tune_loop = train_loop
"""


@flow(name="nightly")
def nightly() -> None:
    """Stand for the flow that the guide deploys."""


@pytest.fixture
def tidy(client: SyncPrefectClient) -> Iterator[SyncPrefectClient]:
    """A client of the session's server, which is left with nothing that the test brings there."""
    before = _there(client)
    yield client
    # Flow runs come first: those that a deployment has scheduled go with it.
    for path in sorted(_there(client) - before, reverse=True):
        client.request("DELETE", path)  # type: ignore[arg-type]


def _there(client: SyncPrefectClient) -> set[str]:
    """The paths of all that another test on the server could trip over."""
    found = {f"/deployments/{deployment.id}" for deployment in client.read_deployments()}
    found |= {f"/automations/{automation.id}" for automation in client.read_automations()}
    found |= {f"/block_documents/{document.id}" for document in client.read_block_documents()}
    unfinished = FlowRunFilterStateType(not_any_=list(TERMINAL_STATES))
    runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=unfinished)))
    return found | {f"/flow_runs/{run.id}" for run in runs}


@pytest.fixture
def folder(tidy: SyncPrefectClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder and a server with all that the pages take for granted.

    A module ``my_project.loops``; finished runs ``mnist`` and ``cifar`` in ``./runs``, saved as storage block
    ``nightly``; ``./ray_results/mnist`` as Ray Train alone leaves it behind after two epochs; the deployments of
    ``flows/`` and one of the user's, ``nightly/nightly``; and a flow run of it that nobody executes, whose id is in
    ``FLOW_RUN_ID``.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_project").mkdir()
    (tmp_path / "my_project" / "loops.py").write_text(LOOPS)
    for name in ("mnist", "cifar"):
        _write_run(LocalRunStore(str(tmp_path / "runs" / name)), name)
    _write_run_of_ray_alone(tmp_path / "ray_results" / "mnist", epochs=2)
    (storage := LocalStorage(path="runs")).save("nightly", overwrite=True)
    train.to_deployment("train", parameters={"storage": storage}).apply()  # as `flows.serve` does
    for deployed, name in ((digits, "digits"), (evaluate, "digits"), (nightly, "nightly")):
        deployed.to_deployment(name).apply()
    lost = tidy.create_flow_run_from_deployment(deployment_id(tidy, "nightly/nightly"), state=Pending())
    tidy.set_flow_run_state(lost.id, Running())
    monkeypatch.setenv("FLOW_RUN_ID", str(lost.id))
    yield tmp_path
    for module in [module for module in sys.modules if module.split(".")[0] == "my_project"]:
        del sys.modules[module]


def _write_run(store: LocalRunStore, name: str) -> None:
    training = Training(store, begin(store, claim(name=name)).attempt)
    training.report("checkpoint_1", {"loss": 0.5})
    end_attempt(store, training.attempt, Outcome.COMPLETED.value, "")


def _write_run_of_ray_alone(folder: Path, epochs: int) -> None:
    snapshot = empty_snapshot()
    for epoch in range(1, epochs + 1):
        checkpoint = folder / f"checkpoint_{epoch}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").write_text(json.dumps({"epoch": epoch}))
        snapshot = with_result(snapshot, checkpoint.name, {"epoch": epoch})
    (folder / layout.SNAPSHOT).write_text(json.dumps(snapshot))


@pytest.fixture
def one_cluster(api: str, joined: RayCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have all trainings that name no cluster join one, as an operator may: a cluster for each takes longer."""
    joined.save("of-the-docs", overwrite=True)
    monkeypatch.setenv("PREFECT_ELASTIC_TRAIN_DEFAULT_CLUSTER", "of-the-docs")
    get_settings.cache_clear()
    yield
    get_settings.cache_clear()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_blocks_of_a_page_run_as_they_stand(page: Path, folder: Path, api: str, request: pytest.FixtureRequest) -> None:
    if page.name != "README.md":  # its example shows that nothing has to be set up
        request.getfixturevalue("one_cluster")
    for block in blocks_of(page):
        if block.is_run:
            run_block(block, folder, api)
