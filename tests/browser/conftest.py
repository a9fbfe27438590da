"""Fixtures for a browser, if one is installed, and for `diloco watch` in a separate process."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
LIMIT_S = 300.0
"""A time-out far above the usual times, for busy machines."""


def until(page: Any, expression: str) -> None:
    """Wait until ``expression`` is true on the page. Playwright's own waiting needs `eval`, which the page forbids."""
    until_s = time.monotonic() + LIMIT_S
    while not page.evaluate(expression):
        assert time.monotonic() < until_s, expression
        page.wait_for_timeout(50)


class Watch:
    """A running `diloco watch` server with these arguments."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "diloco", "watch", *map(str, arguments)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        self.address = re.findall(r"http://\S+", said)[0]

    def end(self) -> None:
        """Interrupt it as Ctrl-C does."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        self._process.communicate(timeout=LIMIT_S)


class Pages:
    """Opens pages, and records their errors and network requests."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self._contexts: list[Any] = []
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def open(self, address: str, *, width: int = 1200, height: int = 900, scheme: str = "light") -> Any:
        """Open a page, and wait until it shows figures and curves."""
        context = self._browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        context.set_default_timeout(1_000 * LIMIT_S)
        self._contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: self._hear(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(f"a dialog: {dialog.message}"))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(address)
        page.wait_for_selector("#numbers dd")
        until(page, "document.querySelector('#figure-loss .plot').textContent !== ''")
        return page

    def _hear(self, words: str) -> None:
        if "auto-margin redraws" not in words:  # from plotly, about labels whose width changes during layout
            self.complaints.append(words)

    def close(self) -> None:
        for context in self._contexts:
            context.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start an installed Chromium with playwright, without playwright's own downloads."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip("playwright is not installed; `make test-browser` installs it and runs this test")
    named = os.environ.get("DILOCO_BROWSER", "")
    program = named or next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("no chromium was found; `make test-browser` says how to install one and runs this test")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()


@pytest.fixture
def watch() -> Iterator[Any]:
    """A function that starts `diloco watch` with the given arguments."""
    running: list[Watch] = []

    def start(*arguments: object) -> Watch:
        running.append(Watch(*arguments))
        return running[-1]

    yield start
    for each in running:
        each.end()


@pytest.fixture
def pages(browser: Any, watch: Any) -> Iterator[Pages]:
    """The pages of one test, which fails if a page logged an error. They are closed before the server ends."""
    opened = Pages(browser)
    yield opened
    opened.close()
    assert opened.complaints == []
