"""The page of `diloco watch` in a real browser."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from diloco import events
from diloco.events import Event, to_record
from tests.browser.conftest import Pages, until
from tests.monitor.made_events import committed, evaluated, fetched, sent, started, step, void

HOSTILE = "<img src=x onerror=\"window.hacked=1\"><script>window.hacked=1</script><a href='https://evil.example'>b</a>"
NEVER_S = 86_400 * 365


def write(folder: Path, told: Iterable[Event], *, begins_s: float = 1e9) -> Path:
    """Write events one second apart, as a run does."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        for number, event in enumerate(told):
            file.write(json.dumps(events.json_ready({**to_record(event), "time_s": begins_s + number})) + "\n")
    return folder


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


def quiet(*folders: Path) -> tuple[object, ...]:
    """Return arguments for folders whose records are old."""
    return (*folders, "--every-s", "0.1", "--alert.silent-s", NEVER_S, "--port", "0")


def number(page: Any, name: str) -> str:
    """Return the figure under a name at the top."""
    return str(
        page.locator("#numbers div", has=page.locator("dt", has_text=re.compile(f"^{name}$")))
        .locator("dd")
        .inner_text()
    )


def test_a_run_that_goes_on_is_shown_live(tmp_path: Path, pages: Pages, watch: Any) -> None:
    folder = write(tmp_path / "mine", run_of(40))
    page = pages.open(watch(*quiet(folder)).address)
    assert page.locator("#live").inner_text() == "live"
    assert number(page, "Step").split("\n")[0] == "40"
    assert number(page, "Compute utilisation").endswith("MFU: no data")
    drawn = "document.querySelector('#figure-loss .plot').data[0].x.length"
    before = page.evaluate(drawn)
    write(folder, [step(number, 1.0) for number in range(41, 51)], begins_s=1e9 + 99)
    until(page, "document.querySelector('#numbers').textContent.includes('50')")
    until(page, f"{drawn} === {before + 10}")
    write(folder, [events.RunFinished(step=50, summary={"steps": 50})], begins_s=1e9 + 199)
    until(page, "document.title.startsWith('finished: mine')")
    assert {address.split("/")[2] for address in pages.requests if address.startswith("http")} == {
        page.url.split("/")[2]
    }


def test_state_that_comes_is_shown_in_per_cent(tmp_path: Path, pages: Pages, watch: Any) -> None:
    folder = write(tmp_path / "mine", run_of(40))
    write(tmp_path / "mine" / "replica-1", [fetched(0, 99, 99, step=40)], begins_s=1e9 + 50)
    page = pages.open(watch(*quiet(folder)).address)
    assert "state fetched" in page.locator("#peers thead").inner_text()
    assert "49 % of 200 B; fragment 0: 99 %" in page.locator("#peers tbody").inner_text()
    write(tmp_path / "mine" / "replica-1", [fetched(1, 50, 150, step=40)], begins_s=1e9 + 51)
    until(page, "document.querySelector('#peers').textContent.includes('75 % of 200 B; fragment 1: 50 %')")
    write(tmp_path / "mine" / "replica-1", [started(40), step(41)], begins_s=1e9 + 52)
    until(page, "!document.querySelector('#peers').textContent.includes('state fetched')")


def test_a_line_that_is_being_written_is_waited_for_and_a_damaged_one_told(
    tmp_path: Path, pages: Pages, watch: Any
) -> None:
    folder = write(tmp_path / "mine", run_of(10))
    line = json.dumps(to_record(step(11)))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"schema": 1, "event": "StepFin\n' + line[:40])
    page = pages.open(watch(*quiet(folder)).address)
    assert number(page, "Step").split("\n")[0] == "10"
    assert "is not a valid event record and was skipped" in page.locator("#problems").inner_text()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line[40:] + "\n")
    until(page, "document.querySelector('#numbers').textContent.includes('11of 100')")


def test_when_the_server_ends_the_page_says_so_and_comes_back(tmp_path: Path, pages: Pages, watch: Any) -> None:
    folder = write(tmp_path / "mine", run_of(10))
    first = watch(*quiet(folder))
    page = pages.open(first.address)
    first.end()
    until(page, "document.querySelector('#live').textContent.startsWith('Connection lost')")
    port = urlsplit(first.address).port
    second = watch(*quiet(folder)[:-2], "--port", port)
    until(page, "document.querySelector('#live').textContent.includes('Open the address')")
    page.context.new_page().goto(second.address)
    until(page, "document.querySelector('#live').textContent === 'live'")
    pages.complaints.clear()  # the browser's messages about the lost connection


def test_a_page_that_was_exported_opens_from_disk_and_loads_nothing(tmp_path: Path, pages: Pages) -> None:
    folder, page_file = write(tmp_path / "mine", run_of()), tmp_path / "page.html"
    command = [sys.executable, "-m", "diloco", "watch", str(folder), "--export", str(page_file)]
    subprocess.run(command, check=True, capture_output=True)
    page = pages.open(page_file.as_uri())
    assert page.locator("#live").inner_text().startswith("as of ")
    assert number(page, "Step").split("\n")[0] == "40"
    assert page.locator("#figure-loss .scatterlayer .trace").count() == 2, "training and held-out"
    assert page.locator("#outer .plot .scatterlayer").count() == 1, "only the gain is reported"
    assert [address for address in pages.requests if not address.startswith(("file:", "data:", "blob:"))] == []


def test_pointing_at_a_curve_and_at_a_round_tells_of_them(tmp_path: Path, pages: Pages, watch: Any) -> None:
    page = pages.open(watch(*quiet(write(tmp_path / "mine", run_of()))).address)
    page.locator("#figure-loss .nsewdrag").hover()
    page.wait_for_selector("#figure-loss .hoverlayer .legend")
    assert "mine training" in page.locator("#figure-loss .hoverlayer").text_content()
    kinds = [cell.get_attribute("class") for cell in page.locator("#grid td").all()]
    assert kinds == ["merged", "merged", "partial", "merged", "merged", "void", "merged", "merged"]
    page.locator("#grid td.void").hover()
    assert "replica 1 was late" in page.locator("#round").inner_text()
    page.locator("#grid td.partial").hover()
    assert "Not in the mean: 1." in page.locator("#round").inner_text()


def test_the_keyboard_reaches_everything(tmp_path: Path, pages: Pages, watch: Any) -> None:
    page = pages.open(watch(*quiet(write(tmp_path / "mine", run_of()))).address)
    page.locator("#grid td[tabindex='0']").focus()
    for key in ("ArrowLeft", "ArrowLeft", "ArrowDown"):
        page.keyboard.press(key)
    assert "Fragment 1, outer step 2" in page.locator("#round").inner_text()
    assert page.locator("#grid td[tabindex='0']").count() == 1
    page.keyboard.press("ArrowDown")
    assert "Fragment 1, outer step 2" in page.locator("#round").inner_text(), "there is no round below"
    page.locator("input[value='tokens']").focus()
    page.keyboard.press("Space")
    until(page, "document.querySelector('#figure-loss .plot').layout.xaxis.title.text === 'tokens'")


def test_a_screen_reader_finds_headings_names_and_pictures_in_words(tmp_path: Path, pages: Pages, watch: Any) -> None:
    page = pages.open(watch(*quiet(write(tmp_path / "mine", run_of()))).address)
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map((h) => Number(h.tagName[1]))")
    assert levels[0] == 1
    assert all(later <= earlier + 1 for earlier, later in itertools.pairwise(levels))
    label = page.locator("#figure-loss .plot").get_attribute("aria-label")
    assert "mine training: 2.99 at 1, 2.6 at 40 steps" in label
    assert page.evaluate("[...document.querySelectorAll('[role=img]')].every((e) => e.getAttribute('aria-label'))")
    assert page.evaluate("[...document.querySelectorAll('input,select')].every((e) => e.labels.length)")
    assert page.evaluate("document.documentElement.lang") == "en"


CONTRAST = """() => {
  const light = (text) => { const [r, g, b] = text.match(/\\d+/g).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = (node) => { for (let n = node; n; n = n.parentElement) {
    const c = getComputedStyle(n).backgroundColor;
    if (!c.endsWith(", 0)")) return c; } return "rgb(255, 255, 255)"; };
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    if (node.closest("svg") || node.closest(".skip") || !node.offsetParent) continue;
    if (![...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim())) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(ground(node))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) found.push([node.outerHTML.slice(0, 80), ratio]);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_in_light_and_dark(tmp_path: Path, pages: Pages, watch: Any, scheme: str) -> None:
    """The contrast is at least 4.5 (WCAG 2.2, 1.4.3), with alerts of both levels and every kind of peer on the page."""
    told = [*run_of(), step(41, float("nan")), *(sent(m, 0, 5, digest="ab"[m]) for m in (0, 1))]
    told += [committed(0, 1, outer_step, contributors=(0,)) for outer_step in (5, 6, 7)]
    page = pages.open(watch(*quiet(write(tmp_path / "mine", told))).address, scheme=scheme)
    assert page.locator("#alerts li").count() >= 3
    assert page.evaluate(CONTRAST) == []
    dark = sum(map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3])) < 200
    assert dark == (scheme == "dark")
    other = {"light": "dark", "dark": "light"}[scheme]
    page.locator("#theme").select_option(other)
    assert page.evaluate("document.documentElement.dataset.theme") == other
    assert page.evaluate(CONTRAST) == []


def test_400_pixels_are_wide_enough(tmp_path: Path, pages: Pages, watch: Any) -> None:
    folders = [write(tmp_path / name, run_of()) for name in ("a-name-that-is-quite-long-for-a-narrow-screen", "b")]
    page = pages.open(watch(*quiet(*folders)).address, width=400)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.locator("#figure-loss .plot").bounding_box()["width"] > 300


def test_what_strangers_write_is_text(tmp_path: Path, pages: Pages, watch: Any) -> None:
    """Markup stays text in names of runs, samples, reasons, notes, facts, settings and curves."""
    told = [
        *run_of(),
        void(0, 0, 9, HOSTILE),
        events.SampleGenerated(step=40, prompt=HOSTILE, text=HOSTILE),
        events.Note(step=40, text=HOSTILE),
        events.ViewChanged(step=41, replica=0, view=1, members=(0,), joined=(), left=(1,), reason=HOSTILE),
    ]
    told[0] = started(total_steps=100, algorithm=HOSTILE, facts={HOSTILE: HOSTILE, "__proto__": HOSTILE})
    name = HOSTILE.replace("/", "-")
    folders = [write(tmp_path / name, told), write(tmp_path / "other", told)]
    for folder, value in zip(folders, ("<b>1</b>", "<b>2</b>"), strict=True):
        (folder / "config.toml").write_text(f'"<b>key</b>" = "{value}"\n')
    page = pages.open(watch(*quiet(*folders)).address)
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


def test_no_line_is_drawn_where_nothing_was_told(tmp_path: Path, pages: Pages, watch: Any) -> None:
    told = [started(total_steps=900), *(step(number, 2.0) for number in (*range(1, 9), *range(500, 509)))]
    page = pages.open(watch(*quiet(write(tmp_path / "mine", told))).address)
    drawn = page.evaluate("document.querySelector('#figure-loss .plot').data[0].y")
    assert drawn == [2] * 8 + [None] + [2] * 9


def test_no_band_is_drawn_where_nothing_was_told(tmp_path: Path, pages: Pages, watch: Any) -> None:
    told = [started(total_steps=9000), *(step(number, 2.0) for number in (*range(1, 601), *range(8000, 8601)))]
    page = pages.open(watch(*quiet(write(tmp_path / "mine", told))).address)
    bands = "document.querySelector('#figure-loss .plot').data.filter((trace) => trace.fill)"
    until(page, f"{bands}.length === 2")
    widths = page.evaluate(f"{bands}.map((band) => band.x[band.x.length - 1] - band.x[0])")
    assert all(500 < width < 600 for width in widths)


def test_two_runs_are_compared(tmp_path: Path, pages: Pages, watch: Any) -> None:
    folders = [write(tmp_path / "a", run_of(40)), write(tmp_path / "b", run_of(30, loss=2.0))]
    for folder, codec in zip(folders, ("fp4", "int8"), strict=True):
        (folder / "config.toml").write_text(f'seed = 0\nout = "{folder}"\n[codec]\nname = "{codec}"\n')
    page = pages.open(watch(*quiet(*folders)).address)
    names = page.evaluate("document.querySelector('#figure-loss .plot').data.map((trace) => trace.name)")
    assert names == ["a training", "a held-out", "b training", "b held-out"]
    table = page.locator("#settings").inner_text().split()
    assert table == ["setting", "a", "b", "sync.codec", "fp4", "int8"]
    assert number(page, "Step").split("\n")[0] == "40"
    page.locator("#run").select_option("1")
    assert number(page, "Step").split("\n")[0] == "30"
    for axis, unit in (("tokens", "tokens"), ("time_s", "seconds")):
        page.locator(f"input[value='{axis}']").check()
        until(page, f"document.querySelector('#figure-loss .plot').layout.xaxis.title.text === '{unit}'")
