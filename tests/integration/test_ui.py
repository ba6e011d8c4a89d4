"""A training as a user of the Prefect UI has it, in a headless Chromium: forms, a report, a button that ends it."""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Locator, Page, expect, sync_playwright
from playwright.sync_api import TimeoutError as PlaywrightTimeoutError
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType

from prefect_elastic_train import ElasticScaling, LocalStorage, RayCluster
from prefect_elastic_train.supervisor.guard import marked_processes
from tests.support.deployments import Program, deployment_id, project_served, runs_of
from tests.support.processes import drivers_of, generations, steps_of, wait_for

pytestmark = pytest.mark.full

CHROMIUM = Path("/usr/bin/chromium")
#: Logos and banners of the UI come from elsewhere, and no test may depend on that.
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
#: Seconds that the page may take for anything that needs nobody but the browser and the server.
PATIENCE = 30
#: Name of the flow run and of the training's run, and at which step its loop fails once.
RUN, FAILING_STEP, CHECKPOINT_EVERY = "from-the-browser", 25, 10


class PrefectUI:
    """The UI of a server, used as its user does: by what is written on its pages."""

    def __init__(self, page: Page, api_url: str) -> None:
        self.page, self.url = page, api_url.removesuffix("/api")

    @property
    def main(self) -> Locator:
        """The page without the menu beside it."""
        return self.page.get_by_role("main")

    def open(self, section: str) -> None:
        """Open a section of the UI's menu, such as "Runs"."""
        if not self.page.url.startswith(self.url):
            self.page.goto(self.url)
        # The menu comes before the page, which may have such a link of its own.
        self.page.get_by_role("link", name=section, exact=True).first.click()

    def reload_until(self, what: Locator, timeout: float = PATIENCE) -> None:
        """Reload the page until something is there: many pages do not look for news by themselves."""

        def there() -> bool:
            self.page.reload()
            with contextlib.suppress(AssertionError):
                expect(what).to_be_visible(timeout=5000)
                return True
            return False

        wait_for(there, timeout, f"{what} on {self.page.url}")

    def field(self, label: str) -> Locator:
        """The part of a form with a label, such as "Name" or "scaling (Optional)"."""
        labelled = self.main.locator("div").filter(has=self.page.get_by_text(label, exact=True))
        # The form and all that is around the field contain its label and its control, too.
        return labelled.filter(has=self.page.get_by_role("group")).last

    def fill(self, label: str, value: str) -> None:
        """Write into a field for text."""
        control = self.field(label).get_by_role("textbox")
        control.fill(value)
        expect(control).to_have_value(value)

    def fill_json(self, label: str, value: object) -> None:
        """Replace what is in a field for JSON, which is an editor of its own."""
        editor = self.field(label).get_by_role("textbox")
        editor.press("ControlOrMeta+a")
        self.page.keyboard.insert_text(json.dumps(value))
        expect(editor).to_have_text(json.dumps(value))

    def choose(self, label: str, option: str) -> None:
        """Choose a saved block, or a value, from a field's list, which the page may close while it fills it anew."""
        button = self.field(label).get_by_role("button", name=re.compile("^Select "))
        wanted = self.page.get_by_role("option", name=option, exact=True)

        def chosen() -> bool:
            with contextlib.suppress(PlaywrightTimeoutError):
                if not wanted.is_visible():
                    button.click(timeout=5_000)
                wanted.click(timeout=5_000)
            with contextlib.suppress(AssertionError):
                expect(button).to_have_text(option, timeout=5_000)
                return True
            return False

        wait_for(chosen, 2 * PATIENCE, f"{option} to be chosen")

    def submit(self, button: str, then: Locator) -> None:
        """Press a button until the next page is there: the form stays when a busy server answers "try again" (503)."""

        def submitted() -> bool:
            self.main.get_by_role("button", name=button, exact=True).click()
            with contextlib.suppress(AssertionError):
                expect(then).to_be_visible(timeout=10_000)
            return then.is_visible()

        wait_for(submitted, 2 * PATIENCE, f"what comes after {button}")

    def open_run(self) -> None:
        """Open the page of the flow run from the list of runs, which lists none that are only scheduled."""
        self.open("Runs")
        link = self.main.get_by_role("link", name=RUN, exact=True)
        self.reload_until(link)
        link.click()
        expect(self.main.get_by_role("tab", name="Artifacts")).to_be_visible()

    def open_report(self) -> Locator:
        """Open the run's report from its page; returns its rendered text."""
        self.open_run()
        self.main.get_by_role("tab", name="Artifacts").click()
        card = self.main.get_by_role("link").filter(has=self.page.get_by_text(f"elastic-train-{RUN}", exact=True))
        self.reload_until(card)
        card.click()
        # In between is a page with one entry a version, the newest first.
        self.main.locator("a[href*='/artifacts/artifact/']").first.click()
        # Beside it is its source, hidden.
        text = self.page.get_by_test_id("markdown-display")
        expect(text).to_be_visible()
        return text


@pytest.fixture
def ui(api_url: str, tmp_path: Path) -> Iterator[PrefectUI]:
    """The UI of the session's server."""
    if not CHROMIUM.exists():
        pytest.fail(f"there is no {CHROMIUM}: apt-get install chromium fonts-dejavu-core", pytrace=False)
    expect.set_options(timeout=PATIENCE * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, timeout=PATIENCE * 1000)
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(PATIENCE * 1000)
        yield PrefectUI(page, api_url)
        page.screenshot(path=tmp_path / "last.png", full_page=True)
        browser.close()


@pytest.fixture
def served(client: SyncPrefectClient, api_url: str, tmp_path: Path) -> Iterator[Program]:
    """The deployments that come with the project."""
    with project_served(tmp_path / "served", api_url, "browser") as program:
        yield program


def test_a_training_is_started_watched_and_cancelled_in_the_ui(
    ui: PrefectUI, client: SyncPrefectClient, served: Program, tmp_path: Path, ledger: str
) -> None:
    # While the browser is open, Prefect takes the tests for asynchronous code, and is told `_sync=True`.
    blocks = {
        "scaling": ElasticScaling(max_workers=2),
        "storage": LocalStorage(path=str(tmp_path / "runs")),
        "cluster": RayCluster(num_cpus=1),
    }
    documents = {name: block.save(RUN, overwrite=True, _sync=True) for name, block in blocks.items()}
    deployment = deployment_id(client, "train/train")
    ui.open("Deployments")  # where the links of this version of the UI begin
    ui.page.wait_for_url("**/deployments*")
    ui.page.goto(f"{ui.page.url.partition('/deployments')[0]}/deployments/deployment/{deployment}")
    ui.main.get_by_role("button", name="Run", exact=True).click()
    ui.page.get_by_role("menuitem", name="Custom run").click()
    ui.page.get_by_role("textbox", name="Run Name").fill(RUN)
    config = {"steps": 6000, "sleep": 0.1, "checkpoint_every": CHECKPOINT_EVERY, "ledger": ledger}
    config |= {"fail_once": FAILING_STEP, "metrics": {"total_steps": 6000}}
    ui.fill("train_loop", "tests.support.loops:hashing_loop")
    ui.fill_json("train_loop_config (Optional)", config)
    ui.choose("framework (Optional)", "none")
    for label in ("storage", "scaling (Optional)", "cluster (Optional)"):
        ui.choose(label, RUN)
    ui.fill("run_name (Optional)", RUN)
    ui.submit("Submit", ui.main.get_by_role("tab", name="Runs"))
    ui.open_run()
    expect(ui.main.get_by_text("Running", exact=True).first).to_be_visible(timeout=60_000)
    [run] = runs_of(client, deployment)
    for name, document in documents.items():
        assert run.parameters[name] == {"$ref": {"block_document_id": str(document)}}

    wait_for(lambda: len(steps_of(ledger)) >= 2 * FAILING_STEP, 120, "steps after the failure")
    before, after = generations(ledger)
    assert before == (0, FAILING_STEP - 1)
    assert after[0] in (CHECKPOINT_EVERY, 2 * CHECKPOINT_EVERY), "it went on from a checkpoint"
    report = ui.open_report()
    ui.reload_until(report.filter(has_text="rank 0 fails once"))
    item = report.get_by_role("listitem").filter(has_text="worker failure; the worker group is restarted from")
    expect(item.filter(has_text="rank 0 fails once")).to_have_count(1)
    pictures = report.get_by_role("img")
    expect(pictures.first).to_be_visible()
    for picture in pictures.all():
        assert picture.evaluate("picture => picture.decode().then(() => picture.naturalWidth)") > 0

    runners = [child.pid for child in psutil.Process(served.process.pid).children(recursive=True)]
    [mark] = {mark for _, mark in drivers_of(*runners)}
    assert marked_processes(mark)
    ui.open_run()
    ui.main.get_by_role("button", name="Open menu").click()
    ui.page.get_by_role("menuitem", name="Cancel", exact=True).click()
    question = ui.page.get_by_role("alertdialog", name="Cancel Flow Run")
    question.get_by_role("button", name="Cancel Flow Run").click()
    expect(question).to_be_hidden()
    expect(ui.main.get_by_text("Cancelled", exact=True).first).to_be_visible(timeout=60_000)
    assert client.read_flow_run(run.id).state.type == StateType.CANCELLED
    wait_for(lambda: not marked_processes(mark), 30, "the end of its processes")
    ui.reload_until(ui.open_report().filter(has_text="cancelled"))
