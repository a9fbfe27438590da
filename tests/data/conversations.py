"""Conversations and templates for tests, and what a model would see and learn of a file of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diloco.data import ChatTokenizer, DataSettings, heldout_rows

CALLS = (
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}:"
    "{% if m.thinking %}({{ m.thinking }}){% endif %}{{ m.content }}" + CALLS
)
RAW_ARGUMENTS = TEMPLATE.replace("c.function.arguments | tojson", "c.function.arguments")
JOINED_ARGUMENTS = TEMPLATE.replace("c.function.arguments | tojson", "'=' + c.function.arguments")


def rows_of(tokenizer: ChatTokenizer, data: Path, **changes: Any) -> list[str]:
    """Return each conversation of a file as text: what is learned in «», and < and > around a message."""
    settings = DataSettings(format="chat", paths=(data,), tokenizer="unused", packing="single", **changes)
    length = 1024
    rows = heldout_rows(settings, tokenizer, length, [data])
    tokens = rows[0 : len(rows)].astype("int64")
    rows.mark(1, targets := tokens[1:].copy())
    learned = [False, *(targets >= 0).tolist()]
    text = b""
    for place, token in enumerate(tokens.tolist()):
        if place % length == 0:
            text += b"\0"
        elif learned[place] != learned[place - 1]:
            text += ("«" if learned[place] else "»").encode()
        text += bytes([token]) if token < 256 else {256: b"", 257: b"<", 258: b">"}[token]
    return text.decode().split("\0")[1:-1]


def said(*turns: Any, **more: Any) -> dict[str, Any]:
    """Return a record with messages of alternating roles; a turn may be a dictionary of its own."""
    roles = ("user", "assistant")
    messages = [
        {"role": roles[number % 2], "content": turn} if isinstance(turn, str) else turn
        for number, turn in enumerate(turns)
    ]
    return {"messages": messages, **more}


def answer(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def called(arguments: Any, content: Any = "", name: str = "f") -> dict[str, Any]:
    return answer(content, tool_calls=[{"type": "function", "function": {"name": name, "arguments": arguments}}])


def share(*turns: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": value} for role, value in turns], **more}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
TOOL_TEXT = json.dumps([TOOL])
BOTH = "<user:q>" + "<assistant:«a>»"
