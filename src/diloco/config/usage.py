"""Reading a command line with tyro, and what is said of one that can't be read: a sentence instead of a box."""

from __future__ import annotations

import contextlib
import difflib
import io
import itertools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import tyro

from diloco.errors import ConfigurationError

__all__ = ["in_a_sentence", "parse_arguments_of"]

_NUMBERS = {
    "invalid literal for int() with base 10: ": "a whole number",
    "could not convert string to float: ": "a number",
}


def parse_arguments_of(kind: Any, *, program: str, description: str, arguments: Sequence[str]) -> Any:
    """``arguments`` as a ``kind``, which tyro makes flags of.

    Raises:
        ConfigurationError: for what can't be read; it names the nearest flag.
        SystemExit: with code 0, for --help.
    """
    said = io.StringIO()

    def read(given: Sequence[str]) -> Any:
        return tyro.cli(kind, prog=program, description=description, args=list(given))

    try:
        with contextlib.redirect_stderr(said):
            parsed = read(arguments)
    except SystemExit as stop:
        if stop.code != 2:
            raise
    else:
        sys.stderr.write(said.getvalue())
        return parsed
    refusal, text = io.StringIO(), io.StringIO()
    with _wide_terminal():
        with contextlib.suppress(SystemExit), contextlib.redirect_stderr(refusal):
            read(arguments)
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(text):
            read(["--help"])
    flags = sorted(set(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", text.getvalue())))
    words = in_a_sentence(refusal.getvalue(), flags)
    complete = re.search(r"Nothing was \w+\.$", words)  # a check of our own
    raise ConfigurationError(words if complete else f"{words} See `{program} --help`. Nothing was started.")


@contextlib.contextmanager
def _wide_terminal() -> Iterator[None]:
    """No sentence is broken into lines."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "4000"
    try:
        yield
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before


def in_a_sentence(box: str, flags: Sequence[str]) -> str:
    """What tyro's box says.

    Args:
        box: as it prints it, no line of it broken; where the terminal takes ASCII alone, it has no frame.
        flags: that there are.

    >>> box = '''
    ... ╭─ Unrecognized options ───────────────╮
    ... │ Unrecognized options: --stepz, 5     │
    ... │ ──────────────────────────────────── │
    ... │ For full helptext, run train --help  │
    ... ╰──────────────────────────────────────╯'''
    >>> in_a_sentence(box, ["--steps", "--seed"])
    'there is no flag --stepz; did you mean --steps?'
    """
    lines = box.strip("\n").splitlines()
    framed = [line.strip()[2:-2] for line in lines if line.strip().startswith("│")]
    rows = framed or [line[2:] for line in lines[2:]]  # below the title and a line
    rows = list(itertools.takewhile(lambda row: not row.strip() or set(row.strip()) - {"─", "-"}, rows))
    words = " ".join(row.strip() for row in rows)
    if words.startswith("Unrecognized options: "):
        return _unknown(words.removeprefix("Unrecognized options: ").split(", "), flags)
    if words.startswith("Missing from "):
        return _missing(rows[1:])
    if found := re.match(r"Missing value for argument '([^'/]*)", words):
        return f"{_named(found[1])} was given without a value."
    if found := re.match(r"invalid choice '(.*)' for argument '([^'/]*).*Expected one of \((.*?),?\)\.$", words):
        return f"{_named(found[2])} {found[1]} was given; {found[3].replace(chr(39), '')} would work."
    if found := re.match(r"Error parsing (--[^/: ]*)[^:]*: (.*)", words):
        for reason, works in _NUMBERS.items():
            if found[2].startswith(reason):
                return f"{found[1]} {found[2].removeprefix(reason).strip(chr(39))} was given; {works} would work."
        return f"{found[1]}: {found[2].rstrip('.')}."
    if found := re.match(r"Error parsing [^:]*: (.*)", words):  # of a check of our own
        return found[1]
    return words


def _unknown(tokens: Sequence[str], flags: Sequence[str]) -> str:
    odd = [token.partition("=")[0] for token in tokens if token.startswith("-")]
    if not odd:
        return f"{', '.join(tokens)} was given beyond what is taken."
    said = []
    for flag in odd:
        near = difflib.get_close_matches(flag, flags, n=1, cutoff=0.6)
        said.append(f"there is no flag {flag}{f'; did you mean {near[0]}?' if near else '.'}")
    return " ".join(said)


def _missing(rows: Sequence[str]) -> str:
    """Names, each with its help below it, indented further."""
    indent = min(len(row) - len(row.lstrip()) for row in rows)
    names = [row.split()[0] for row in rows if len(row) - len(row.lstrip()) == indent]
    told = [row.strip().removesuffix("(required)").strip() for row in rows if len(row) - len(row.lstrip()) > indent]
    meaning = "" if len(told) != len(names) else ": " + " ".join(told)
    return f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} missing{meaning or '.'}"


def _named(name: str) -> str:
    return name if name.startswith("-") else name.upper()
