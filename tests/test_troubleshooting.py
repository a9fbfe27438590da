"""The messages that the page "Troubleshooting" quotes are those of the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
ROWS = [line.strip("|").split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
QUOTED = [re.fullmatch(r" ?`(.*)` ?", row[0]) for row in ROWS]
MESSAGES = [match[1] for match in QUOTED if match is not None]


@cache
def templates() -> str:
    """Return all texts of the package, with … for what is filled in, one a line."""
    texts = []
    for path in sorted((ROOT / "src" / "diloco").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_there_are_messages_on_the_page() -> None:
    assert len(MESSAGES) == len(ROWS) > 20


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_on_the_page_is_one_of_the_code(message: str) -> None:
    parts = [re.escape(part) for part in message.split("…")]
    assert re.search("[^\n]*?".join(parts), templates()), message
