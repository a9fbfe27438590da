"""Conversations of odd shapes: the text that a model sees, what of it is learned, and what is named as unused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from diloco.data import ChatTokenizer, DataSettings, heldout_rows
from diloco.errors import DataError
from tests.finetuning import SPECIAL, write_records, write_tokenizer
from tests.lazy import Lazy

pyarrow, parquet = Lazy("pyarrow"), Lazy("pyarrow.parquet")

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


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, ChatTokenizer] = {}

    def make(template: str) -> ChatTokenizer:
        if template not in made:
            made[template] = ChatTokenizer(str(write_tokenizer(tmp_path_factory.mktemp("t"), template=template)))
        return made[template]

    return make


SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"text": "plain"}, "p«lain»"),  # the first token is not predicted
    "messages": (said("q", "a"), BOTH),
    "ShareGPT": (share(("human", "q"), ("gpt", "a")), BOTH),
    "messages as JSON": ({"messages": json.dumps(said("q", "a")["messages"])}, BOTH),
    "prompt and completion": ({"prompt": "q", "completion": "a"}, BOTH),
    "chosen": ({"prompt": "q", "chosen": "a", "rejected": "b"}, BOTH),
    "prompt and completion as JSON": (
        {"prompt": json.dumps(said("q")["messages"]), "completion": json.dumps([answer("a")])},
        BOTH,
    ),
    "chosen alone": ({"chosen": said("q", "a")["messages"], "rejected": said("q", "b")["messages"]}, BOTH),
    "Alpaca": ({"instruction": "add", "input": "1 2", "output": "3"}, "<user:add\n\n1 2><assistant:«3>»"),
    "system beside ShareGPT": (share(("human", "q"), ("gpt", "a"), system="s"), f"<system:s>{BOTH}"),
    "answer first": (share(("gpt", "w"), ("human", "q"), ("gpt", "a")), f"<assistant:«w>»{BOTH}"),
    "two answers in a row": (said("q", "a", answer("b")), f"{BOTH}<assistant:«b>»"),
    "empty answer": (said("q", ""), "<user:q><assistant:«>»"),
    "parts": (
        said(
            {"role": "user", "content": [{"type": "text", "text": "q"}, "!"]}, answer([{"type": "text", "text": "a"}])
        ),
        "<user:q!><assistant:«a>»",
    ),
    "weight 0": (said("p", answer("b", weight=0), "q", answer("a", weight=1)), f"<user:p><assistant:b>{BOTH}"),
    "tools as JSON": (said("q", "a", tools=TOOL_TEXT), f"{TOOL_TEXT}{BOTH}"),
    "call": (said("q", called({"a": 1})), '<user:q><assistant:«f{"a": 1}>»'),
    "arguments as JSON": (said("q", called('{"a": 1}')), '<user:q><assistant:«f{"a": 1}>»'),
    "null argument of another tool": (
        said("q", called({"a": 1, "b": None}), tools=[TOOL]),
        TOOL_TEXT + '<user:q><assistant:«f{"a": 1}>»',
    ),
    "calls as JSON": (
        said("q", answer("", tool_calls=json.dumps([{"name": "f", "arguments": '{"a": 1}'}]))),
        '<user:q><assistant:«f{"a": 1}>»',
    ),
    "ShareGPT with tools": (
        share(
            ("human", "q"),
            ("function_call", '{"name": "f", "arguments": {"a": 1}}'),
            ("observation", "o"),
            ("gpt", "a"),
        ),
        '<user:q><assistant:«f{"a": 1}>»<tool:o><assistant:«a>»',
    ),
    "thoughts": (said("q", answer("a", thinking="t")), "<user:q><assistant:«(t)a>»"),
    "null fields": (said("q", answer("a", tool_calls=None, name=None, weight=None), tools=None, system=None), BOTH),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_conversation_of_any_shape_is_read_and_its_answers_are_learned(
    tokenizers: Any, tmp_path: Path, shape: str
) -> None:
    record, expected = SHAPES[shape]
    assert rows_of(tokenizers(TEMPLATE), write_records(tmp_path / "a.jsonl", [record])) == [expected]


@pytest.mark.parametrize("given", [{"a": 1}, '{"a": 1}'], ids=["object", "JSON"])
@pytest.mark.parametrize("template", [TEMPLATE, RAW_ARGUMENTS, JOINED_ARGUMENTS], ids=["tojson", "raw", "joined"])
def test_arguments_are_json_whatever_form_a_template_expects(
    tokenizers: Any, tmp_path: Path, template: str, given: Any
) -> None:
    joined = "=" if template is JOINED_ARGUMENTS else ""
    data = write_records(tmp_path / "a.jsonl", [said("q", called(given, None), {"role": "tool", "content": "o"}, "a")])
    assert rows_of(tokenizers(template), data) == [f'<user:q><assistant:«f{joined}{{"a": 1}}>»<tool:o><assistant:«a>»']


def tool(name: str, *properties: str, **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {each: {"type": "string"} for each in properties}}
    return {"type": "function", "function": {"name": name, **more, "parameters": schema}}


TABLE = [
    said("q", called({"a": "1"}, name="f"), tools=[tool("f", "a", description="d")]),
    said("q", called({"b": {"c": 2}}, name="g"), tools=[tool("g", "b"), tool("h", "a")]),
    said("q", answer("a", weight=1)),
]


@pytest.mark.parametrize("form", ["parquet", "jsonl with all columns"])
def test_columns_of_other_rows_enter_neither_tools_nor_answers(tokenizers: Any, tmp_path: Path, form: str) -> None:
    table = pyarrow.Table.from_pylist(TABLE)
    data = tmp_path / "table.parquet"
    if form == "parquet":
        parquet.write_table(table, data)
    else:
        data = write_records(tmp_path / "table.jsonl", table.to_pylist())
    plain = rows_of(tokenizers(TEMPLATE), write_records(tmp_path / "plain.jsonl", TABLE))
    assert plain[0].endswith('<user:q><assistant:«f{"a": "1"}>»')
    assert rows_of(tokenizers(TEMPLATE), data) == plain


BAD: tuple[tuple[dict[str, Any], str], ...] = (
    (said("q", answer("a", weight=0.5)), r"weight is 0\.5"),
    (said("q", answer("a", train_detail=[1])), r"train_detail is \[1\]"),
    (said("q", "a", completion_mask=[0, 1, 1]), "completion_mask marks parts of the record, which can't be followed"),
    (said({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "a"), "the part .*image_url"),
    ({"messages": [{"content": "q"}]}, "must be a list of messages"),
    (said("q", called('{"a":')), "arguments of f are not a JSON object"),
    (said("q", "a", tools="f(x)"), "tools must be a list of objects"),
    ({"question": "a"}, "has the fields 'question'. A conversation needs 'messages'"),
    ({"prompt": "a", "completion": []}, "completion must be text or a list of messages"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
    (said({"role": "\ud800", "content": "q"}, "a"), "surrogate"),
)


@pytest.mark.parametrize(("record", "problem"), BAD, ids=lambda each: str(each)[:40])
def test_what_cannot_be_followed_is_refused_by_its_line_or_left_out(
    tokenizers: Any, tmp_path: Path, record: dict[str, Any], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = write_records(tmp_path / "a.jsonl", [said("q", "a"), record])
    with pytest.raises(DataError, match=rf"a\.jsonl:2.*{problem}.*--data\.skip-bad"):
        rows_of(tokenizers(TEMPLATE), data)
    assert rows_of(tokenizers(TEMPLATE), data, skip_bad=True) == [BOTH]
    assert "1 of 2 rows can't be used and are left out" in caplog.text
    assert "a.jsonl:2" in caplog.text


def test_a_system_text_stands_before_a_system_message_without_one(tokenizers: Any, tmp_path: Path) -> None:
    empty = {"role": "system", "tool_calls": [{"name": "f"}]}
    data = write_records(tmp_path / "a.jsonl", [said(empty, "q", "a", system="brief")])
    assert rows_of(tokenizers(TEMPLATE), data)[0].startswith("<system:brief><system:")


UNUSED = (
    (said("q", "a", source="web"), "the field 'source' is not used"),
    ({"prompt": "q", "chosen": "a", "rejected": "b"}, "the field 'rejected' is not used"),
    (said("q", "a", chat_template_kwargs={"chat_template": "x"}), "the field 'chat_template_kwargs' is not used"),
)


@pytest.mark.parametrize(("record", "words"), UNUSED, ids=lambda each: str(each)[:40])
def test_what_is_not_used_is_named_once(
    tokenizers: Any, tmp_path: Path, record: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = write_records(tmp_path / "a.jsonl", [record, record])
    rows_of(tokenizers(TEMPLATE), data)
    rows_of(tokenizers(TEMPLATE), data)
    assert [words in each.getMessage() for each in caplog.records if each.levelno == logging.WARNING] == [True]


@pytest.mark.parametrize(
    "arguments", [{"a": SPECIAL[2]}, {SPECIAL[2]: 1}, '{"a": "\\u003c|im_end|>"}'], ids=["value", "name", "escape"]
)
def test_a_special_token_in_an_argument_leaves_the_conversation_out(
    tokenizers: Any, tmp_path: Path, arguments: Any
) -> None:
    data = write_records(tmp_path / "a.jsonl", [said("q", called(arguments)), said("q", "a")])
    assert rows_of(tokenizers(TEMPLATE), data) == [BOTH]
