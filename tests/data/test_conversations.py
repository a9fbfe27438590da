"""Conversations of odd shapes: the text that a model sees, what of it is learned, and what is named as unused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from diloco.data import ChatTokenizer, DataSettings, build_chat_corpus
from diloco.errors import DataError
from tests.data.conversations import (
    ALTERNATING,
    BOTH,
    JOINED_ARGUMENTS,
    KNOWN_ROLES,
    RAW_ARGUMENTS,
    TEMPLATE,
    TOOL,
    TOOL_TEXT,
    answer,
    called,
    rows_of,
    said,
    share,
)
from tests.finetuning import SPECIAL, asked, write_records, write_tokenizer
from tests.lazy import Lazy

pyarrow, parquet = Lazy("pyarrow"), Lazy("pyarrow.parquet")


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
    "ShareGPT of a model": (share(("User", "q"), ("Model", "a")), BOTH),
    "LangChain's roles": (share(("human", "q"), ("ai", "a")), BOTH),
    "conversation": ({"conversation": said("q", "a")["messages"]}, BOTH),
    "conversations with OpenAI's names": ({"conversations": said("q", "a")["messages"]}, BOTH),
    "messages as JSON": ({"messages": json.dumps(said("q", "a")["messages"])}, BOTH),
    "prompt and completion": ({"prompt": "q", "completion": "a"}, BOTH),
    "prompt and messages": ({"prompt": "q", "completion": [answer("a")]}, BOTH),
    "chosen": ({"prompt": "q", "chosen": "a", "rejected": "b"}, BOTH),
    "chosen with its prompt": ({"prompt": "q", "chosen": said("q", "a")["messages"]}, BOTH),
    "chosen with its prompt, as ShareGPT": (
        {"prompt": "q", **{"chosen": share(("human", "q"), ("gpt", "a"))["conversations"]}},
        BOTH,
    ),
    "chosen with its prompt and a system": (
        {"prompt": "q", "chosen": [{"role": "system", "content": "s"}, *said("q ", "a", name=None)["messages"]]},
        "<system:s><user:q ><assistant:«a>»",
    ),
    "prompt and completion as JSON": (
        {"prompt": json.dumps(said("q")["messages"]), "completion": json.dumps([answer("a")])},
        BOTH,
    ),
    "a prompt about JSON": ({"prompt": '[{"a": 1}]', "completion": "a"}, '<user:[{"a": 1}]><assistant:«a>»'),
    "chosen alone": ({"chosen": said("q", "a")["messages"], "rejected": said("q", "b")["messages"]}, BOTH),
    "Alpaca": ({"instruction": "add", "input": "1 2", "output": "3"}, "<user:add\n\n1 2><assistant:«3>»"),
    "Alpaca without input": ({"instruction": "q", "input": "", "output": "a"}, BOTH),
    "Alpaca with history": (
        {"instruction": "q", "input": "", "output": "a", "history": [["p", "b"]]},
        f"<user:p><assistant:«b>»{BOTH}",
    ),
    "Dolly": ({"instruction": "q", "context": "c", "response": "a"}, "<user:q\n\nc><assistant:«a>»"),
    "question and answer": ({"question": "q", "answer": "a"}, BOTH),
    "system beside ShareGPT": (share(("human", "q"), ("gpt", "a"), system="s"), f"<system:s>{BOTH}"),
    "system beside messages": (said("q", "a", system_prompt="s"), f"<system:s>{BOTH}"),
    "system beside a prompt": ({"system": "s", "prompt": "q", "completion": "a"}, f"<system:s>{BOTH}"),
    "system twice": (
        said({"role": "system", "content": "s"}, {"role": "user", "content": "q"}, answer("a"), system="s"),
        f"<system:s>{BOTH}",
    ),
    "two systems": (
        said({"role": "system", "content": "s"}, {"role": "system", "content": "t"}, *said("q", "a")["messages"]),
        f"<system:s><system:t>{BOTH}",
    ),
    "empty system": (said("q", "a", system=""), BOTH),
    "developer": (said({"role": "developer", "content": "s"}, *said("q", "a")["messages"]), f"<developer:s>{BOTH}"),
    "answer first": (share(("gpt", "w"), ("human", "q"), ("gpt", "a")), f"<assistant:«w>»{BOTH}"),
    "answer alone": (said(answer("a")), "<assistant:«a>»"),
    "system and answer first": (
        share(("gpt", "w"), ("human", "q"), ("gpt", "a"), system="s"),
        f"<system:s><assistant:«w>»{BOTH}",
    ),
    "two answers in a row": (said("q", "a", answer("b")), f"{BOTH}<assistant:«b>»"),
    "ends with a question": (said("q", "a", "p"), BOTH),
    "empty answer": (said("q", ""), "<user:q><assistant:«>»"),
    "parts": (
        said(
            {"role": "user", "content": [{"type": "text", "text": "q"}, "!"]}, answer([{"type": "text", "text": "a"}])
        ),
        "<user:q!><assistant:«a>»",
    ),
    "weight 0": (said("p", answer("b", weight=0), "q", answer("a", weight=1)), f"<user:p><assistant:b>{BOTH}"),
    "weight 0.0": (said("p", answer("b", weight=0.0), "q", "a"), f"<user:p><assistant:b>{BOTH}"),
    "train": (said("p", answer("b", train=False), "q", "a"), f"<user:p><assistant:b>{BOTH}"),
    "training": (said("p", answer("b", training=False), "q", "a"), f"<user:p><assistant:b>{BOTH}"),
    "loss": (said("p", answer("b", loss=False), "q", "a"), f"<user:p><assistant:b>{BOTH}"),
    "loss_weight": (said("p", answer("b", loss_weight=0), "q", "a"), f"<user:p><assistant:b>{BOTH}"),
    "masked": (said("p", answer("b", masked=True), "q", "a"), f"<user:p><assistant:b>{BOTH}"),
    "last weight 0": (said("q", "a", "p", answer("b", weight=0)), BOTH),
    "first answer of ShareGPT with weight 0": (
        {
            "conversations": [
                {"from": "gpt", "value": "w", "weight": 0},
                *share(("human", "q"), ("gpt", "a"))["conversations"],
            ]
        },
        f"<assistant:w>{BOTH}",
    ),
    "a mark for each message": (said("p", "b", "q", "a", completion_mask=[0, 0, 0, 1]), f"<user:p><assistant:b>{BOTH}"),
    "a mark for each answer": (said("p", "b", "q", "a", loss_mask=[0, 1]), f"<user:p><assistant:b>{BOTH}"),
    "NeMo's mask": (share(("User", "q"), ("Assistant", "a"), mask="User"), BOTH),
    "tools as JSON": (said("q", "a", tools=TOOL_TEXT), f"{TOOL_TEXT}{BOTH}"),
    "each tool as JSON": (said("q", "a", tools=[json.dumps(TOOL)]), f"{TOOL_TEXT}{BOTH}"),
    "functions": (said("q", "a", functions=[TOOL["function"]]), f"{TOOL_TEXT}{BOTH}"),
    "no tools": (said("q", "a", tools="[]"), BOTH),
    "schema with nulls": (
        said("q", "a", tools=[{**TOOL, "function": {**TOOL["function"], "description": None}}]),
        f"{TOOL_TEXT}{BOTH}",
    ),
    "schema with nulls of a property called default": (
        said("q", "a", tools=[{"name": "f", "parameters": {"properties": {"default": {"type": "x", "title": None}}}}]),
        f'[{{"name": "f", "parameters": {{"properties": {{"default": {{"type": "x"}}}}}}}}]{BOTH}',
    ),
    "default of null": (
        said("q", "a", tools=[{"name": "f", "parameters": {"properties": {"a": {"default": None, "enum": [None]}}}}]),
        f'[{{"name": "f", "parameters": {{"properties": {{"a": {{"default": null, "enum": [null]}}}}}}}}]{BOTH}',
    ),
    "call": (said("q", called({"a": 1})), '<user:q><assistant:«f{"a": 1}>»'),
    "arguments as JSON": (said("q", called('{"a": 1}')), '<user:q><assistant:«f{"a": 1}>»'),
    "no arguments": (said("q", called(None)), "<user:q><assistant:«f{}>»"),
    "empty arguments": (said("q", called("")), "<user:q><assistant:«f{}>»"),
    "null argument": (said("q", called({"a": None})), '<user:q><assistant:«f{"a": null}>»'),
    "null argument of a tool": (
        said("q", called({"a": None}), tools=[TOOL]),
        TOOL_TEXT + '<user:q><assistant:«f{"a": null}>»',
    ),
    "null argument of another tool": (
        said("q", called({"a": 1, "b": None}), tools=[TOOL]),
        TOOL_TEXT + '<user:q><assistant:«f{"a": 1}>»',
    ),
    "call without content": (said("q", called({"a": 1}, None)), '<user:q><assistant:«f{"a": 1}>»'),
    "bare call": (
        said("q", answer("", tool_calls=[{"name": "f", "arguments": {"a": 1}}])),
        '<user:q><assistant:«f{"a": 1}>»',
    ),
    "calls as JSON": (
        said("q", answer("", tool_calls=json.dumps([{"name": "f", "arguments": '{"a": 1}'}]))),
        '<user:q><assistant:«f{"a": 1}>»',
    ),
    "function_call": (
        said("q", answer(None, function_call={"name": "f", "arguments": '{"a": 1}'})),
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
    "thoughts by another name": (said("q", answer("a", reasoning_content="t")), "<user:q><assistant:«(t)a>»"),
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


def test_a_developer_speaks_as_the_system_where_the_template_knows_only_that(tokenizers: Any, tmp_path: Path) -> None:
    record = said({"role": "developer", "content": "s"}, *said("q", "a")["messages"])
    assert rows_of(tokenizers(KNOWN_ROLES), write_records(tmp_path / "a.jsonl", [record])) == [f"<system:s>{BOTH}"]


def test_a_role_that_is_only_the_name_of_a_field_in_the_template_is_not_known(tokenizers: Any, tmp_path: Path) -> None:
    template = TEMPLATE.replace("{{ m.role }}", "{{ m.role if m.role != 'tool' else m['function'] or 'tool' }}")
    record = said("q", called({}), {"role": "function", "content": "o"}, "a")
    data = write_records(tmp_path / "a.jsonl", [record])
    assert rows_of(tokenizers(template), data) == ["<user:q><assistant:«f{}>»<tool:o><assistant:«a>»"]


BAD: tuple[tuple[dict[str, Any], str], ...] = (
    (said("q", answer("a", weight=0.5)), r"weight is 0\.5"),
    (said("q", answer("a", train="no")), "train is 'no'"),
    (said("q", answer("a", mask=1)), "mask = 1 can't be followed"),
    (said("q", answer("a", train_detail=[{"begin_offset": 0}])), "train_detail = .* can't be followed"),
    (said("q", "a", completion_mask=[0, 1, 1]), "3 marks, but there are 2 messages with 1 answers"),
    (said({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "a"), "the part .*image_url"),
    (said({"role": "user", "content": [{"type": "text", "text": None}]}, "a"), "the part .*None"),
    (said("q", answer(None)), "must be a list of messages"),
    (share(("human", "q"), ("gpt", None)), "must be a list of messages"),
    ({"messages": [{"content": "q"}]}, "must be a list of messages"),
    (said("q", called('{"a":')), "arguments of f are not a JSON object"),
    (said("q", called([1])), "arguments of f are not a JSON object"),
    (said("q", called({"a": float("nan")})), "arguments of f are not a JSON object"),
    (said("q", answer("", tool_calls=[{"type": "function"}])), "needs a function with a name"),
    (said("q", "a", tools="f(x)"), "tools must be a list of objects"),
    (said("q", "a", system=["s"]), "system must be text"),
    (said("q", "a", chat_template_kwargs={"chat_template": "x"}), "chat_template_kwargs can't set 'chat_template'"),
    (said("q", "a", chat_template_kwargs={"messages": []}), "chat_template_kwargs can't set 'messages'"),
    (said("q", "a", chat_template_kwargs={"return_dict": True}), "chat_template_kwargs can't set 'return_dict'"),
    ({"instruction": "q", "input": ["x"], "output": "a"}, "instruction and input must both be text"),
    ({"instruction": "q", "output": "a", "history": ["x"]}, "history must be a list of pairs"),
    ({"messages": None, "id": 1}, "has the fields 'id', 'messages'"),
    ({"question": "a"}, "has the fields 'question'. A conversation needs 'messages'"),
    ({"messages": []}, "must be a list of messages"),
    ({"messages": [{"role": "user", "content": 3}]}, "must be a list of messages"),
    ({"messages": "hello"}, "must be a list of messages"),
    ({"conversations": ["a"]}, "must be a list of messages"),
    ({"prompt": "a", "completion": []}, "completion must be text or a list of messages"),
    ({"text": 3}, "holds int, not text"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
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


def test_a_template_that_refuses_a_first_answer_refuses_its_row_alone(tmp_path: Path) -> None:
    records = [share(("gpt", "w"), ("human", "q"), ("gpt", "a")), *(asked(f"{n}", "a") for n in range(30))]
    data = write_records(tmp_path / "a.jsonl", records)
    folder = write_tokenizer(tmp_path / "t", template=ALTERNATING)
    settings = {"format": "chat", "paths": (data,), "tokenizer": str(folder), "heldout_fraction": 0.3}
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*must alternate.*--data\.skip-bad"):
        build_chat_corpus(DataSettings(**settings), 64)
    corpus = build_chat_corpus(DataSettings(**settings, skip_bad=True), 64)
    assert corpus.train_documents + corpus.heldout_documents == 30
    assert "1 left out because they can't be used (data.skip_bad)" in corpus.description()


def test_an_answer_that_is_not_to_be_learned_is_no_example(tokenizers: Any, tmp_path: Path) -> None:
    records = [said("q", answer("b", weight=0)), said("q", "b", weight=0), said("q", "a")]
    assert rows_of(tokenizers(TEMPLATE), write_records(tmp_path / "a.jsonl", records)) == [BOTH]


UNUSED = (
    (said("q", "a", source="web"), "the field 'source' is not used"),
    ({"prompt": "q", "chosen": "a", "rejected": "b"}, "the field 'rejected' is not used"),
    (said("q", "a", conversations=[]), "the field 'conversations' is not used"),
    (said("q", "a", weight=0.3), "the field 'weight' is not used"),
    ({"text": "a text", "title": "b"}, "the field 'title' is not used"),
    (said("q", answer("a", name="n")), "leaves out the field 'name' of messages"),
    (said("q", answer("a", learn=False)), "leaves out the field 'learn' of messages"),
    (said("q", called({}), {"role": "tool", "content": "o", "tool_call_id": "1"}, "a"), "the field 'tool_call_id' of"),
    (said("q", "a", documents=[{"text": "d"}]), "leaves out the field 'documents'"),
    (said("q", "a", chat_template_kwargs='{"learned": true}'), "leaves out the field 'learned'"),
    (said({"role": "user", "content": "q", "weight": 1}, "a"), "messages with the role 'user' to be learned"),
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
    ("record", "part"),
    [
        (said("q", answer("a", tool_calls=[{"name": "f"}])), "the field 'tool_calls' of messages"),
        (said("q", "a", tools=[TOOL]), "the field 'tools'"),
        (said("q", "b", {"role": "tool", "content": "o"}, "a"), "later messages with the role 'tool'"),
        (said(*2 * [{"role": "system", "content": "s"}], "q", "a"), "later messages with the role 'system'"),
        (said("q", answer("a", reasoning_content="t")), "the field 'reasoning_content' of messages"),
    ],
    ids=["calls", "tools", "role", "second system", "thoughts"],
)
def test_what_a_template_leaves_out_is_named(
    tokenizers: Any, tmp_path: Path, record: dict[str, Any], part: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows_of(tokenizers(KNOWN_ROLES), write_records(tmp_path / "a.jsonl", [record]))
    assert f"a.jsonl:1: the chat template leaves out {part}." in caplog.text


@pytest.mark.parametrize(
    "arguments", [{"a": SPECIAL[2]}, {SPECIAL[2]: 1}, '{"a": "\\u003c|im_end|>"}'], ids=["value", "name", "escape"]
)
def test_a_special_token_in_an_argument_leaves_the_conversation_out(
    tokenizers: Any, tmp_path: Path, arguments: Any
) -> None:
    data = write_records(tmp_path / "a.jsonl", [said("q", called(arguments)), said("q", "a")])
    assert rows_of(tokenizers(TEMPLATE), data) == [BOTH]


def test_the_split_of_parquet_rows_with_dates_depends_on_their_text(tokenizers: Any, tmp_path: Path) -> None:
    import datetime

    rows = [{**asked("q", "a"), "date": datetime.date(2026, 1, 1), "bytes": b"\xff"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert rows_of(tokenizers(TEMPLATE), tmp_path / "a.parquet") == [BOTH]
