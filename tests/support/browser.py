"""The Prefect UI in a headless Chromium, used as its user does: by what is written on its pages."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, Response, expect, sync_playwright
from playwright.sync_api import TimeoutError as PlaywrightTimeoutError

from tests.support.processes import wait_for

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # Logos and banners of the UI come from elsewhere, and no test may depend on that.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
#: Seconds that the page may take for anything that needs nobody but the browser and the server.
PATIENCE = 30

#: A folder that keeps the pictures of the pages after the tests.
OUTPUT_VARIABLE = "ELASTIC_TRAIN_TEST_OUTPUT"


def require_chromium() -> None:
    """Fail the test without a browser."""
    if not CHROMIUM.exists():
        pytest.fail(f"there is no {CHROMIUM}: apt-get install chromium fonts-dejavu-core", pytrace=False)


class Form:
    """A form of the UI, made from the JSON schema of a block or of a flow's parameters."""

    def __init__(self, page: Page) -> None:
        self.page = page

    def field(self, label: str) -> Locator:
        """Give the part of the form with a label, such as "Name" or "scaling (Optional)"."""
        parts = self.page.get_by_role("main").locator("div")
        labelled = parts.filter(has=self.page.get_by_text(label, exact=True))
        # The form and all that is around the field contain its label and its control, too.
        return labelled.filter(has=self.page.get_by_role("group")).last

    def fill(self, label: str, value: str | int) -> None:
        """Write into a field for text or a number."""
        field = self.field(label)
        control = field.get_by_role("textbox").or_(field.get_by_role("spinbutton"))
        control.fill(str(value))
        expect(control).to_have_value(str(value))

    def fill_json(self, label: str, value: dict[str, Any]) -> None:
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
            self.page.get_by_role("main").get_by_role("button", name=button, exact=True).click()
            with contextlib.suppress(AssertionError):
                expect(then).to_be_visible(timeout=10_000)
            return then.is_visible()

        wait_for(submitted, 2 * PATIENCE, f"what comes after {button}")


class PrefectUI:
    """The UI of a server, in the version that the server shows by itself."""

    def __init__(self, page: Page, api_url: str, folders: list[Path]) -> None:
        self.page = page
        self.url = api_url.removesuffix("/api")
        self._folders = folders

    @property
    def main(self) -> Locator:
        """The page without the menu beside it."""
        return self.page.get_by_role("main")

    def screenshot(self, name: str) -> None:
        """Keep a picture of the whole page."""
        for folder in self._folders:
            self.page.screenshot(path=folder / f"{name}.png", full_page=True)

    def open(self, section: str) -> None:
        """Open a section of the UI's menu, such as "Blocks"."""
        if not self.page.url.startswith(self.url):
            self.page.goto(self.url)
        # The menu comes before the page, which may have such a link of its own.
        self.page.get_by_role("link", name=section, exact=True).first.click()

    def reload_until(self, what: Locator, timeout: float) -> None:
        """Reload the page until something is there: many pages do not look for news by themselves."""

        def there() -> bool:
            self.page.reload()
            with contextlib.suppress(AssertionError):
                expect(what).to_be_visible(timeout=5000)
                return True
            return False

        wait_for(there, timeout, f"{what} on {self.page.url}")

    def new_block(self, block_type: str) -> Form:
        """Open the form of a new block, from the list of blocks."""
        self.open("Blocks")
        # The button with the plus comes before the other way to the catalog.
        self.main.locator("a[href$='/blocks/catalog']").first.click()
        expect(self.main.get_by_text("Catalog", exact=True)).to_be_visible()
        self.main.get_by_role("textbox", name="Search blocks").fill(block_type)
        expect(self.main.get_by_role("heading", name=block_type, exact=True)).to_be_visible()
        expect(self.main.get_by_text("1 Block", exact=True)).to_be_visible()
        self.main.get_by_role("link", name="Create", exact=True).click()
        return Form(self.page)

    def custom_run(self, deployment: str) -> Form:
        """Open the form of a custom run of a deployment, `flow/deployment`, from its page."""
        # The list shows a few of them at a time, and a server in use has many.
        found = self.page.request.get(f"{self.url}/api/deployments/name/{deployment}").json()
        self.open("Deployments")  # where the links of this version of the UI begin
        self.page.wait_for_url("**/deployments*")
        begin, _, _ = self.page.url.partition("/deployments")
        self.page.goto(f"{begin}/deployments/deployment/{found['id']}")
        self.main.get_by_role("button", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Custom run").click()
        return Form(self.page)

    def open_run(self, name: str) -> None:
        """Open the page of a flow run that is no longer scheduled, from the list of runs."""
        self.open("Runs")
        link = self.main.get_by_role("link", name=name, exact=True)
        # A run that is only scheduled is not listed.
        self.reload_until(link, 30)
        link.click()
        expect(self.main.get_by_role("tab", name="Artifacts")).to_be_visible()

    def state(self, name: str) -> Locator:
        """Give the badge of a flow run's state on its page."""
        return self.main.get_by_text(name, exact=True).first

    def open_artifact(self, key: str, timeout: float) -> Locator:
        """Open an artifact of the flow run whose page is open, once it is there, and give its rendered text."""
        self.main.get_by_role("tab", name="Artifacts").click()
        card = self.main.get_by_role("link").filter(has=self.page.get_by_text(key, exact=True))
        self.reload_until(card, timeout)
        card.click()
        # In between is a page with one entry a version, the newest first.
        self.main.locator("a[href*='/artifacts/artifact/']").first.click()
        # Beside it is its source, hidden.
        text = self.page.get_by_test_id("markdown-display")
        expect(text).to_be_visible()
        return text

    def cancel_run(self) -> None:
        """Cancel the flow run whose page is open."""
        self.main.get_by_role("button", name="Open menu").click()
        self.page.get_by_role("menuitem", name="Cancel", exact=True).click()
        question = self.page.get_by_role("alertdialog", name="Cancel Flow Run")
        question.get_by_role("button", name="Cancel Flow Run").click()
        expect(question).to_be_hidden()


def _tell_of_errors(response: Response) -> None:
    if response.status >= 400:
        print(f"answer {response.status}: {response.request.method} {response.url}")


@contextlib.contextmanager
def prefect_ui(api_url: str, folder: Path) -> Iterator[PrefectUI]:
    """Give the UI of a server in a browser of its own.

    Args:
        api_url: The server's API.
        folder: Where pictures of the pages go; they go into the folder of ``ELASTIC_TRAIN_TEST_OUTPUT``, too.
    """
    folders = [folder, *(Path(kept) for kept in [os.environ.get(OUTPUT_VARIABLE)] if kept)]
    for one in folders:
        one.mkdir(parents=True, exist_ok=True)
    expect.set_options(timeout=PATIENCE * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, headless=True, args=ARGUMENTS, timeout=PATIENCE * 1000
        )
        try:
            page = browser.new_page(viewport={"width": 1400, "height": 1000})
            page.set_default_timeout(PATIENCE * 1000)
            # A test that fails shows what was printed.
            page.on("response", _tell_of_errors)
            page.on("requestfailed", lambda request: print(f"no answer: {request.method} {request.url}"))
            page.on("pageerror", lambda error: print(f"error in the page: {error}"))
            yield PrefectUI(page, api_url, folders)
        finally:
            browser.close()
