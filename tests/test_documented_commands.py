"""The parser accepts the flags of every `diloco` command on the pages, and the tests they name exist."""

from __future__ import annotations

import contextlib
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.cli import COMMANDS
from diloco.config import parse_arguments, parse_flags, parse_options

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(
    r"(?:[\w-]*\$ )?(?:torchrun .* -m )?(?:\w+=\S+ )*(?:(?:docker run|kubectl exec) .* diloco )?diloco ([a-z].*)"
)
ENDS = {"&", "&&", "||", "|", ";", ">", ">>", "2>&1", "2>"}


def commands(text: str) -> Iterator[list[str]]:
    """Yield the arguments of every `diloco` command in the code blocks of a page."""
    for number, block in enumerate(re.split(r"^```", text, flags=re.MULTILINE)):
        language, _, lines = block.partition("\n")
        if number % 2 == 0 or language not in ("", "sh", "bash"):
            continue
        for line in lines.replace("\\\n", " ").splitlines():
            if found := COMMAND.match(line):
                yield until_end(shlex.split(found[1], comments=True))


def until_end(words: list[str]) -> list[str]:
    ends = [number for number, word in enumerate(words) if word in ENDS or word == "..."]
    return words[: ends[0]] if ends else words


def parse(command: str, arguments: list[str]) -> None:
    assert command in COMMANDS, command
    module = importlib.import_module(f"diloco.cli.{command}")
    if command == "train":
        parse_arguments(arguments)
    elif command == "finetune":
        module.parse_arguments(arguments)
    elif command in ("tokenize", "plan"):
        parse_flags(getattr(module, f"{command.capitalize()}Settings"), command, "", arguments, shown={})
    else:
        parse_options(getattr(module, f"{command.capitalize()}Options"), command, "", arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documented_commands_are_understood(page: Path) -> None:
    seen: set[tuple[str, ...]] = set()
    for command, *arguments in commands(page.read_text(encoding="utf-8")):
        if (command, *arguments) not in seen:
            seen.add((command, *arguments))
            with contextlib.suppress(SystemExit):  # of --help
                parse(command, arguments)
            if command in ("train", "finetune") and "--run" in arguments:
                assert "hivemind" in arguments, arguments


def test_commands_are_found_where_pages_have_them() -> None:
    text = "```\nmachine-a$ diloco doctor a:1 b:2   # a comment\nOUT=x diloco train \\\n    --steps 5 && ls\n```\n"
    assert list(commands(text)) == [["doctor", "a:1", "b:2"], ["train", "--steps", "5"]]
    assert sum(len(list(commands(page.read_text(encoding="utf-8")))) for page in PAGES) > 20


def test_the_tests_named_on_the_pages_exist() -> None:
    named = {
        name for page in (ROOT / "docs").glob("*.md") for name in re.findall(r"`(test_\w+)`", page.read_text("utf-8"))
    }
    there = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text("utf-8"))
    }
    assert named
    assert named <= there
