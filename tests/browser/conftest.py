"""A browser for the tests of the report's page: one of the system, started once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from megatron_chameleon.report.page import make_report
from tests.unit.report.page_samples import HOSTILE_NAMES, write_full_folder

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = f"no browser: none of {', '.join(PROGRAMS)} is there; apt-get install chromium"
WIDE = {"width": 1280, "height": 900}
NAMES = ["code", "web", "books", "papers", "wiki", *HOSTILE_NAMES[:2]]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        # Where every change is checked it has to be there.
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(MISSING)
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=program, args=arguments)
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run folder with everything in it."""
    root = write_full_folder(tmp_path_factory.mktemp("browser") / "run", NAMES)
    return make_report(root) / "report.html"


class Watched:
    """What a page asked for, and what went wrong in it."""

    def __init__(self, page: Page) -> None:
        self.requests: list[str] = []
        self.problems: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", lambda dialog: self.problems.append(f"dialog: {dialog.message}"))
        page.on(
            "console",
            lambda said: (
                self.problems.append(said.text) if said.type in ("error", "warning") else None
            ),
        )


@pytest.fixture
def open_page(browser: Browser, report: Path):
    """Opens the page in a browser of its own: ``open_page(color_scheme="dark")``."""
    contexts = []

    def opened(**settings) -> tuple[Page, Watched]:
        contexts.append(browser.new_context(**{"viewport": WIDE, **settings}))
        page = contexts[-1].new_page()
        watched = Watched(page)
        page.goto(report.as_uri())
        return page, watched

    yield opened
    for context in contexts:
        context.close()
