"""The pages show what their authors meant, and are no longer than a reader can bear."""

import dataclasses
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.md"))
PAGES = [*DOCS, *BENCHMARKS, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
MAX_WORDS = {"gap.md": 1500, "log.md": 1000}
"""Of a benchmark's page, outside code and tables and above those that a command writes. All others: 700."""
GENERATED = "<!-- what follows is written by"


def shown(text: str) -> Iterator[str]:
    """Yield the lines that are neither code nor comments, with a letter for what is in backticks."""
    for number, block in enumerate(re.split(r"^ *```.*\n?", text, flags=re.M)):
        if number % 2 == 0:
            for line in re.sub(r"<!--.*?-->", "", block, flags=re.S).splitlines():
                if not line.startswith((" " * 4, ">>> ", "... ")):
                    yield re.sub(r"(`+).+?\1", "x", line)


def raw_markup(text: str) -> list[str]:
    """Return what a reader would see as markup or as a gap that nobody has filled.

    >>> raw_markup("Before {tab} and ::: diloco.DiLoCo")
    ['{tab}']
    >>> raw_markup("::: diloco.DiLoCo")
    [':::']
    >>> raw_markup("``{tab}`` and `{tab}` are code")
    []
    """
    pattern = r"\{\{?\w*\}\}?|^:::|\{%|%\}|</?[a-z]+[ >]|\]\(\)|\[\]\(|\bTODO\b"
    return [found for line in shown(text) for found in re.findall(pattern, line)]


def cells(row: str) -> int:
    """Return how many cells a row of a table has; a bar in code counts only if it is not escaped."""
    return len(re.split(r"(?<!\\)\|", row.strip().strip("|")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_page_shows_markup_that_was_not_rendered(page: Path) -> None:
    assert raw_markup(page.read_text("utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_row_of_a_table_has_as_many_cells_as_its_head(page: Path) -> None:
    text = page.read_text("utf-8")
    assert len(re.findall(r"^ *```", text, re.M)) % 2 == 0, "a block of code does not end"
    for table in re.findall(r"(?:^ *\|.*\n)+", text, re.M):
        head, rule, *rows = table.splitlines()
        assert re.fullmatch(r"[ |:-]+", rule), head
        assert [row for row in rows if cells(row) != cells(head)] == []


def words(text: str) -> int:
    """Return the number of words outside code and tables."""
    return sum(len(line.split()) for line in shown(text) if not line.lstrip().startswith("|"))


@pytest.mark.parametrize("page", BENCHMARKS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_of_a_benchmark_is_short_outside_its_tables(page: Path) -> None:
    assert words(page.read_text("utf-8").partition(GENERATED)[0]) <= MAX_WORDS.get(page.name, 700)


def test_readme_has_at_most_120_lines() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 120


def test_readme_and_docs_have_at_most_16000_words() -> None:
    assert sum(len(page.read_text("utf-8").split()) for page in DOCS) <= 16_000


@pytest.mark.parametrize(
    ("section", "members"),
    re.findall(
        r"^::: (\S+)\n    options: \{members: \[(.*?)\]", (ROOT / "docs/site/settings.md").read_text("utf-8"), re.M
    ),
)
def test_the_page_of_every_setting_leaves_out_none(section: str, members: str) -> None:
    module, _, name = section.rpartition(".")
    fields = dataclasses.fields(getattr(importlib.import_module(module), name))
    assert members.split(", ") == [field.name for field in fields]
