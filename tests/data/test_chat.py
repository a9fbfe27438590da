"""Conversations: the shapes in which they are read, the text that a model sees, what counts, is cut and left out."""

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.data import ChatTokenizer, DataSettings, Example, PackedRows, build_corpus, heldout_batches, heldout_data
from diloco.errors import DataError
from diloco.model import ENDS, document_numbers
from tests.finetuning import SPECIAL, TEMPLATE, asked, write_records, write_sums, write_tokenizer
from tests.lazy import Lazy

datasets, pyarrow, parquet = Lazy("datasets"), Lazy("pyarrow"), Lazy("pyarrow.parquet")

THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>{% endif %}"
    "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DATED = "{{ strftime_now('%d %b %Y') }}" + TEMPLATE
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}|{% endif %}{% endfor %}"
)

CALLING = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}:"
    "{% if m.thinking %}({{ m.thinking }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None], ChatTokenizer]:
    @cache
    def make(template: str | None) -> ChatTokenizer:
        return ChatTokenizer(str(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), template=template)))

    return make


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def read(tokenizer_of: Any, tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that returns each of some conversations as text: what is learned in «», < and > around a
    message."""

    def rows_of(records: Any) -> list[str]:
        data = records if isinstance(records, str) else str(write_records(tmp_path / "a.jsonl", records))
        settings, length = DataSettings(format="chat", paths=(data,), packing="single"), 1024
        rows = heldout_data(settings, tokenizer_of(CALLING), length, [data])
        tokens = np.append(rows.inputs, 256)
        learned = [False, *(rows.targets >= 0).ravel().tolist()]
        text = b""
        for place, token in enumerate(tokens.tolist()):
            if place % length == 0:
                text += b"\0"
            elif learned[place] != learned[place - 1]:
                text += ("«" if learned[place] else "»").encode()
            text += bytes([token]) if token < 256 else {256: b"", 257: b"<", 258: b">"}[token]
        return text.decode().split("\0")[1:-1]

    return rows_of


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


def tool(name: str, *properties: str, **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {each: {"type": "string"} for each in properties}}
    return {"type": "function", "function": {"name": name, **more, "parameters": schema}}


TOOL = tool("f", "a")
TOOL_TEXT = json.dumps([TOOL])
BOTH = "<user:q>" + "<assistant:«a>»"


SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "messages": (said("q", "a"), BOTH),
    "prompt and completion": ({"prompt": "q", "completion": "a"}, BOTH),
    "system beside messages": (said("q", "a", system="s"), f"<system:s>{BOTH}"),
    "system beside a system message without a text": (
        {"messages": [{"role": "system", "tool_calls": [{"name": "f"}]}, *said("q", "a")["messages"]], "system": "s"},
        "<system:s><system:f{}>" + BOTH,
    ),
    "an answer to nothing is not learned": (
        {"messages": [answer("w"), *said("q", "a")["messages"]]},
        f"<assistant:w>{BOTH}",
    ),
    "two answers in a row": (said("q", "a", answer("b")), f"{BOTH}<assistant:«b>»"),
    "empty answer": (said("q", ""), "<user:q><assistant:«>»"),
    "parts": (said({"role": "user", "content": [{"type": "text", "text": "q"}, "!"]}, "a"), "<user:q!><assistant:«a>»"),
    "loss_weight": (
        said(
            {"role": "user", "content": "p", "loss_weight": 0.0},
            answer("b", loss_weight=0.0),
            "q",
            answer("a", loss_weight=1.0),
        ),
        f"<user:p><assistant:b>{BOTH}",
    ),
    "weight 0": (said("p", answer("b", weight=0), "q", answer("a", weight=1)), f"<user:p><assistant:b>{BOTH}"),
    "tools as JSON": (said("q", "a", tools=TOOL_TEXT), f"{TOOL_TEXT}{BOTH}"),
    "null argument of another tool": (
        said("q", called({"a": 1, "b": None}), tools=[TOOL]),
        TOOL_TEXT + '<user:q><assistant:«f{"a": 1}>»',
    ),
    "calls as JSON": (
        said("q", answer("", tool_calls=json.dumps([{"name": "f", "arguments": '{"a": 1}'}]))),
        '<user:q><assistant:«f{"a": 1}>»',
    ),
    "messages as JSON": ({"messages": json.dumps(said("q", "a")["messages"])}, BOTH),
    "columns of other rows": ({**said("q", "a"), "prompt": None, "completion": None}, BOTH),
    "the older form of a call": (
        said("q", answer(None, function_call={"name": "f", "arguments": '{"a": 1}'})),
        '<user:q><assistant:«f{"a": 1}>»',
    ),
    "thoughts": (said("q", answer("a", thinking="t")), "<user:q><assistant:«(t)a>»"),
    "null fields": (said("q", answer("a", tool_calls=None, name=None, weight=None), tools=None, system=None), BOTH),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_conversation_of_any_shape_is_read_and_its_answers_are_learned(read: Any, shape: str) -> None:
    record, expected = SHAPES[shape]
    assert read([record]) == [expected]


TABLE = [
    said("q", called({"a": "1"}, name="f"), tools=[tool("f", "a", description="d")]),
    said("q", called({"b": {"c": 2}}, name="g"), tools=[tool("g", "b"), tool("h", "a")]),
    said("q", answer("a", weight=1)),
]


@pytest.mark.parametrize("form", ["parquet", "data set", "jsonl with all columns"])
def test_columns_of_other_rows_enter_neither_tools_nor_answers(read: Any, tmp_path: Path, form: str) -> None:
    table, data = pyarrow.Table.from_pylist(TABLE), str(tmp_path / "table.parquet")
    plain = read(TABLE)
    assert plain[0].endswith('<user:q><assistant:«f{"a": "1"}>»')
    parquet.write_table(table, data)
    if form == "data set":
        datasets.Dataset.from_parquet(data, cache_dir=str(tmp_path)).save_to_disk(str(tmp_path / "saved"))
    forms = {"parquet": data, "data set": f"hf:{tmp_path / 'saved'}", "jsonl with all columns": table.to_pylist()}
    assert read(forms[form]) == plain


LEVELS = 600 if sys.version_info < (3, 12) else 1200  # the parser takes them, but Python's own stack is too small
BAD: tuple[tuple[dict[str, Any], str], ...] = (
    (said("q", answer("a", weight=0.5)), r"weight is 0\.5"),
    (said("q", answer("a", train=1)), "train is 1, which can't be followed"),
    (said("q", "a", completion_mask=[0, 1, 1]), "completion_mask marks parts of the record, which can't be followed"),
    (said({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "a"), "the part .*image_url"),
    ({"messages": [{"content": "q"}]}, "must be a list of messages"),
    ({"messages": []}, "must be a list of messages"),
    (said("q", answer(None)), "the field 'content' holds null, not text"),
    (said("q", called('{"a":')), "arguments of f are not a JSON object"),
    (said("q", "a", tools="f(x)"), "tools must be a list of objects"),
    ({"question": "a"}, "has the fields 'question'. A conversation needs 'messages'"),
    ({"prompt": "a", "completion": []}, "completion must be text or a list of messages"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
    (said({"role": "\ud800", "content": "q"}, "a"), "surrogate"),
    (said("q", "a", notes=json.loads("[" * LEVELS + "]" * LEVELS)), "is nested too deeply"),
)


@pytest.mark.parametrize(("record", "problem"), BAD, ids=lambda each: str(each)[:40])
def test_what_cannot_be_followed_is_refused_by_its_line(read: Any, record: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError, match=rf"a\.jsonl:2: .*{problem}"):
        read([said("q", "a"), record])


@pytest.mark.parametrize("name", ["source", "chat_template_kwargs"])
def test_what_is_not_used_is_named_once(read: Any, name: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        read([said("q", "a", **{name: "x"}), {"prompt": "q", "completion": "a", name: {}}])
    assert caplog.messages == [f"The field {name!r} of conversations is not used."]


@pytest.mark.parametrize("arguments", [{"a": SPECIAL[2]}, {SPECIAL[2]: 1}, '{"a": "\\u003c|im_end|>"}'], ids=str)
def test_a_special_token_in_an_argument_leaves_the_conversation_out(read: Any, arguments: Any) -> None:
    assert read([said("q", called(arguments)), said("q", "a")]) == [BOTH]


def spelled(tokens: Any) -> str:
    """Return tokens as text, special ones by name; ids from 256 on are `SPECIAL`."""
    return b"".join(bytes([t]) if t < 256 else SPECIAL[t - 256].encode() for t in tokens).decode()


def counted(example: Example) -> str:
    """Return the text that counts."""
    return spelled(example.tokens[example.counted].tolist())


def settings_of(folder: Path, data: Path) -> DataSettings:
    return DataSettings(format="chat", paths=(str(data),), tokenizer=str(folder), heldout_fraction=0.3)


texts = st.text(alphabet="ab \n?é🙂", max_size=6)


@settings(max_examples=25)
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=3))
def test_a_model_is_asked_with_the_tokens_that_it_learned_an_answer_after(
    tokenizer_of: Any, turns: list[tuple[str, str]]
) -> None:
    chatml = tokenizer_of(TEMPLATE)
    said = [{"role": "system", "content": "Grüße 東京"}]
    said += [message for question, answer in turns for message in asked(question, answer)["messages"]]
    example, all_count = chatml.conversation(said)
    prompt = chatml.prompt(said[:-1])
    assert example.tokens[: len(prompt)].tolist() == prompt
    assert bool(example.counted[len(prompt) :].all())
    answers = "".join(f"{answer}<|im_end|>\n" for _, answer in turns)
    assert (counted(example), all_count, chatml.answer_ends) == (answers, True, {258})


TURNS = [*asked("a", "b")["messages"], *asked("c", "d")["messages"]]
TEMPLATES = {
    "marks its answers": (MARKED, "a|b<|im_end|>c|d<|im_end|>", "b<|im_end|>d<|im_end|>", True),
    "changes earlier answers": (THINKING, "<|im_start|>user\na", "<think>d<|im_end|>", False),
    "shows the date": (DATED, "26 Jul 2024<|im_start|>user", "b<|im_end|>\nd<|im_end|>\n", True),
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_the_template_decides_what_counts(tokenizer_of: Any, kind: str) -> None:
    """It is believed if it marks its answers; where it changes earlier ones, only the last counts."""
    template, begin, answers, all_count = TEMPLATES[kind]
    example, all_counted = tokenizer_of(template).conversation(TURNS)
    assert spelled(example.tokens).startswith(begin)
    assert (counted(example), all_counted) == (answers, all_count)


def test_several_templates_are_saved_in_files_that_are_exported_and_mirrored(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    library = AutoTokenizer.from_pretrained(folder)
    library.chat_template = {"default": TEMPLATE, "tool_use": CALLING}
    library.save_pretrained(tmp_path / "theirs")
    ChatTokenizer(str(tmp_path / "theirs")).save(tmp_path / "run")
    assert {each.name for each in (tmp_path / "run").iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    assert ChatTokenizer(str(tmp_path / "run"))._library.chat_template == library.chat_template


def test_a_special_token_without_a_text_is_in_no_text(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    library = AutoTokenizer.from_pretrained(folder)
    library.pad_token = ""
    library.save_pretrained(tmp_path)
    assert ChatTokenizer(str(tmp_path)).control_token([{"role": "user", "content": "hello"}]) is None


def test_messages_need_a_template(tokenizer_of: Any) -> None:
    with pytest.raises(DataError, match="has no chat template, which messages need"):
        tokenizer_of(None).conversation(asked("a", "b")["messages"])


def test_what_is_cut_and_left_out_is_told(folder: Path, tmp_path: Path) -> None:
    records = [
        *(asked(f"x{number}", "y") for number in range(30)),
        asked("long", "1" * 40),
        asked("q" * 70, "too late"),
        asked(f"{SPECIAL[2]} in a question", "1"),
        {"messages": [{"role": "user", "content": "no answer"}]},
        {"messages": [answer("no question")]},
        {"messages": [answer("no question"), *said("q", "a")["messages"]]},
    ]
    told = build_corpus(settings_of(folder, write_records(tmp_path / "data.jsonl", records)), 64).facts["data"]
    unanswered = "3 left out because they have no answer to learn, or none before the cut"
    special = "1 left out because their text contains a special token"
    assert all(words in told for words in ("conversations in", "1 cut at 64 tokens", unanswered, special))
    assert "not every answer counts" not in told
    with pytest.raises(
        DataError, match=r"Of 3 conversations none can be used \(2 left out because they have no answer"
    ):
        build_corpus(settings_of(folder, write_records(tmp_path / "data.jsonl", records[-4:-1])), 64)


@pytest.mark.parametrize(
    "nothing", [{"messages": None}, {"prompt": "q", "completion": None}, {"prompt": None}], ids=str
)
def test_null_in_place_of_a_conversation_is_left_out_and_counted(
    folder: Path, tmp_path: Path, nothing: dict[str, Any]
) -> None:
    empty = {"prompt": None, "completion": None, **nothing, "id": 1}
    data = write_records(tmp_path / "data.jsonl", [said("q", "a"), empty, empty])
    told = build_corpus(settings_of(folder, data), 64).facts["data"]
    assert "1 conversation in" in told
    assert "2 left out because they have no answer to learn" in told


def test_the_same_conversations_are_held_out_afterwards(folder: Path, tmp_path: Path) -> None:
    settings = settings_of(folder, write_sums(tmp_path / "sums.jsonl"))
    corpus = build_corpus(settings, 48)
    assert isinstance(corpus.tokenizer, ChatTokenizer)
    assert heldout_data(settings, corpus.tokenizer, 48).digest == corpus.heldout.digest
    assert build_corpus(settings, 48).fingerprint == corpus.fingerprint
    assert build_corpus(settings, 40).fingerprint != corpus.fingerprint
    everything = heldout_data(settings, corpus.tokenizer, 48, settings.paths)
    assert everything.counted_tokens > corpus.heldout.counted_tokens


LENGTH = 12
sizes = st.lists(st.integers(2, LENGTH), min_size=1, max_size=30)


def examples_of(sizes: list[int]) -> list[Example]:
    """Return examples whose tokens all differ; the first half of each is a prompt."""
    ends = np.cumsum([0, *sizes])
    made = []
    for begin, size in zip(ends[:-1].tolist(), sizes, strict=True):
        made.append(Example(np.arange(begin, begin + size) + 1, np.arange(size) >= max(1, size // 2)))
    return made


@settings(max_examples=30)
@given(sizes, st.booleans())
def test_rows_are_full_and_each_token_that_counts_is_a_target_once_behind_its_own_example(
    sizes: list[int], together: bool
) -> None:
    examples = examples_of(sizes)
    rows = PackedRows(examples, LENGTH, padding=0, together=together)
    assert sorted(rows.inputs[rows.inputs > 0].tolist()) == list(range(1, sum(sizes) + 1)), "each token once"
    filled = (rows.inputs > 0).sum(1)
    assert not together or sum(filled <= LENGTH // 2) <= 1, "best fit: no two rows would fit into one"
    number_of = {int(token): n for n, each in enumerate(examples) for token in each.tokens}
    seen: list[int] = []
    for inputs, targets in heldout_batches(rows, LENGTH, 1, 0):
        counts = targets >= 0
        seen += targets[counts].tolist()
        assert bool((inputs[counts] + 1 == targets[counts]).all()), "behind the token before it in its own example"
        documents = document_numbers(targets, ENDS)[0].tolist()
        pairs = set(zip(documents, (number_of.get(token, -1) for token in inputs[0].tolist()), strict=True))
        assert not together or len(pairs) == len({d for d, _ in pairs}) == len({b for _, b in pairs})
    assert sorted(seen) == sorted(t for e in examples for t in e.tokens[e.counted].tolist())
    assert rows.counted_tokens == len(seen)


def test_what_counts_and_the_length_are_part_of_the_digest() -> None:
    one, other = examples_of([4, 6]), examples_of([4, 6])
    other[0].counted[:] = [False, True, True, True]
    digests = [PackedRows(each, LENGTH, padding=0).digest for each in (one, other)]
    digests += [PackedRows(one, LENGTH, padding=0, together=False).digest, PackedRows(one, 10, padding=0).digest]
    assert len(set(digests)) == 4
    assert PackedRows(examples_of([4, 6]), LENGTH, padding=0).digest == digests[0]
