"""The system's browser, started once, and a page of a report."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from megatron_chameleon.report.page import make_report
from tests.unit.report.samples import HOSTILE_NAMES, write_full_folder

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = f"no browser: found none of {', '.join(PROGRAMS)}; apt-get install chromium"
WIDE = {"width": 1280, "height": 900}
NAMES = ["code", "web", "books", "papers", "wiki", *HOSTILE_NAMES[:2]]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        # In CI, a missing browser must fail the tests, so that they are never skipped unnoticed.
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(MISSING)
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=program, args=arguments)
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report page of a run folder that fills every section."""
    root = write_full_folder(tmp_path_factory.mktemp("browser") / "run", NAMES)
    return make_report(root) / "report.html"


class PageLog:
    """The requests that a page made, and its console messages and errors."""

    def __init__(self, page: Page) -> None:
        self.requests: list[str] = []
        self.problems: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", lambda dialog: self.problems.append(f"dialog: {dialog.message}"))
        page.on(
            "console",
            lambda entry: (
                self.problems.append(entry.text) if entry.type in ("error", "warning") else None
            ),
        )


@pytest.fixture
def open_page(browser: Browser, report: Path):
    """``open_page(color_scheme="dark")`` opens the page in a separate browser context."""
    contexts = []

    def opened(**settings) -> tuple[Page, PageLog]:
        contexts.append(browser.new_context(**{"viewport": WIDE, **settings}))
        page = contexts[-1].new_page()
        log = PageLog(page)
        page.goto(report.as_uri())
        return page, log

    yield opened
    for context in contexts:
        context.close()
