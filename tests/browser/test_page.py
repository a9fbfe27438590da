"""The page of `diloco watch` in a real browser, if one is installed. `make test-browser` installs it."""

import contextlib
import itertools
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from diloco import events
from diloco.events import Event
from tests.monitor.made_events import committed, evaluated, sent, started, step, void
from tests.watch.runs import write

LIMIT_S = 300.0
"""A time-out far above the usual times, for busy machines."""
HOSTILE = "<img src=x onerror=\"window.hacked=1\"><script>window.hacked=1</script><a href='https://evil.example'>b</a>"
LOSS = "document.querySelector('#figure-loss .plot')"
LIVE = "document.querySelector('#live').textContent"


def until(page: Any, expression: str) -> None:
    """Wait until ``expression`` is true on the page. Playwright's own waiting needs `eval`, which the page forbids."""
    until_s = time.monotonic() + LIMIT_S
    while not page.evaluate(expression):
        assert time.monotonic() < until_s, expression
        page.wait_for_timeout(50)


@contextlib.contextmanager
def watching(*arguments: object) -> Iterator[str]:
    """Run `diloco watch`, and yield the address that it prints."""
    command = [sys.executable, "-m", "diloco", "watch", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        yield re.findall(r"http://\S+", process.stdout.readline())[0]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_S)


class Pages:
    """Opens pages, and records their errors and network requests."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self.errors: list[str] = []
        self.requests: list[str] = []

    def close(self) -> None:
        for context in self._browser.contexts:
            context.close()

    def open(self, address: str, width: int = 1200) -> Any:
        """Open a page, and wait until it shows figures and curves."""
        page = self._browser.new_context(viewport={"width": width, "height": 900}, color_scheme="light").new_page()
        page.set_default_timeout(1_000 * LIMIT_S)
        page.on("console", lambda message: self.errors.append(message.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", lambda dialog: self.errors.append(f"a dialog: {dialog.message}"))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(address)
        page.wait_for_selector("#numbers dd")
        until(page, f"{LOSS}.textContent !== ''")
        return page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start an installed Chromium with playwright, without playwright's own downloads."""
    playwright = pytest.importorskip("playwright.sync_api", reason="`make test-browser` installs playwright")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    if program is None:
        pytest.skip("no chromium was found; `make test-browser` installs one")
    with playwright.sync_playwright() as running:
        launched = running.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield launched
        launched.close()


@pytest.fixture
def pages(browser: Any) -> Iterator[Pages]:
    """The pages of one test, which fails if a page logged an error."""
    pages = Pages(browser)
    yield pages
    # plotly reports labels whose width changes during layout
    assert [error for error in pages.errors if "auto-margin redraws" not in error] == []


Open = Callable[..., Any]


@pytest.fixture
def opened(pages: Pages) -> Iterator[Open]:
    """A function that opens the page of run folders."""
    with contextlib.ExitStack() as stack:

        def opens(*folders: Path, width: int = 1200) -> Any:
            address = stack.enter_context(watching(*folders, "--every", "100ms", "--port", "0"))
            return pages.open(address, width)

        yield opens
        pages.close()  # before the server ends


def run_of(steps: int = 40, *, loss: float = 3.0) -> Iterable[Event]:
    """Write a run of two replicas and two fragments, with a void round and one without replica 1."""
    yield started(total_steps=100, data_parallel_bytes_per_step=9_000)
    for number in range(1, steps + 1):
        yield step(number, loss - 0.01 * number, tokens=8 * number)
        if number % 10 == 0:
            outer_step = number // 10
            for fragment, replica in itertools.product((0, 1), (0, 1)):
                yield sent(replica, fragment, outer_step, step=number, digest="a")
            yield committed(0, 0, outer_step, step=number, contributors=(0, 1) if outer_step != 3 else (0,), gain=1.5)
            if outer_step == 2:
                yield void(0, 1, outer_step, "replica 1 was late", step=number)
            else:
                yield committed(0, 1, outer_step, step=number, gain=1.5)
    yield evaluated(steps, loss)


def recent(folder: Path, told: Iterable[Event]) -> Path:
    return write(folder, told, end_s=time.time())


def number(page: Any, name: str) -> str:
    """Return the figure under a name at the top."""
    tile = page.locator("#numbers div", has=page.locator("dt", has_text=re.compile(f"^{name}$")))
    return str(tile.locator("dd").inner_text()).split("\n")[0]


def test_run_is_shown_live_until_it_ends(tmp_path: Path, pages: Pages, opened: Open) -> None:
    folder = recent(tmp_path / "mine", run_of(40))
    page = opened(folder)
    assert (page.locator("#live").inner_text(), number(page, "Step")) == ("live", "40")
    recent(folder, [step(number, 1.0) for number in range(41, 51)])
    until(page, f"{LOSS}.data[0].x.length === 50")

    def lose(route: Any) -> None:
        """Let the connection end in the middle of the next data, which are asked for again."""
        answer = route.fetch()
        route.fulfill(response=answer, body="{")
        if answer.status == 200:
            page.unroute("**/data.json")

    page.route("**/data.json", lose)
    recent(folder, [events.RunFinished(step=50, summary={"steps": 50})])
    until(page, "document.title.startsWith('finished: mine')")
    sites = {urlsplit(address).netloc for address in pages.requests if address.startswith("http")}
    assert sites == {urlsplit(page.url).netloc}


def test_page_reconnects_to_a_restarted_server(tmp_path: Path, pages: Pages) -> None:
    folder = recent(tmp_path / "mine", run_of(10))
    with watching(folder, "--port", "0") as address:
        page = pages.open(address)
    until(page, f"{LIVE}.startsWith('Connection lost')")
    with watching(folder, "--port", urlsplit(address).port) as address:
        until(page, f"{LIVE}.includes('Open the address')")
        page.context.new_page().goto(address)
        until(page, f"{LIVE} === 'live'")
        pages.close()
    pages.errors.clear()  # the browser's messages about the lost connection


def test_exported_page_opens_from_disk_and_loads_nothing(tmp_path: Path, pages: Pages) -> None:
    folder, page_file = recent(tmp_path / "mine", run_of()), tmp_path / "page.html"
    command = [sys.executable, "-m", "diloco", "watch", str(folder), "--out", str(page_file)]
    subprocess.run(command, check=True, capture_output=True)
    page = pages.open(page_file.as_uri())
    assert page.locator("#live").inner_text().startswith("as of ")
    assert page.locator("#figure-loss .scatterlayer .trace").count() == 2, "training and held-out"
    page.locator("#outer-details summary").click()
    until(page, "document.querySelectorAll('#outer .plot .scatterlayer').length === 2")  # the wait and the gain
    assert [address for address in pages.requests if not address.startswith(("file:", "data:", "blob:"))] == []
    pages.close()


def test_what_has_no_data_is_hidden(tmp_path: Path, opened: Open) -> None:
    page = opened(recent(tmp_path / "mine", [started(facts={}), step(1)]))
    visible = [heading.inner_text() for heading in page.locator("h2").all() if heading.is_visible()]
    assert visible == ["Status", "Alerts", "Curves", "Peers"]
    assert "No data" not in page.locator("main").inner_text()
    assert not page.locator("#figure-model_flops_utilization").is_visible()


def test_mouse_and_keyboard_reach_curves_and_rounds(tmp_path: Path, opened: Open) -> None:
    page = opened(recent(tmp_path / "mine", run_of()))
    page.locator("#figure-loss .nsewdrag").hover()
    page.wait_for_selector("#figure-loss .hoverlayer .legend")
    assert "mine training" in page.locator("#figure-loss .hoverlayer").text_content()
    kinds = [cell.get_attribute("class") for cell in page.locator("#grid td").all()]
    assert kinds == ["merged", "merged", "partial", "merged", "merged", "void", "merged", "merged"]
    for kind, words in (("void", "replica 1 was late"), ("partial", "Not in the mean: 1.")):
        page.locator(f"#grid td.{kind}").hover()
        assert words in page.locator("#round").inner_text()
    page.locator("#grid td[data-key='0:3']").focus()
    for key in ("ArrowUp", "ArrowLeft", "ArrowDown", "ArrowDown"):  # there is no round above or below
        page.keyboard.press(key)
    assert "Fragment 1, outer step 2" in page.locator("#round").inner_text()
    page.locator("input[value='tokens']").focus()
    page.keyboard.press("Space")
    until(page, f"{LOSS}.layout.xaxis.title.text === 'tokens'")


def test_no_tool_bar_covers_a_curve_and_bytes_have_their_units(tmp_path: Path, opened: Open) -> None:
    page = opened(recent(tmp_path / "mine", run_of()))
    page.locator("#figure-loss .nsewdrag").hover()
    page.wait_for_selector("#figure-loss .modebar-btn")
    curve = page.locator("#figure-loss .nsewdrag").bounding_box()
    buttons = [button.bounding_box() for button in page.locator("#figure-loss .modebar-btn").all()]
    assert [box for box in buttons if box["y"] + box["height"] > curve["y"]] == []
    labels = page.locator("#figure-sent_bytes .ytick").all_text_contents()
    assert labels
    assert [label for label in labels if not re.fullmatch(r"\d+(\.\d+)?[kMGT]?B", label)] == []


def test_what_strangers_write_is_shown_as_text(tmp_path: Path, opened: Open) -> None:
    """Markup stays text in names of runs, samples, reasons, notes, facts, settings and curves."""
    told = [
        started(total_steps=100, algorithm=HOSTILE, facts={HOSTILE: HOSTILE, "__proto__": HOSTILE}),
        *[*run_of()][1:],
        void(0, 0, 9, HOSTILE),
        events.SampleGenerated(step=40, prompt=HOSTILE, text=HOSTILE),
        events.Note(step=40, text=HOSTILE),
        events.ViewChanged(step=41, replica=0, view=1, members=(0,), joined=(), left=(1,), reason=HOSTILE),
    ]
    folders = [recent(tmp_path / name, told) for name in (HOSTILE.replace("/", "-"), "other")]
    for folder, value in zip(folders, ("<b>1</b>", "<b>2</b>"), strict=True):
        (folder / "config.toml").write_text(f'"<b>key</b>" = "{value}"\n')
    page = opened(*folders)
    page.locator("#figure-loss .nsewdrag").hover()
    page.wait_for_selector("#figure-loss .hoverlayer .legend")
    assert "<img src=x" in page.locator("#figure-loss .hoverlayer").text_content()
    page.locator("#grid td.void").nth(0).hover()
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("({}).polluted") is None
    assert page.locator("body img, main script, main a").count() == 0
    for place in ("#round", "#samples", "#notes", "#views", "#where", "#legend"):
        assert "<img src=x" in page.locator(place).text_content(), place
    assert "<b>1</b>" in page.locator("#settings").inner_text()


def test_no_line_or_band_is_drawn_across_a_gap(tmp_path: Path, opened: Open) -> None:
    told = [started(total_steps=9000), *(step(number, 2.0) for number in (*range(1, 601), *range(8000, 8601)))]
    page = opened(recent(tmp_path / "mine", told))
    (line,) = page.evaluate(f"{LOSS}.data.filter((trace) => trace.name).map((trace) => trace.y)")
    assert [value for value, _ in itertools.groupby(line)] == [2, None, 2]
    bands = page.evaluate(f"{LOSS}.data.filter((trace) => trace.fill).map((trace) => trace.x)")
    assert [500 < band[-1] - band[0] < 601 for band in bands] == [True, True]
