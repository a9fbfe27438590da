"""Conversations as tokens: the chat template, what counts, what is cut and left out."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.data import (
    ChatTokenizer,
    DataSettings,
    Example,
    PackedRows,
    build_chat_corpus,
    heldout_batches,
    heldout_rows,
    is_heldout,
    pack_rows,
)
from diloco.errors import DataError
from diloco.model import ENDS, document_numbers
from tests.finetuning import SPECIAL, TEMPLATE, asked, write_records, write_sums, write_tokenizer

THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>{% endif %}"
    "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DATED = "{{ strftime_now('%d %b %Y') }}" + TEMPLATE
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}|{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def chatml(folder: Path) -> ChatTokenizer:
    return ChatTokenizer(str(folder))


def with_template(place: Path, template: str | None) -> ChatTokenizer:
    return ChatTokenizer(str(write_tokenizer(place, template=template)))


def spelled(tokens: Any) -> str:
    """Return tokens as text, special ones by name; ids from 256 on are `SPECIAL`."""
    return b"".join(bytes([t]) if t < 256 else SPECIAL[t - 256].encode() for t in tokens).decode()


def counted(example: Example) -> str:
    """Return the text that counts."""
    return spelled(example.tokens[example.counted].tolist())


def settings_of(folder: Path, data: Path, **changes: Any) -> DataSettings:
    return DataSettings(format="chat", paths=(data,), tokenizer=str(folder), **({"heldout_fraction": 0.3} | changes))


def test_answers_count_with_what_ends_them_and_nothing_else_does(chatml: ChatTokenizer) -> None:
    said = [
        {"role": "system", "content": "Be brief."},
        *asked("2+2?", "4")["messages"],
        *asked("Grüße?", "東京 🙂")["messages"],
    ]
    example, all_count = chatml.conversation(said)
    assert all_count
    assert counted(example) == "4<|im_end|>\n東京 🙂<|im_end|>\n"
    assert spelled(example.tokens).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?")
    assert chatml.answer_end == 258


texts = st.text(alphabet="ab \n?é🙂", max_size=6)


@settings(max_examples=25)
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=3))
def test_a_model_is_asked_with_the_tokens_that_it_learned_an_answer_after(
    chatml: ChatTokenizer, turns: list[tuple[str, str]]
) -> None:
    said = [message for question, answer in turns for message in asked(question, answer)["messages"]]
    example, _ = chatml.conversation(said)
    prompt = chatml.prompt(said[:-1])
    assert example.tokens[: len(prompt)].tolist() == prompt
    assert bool(example.counted[len(prompt) :].all())
    answers = "".join(f"{answer}<|im_end|>\n" for _, answer in turns)
    assert counted(example) == answers


def test_a_template_that_marks_its_answers_is_believed(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, MARKED)
    example, _ = tokenizer.conversation([*asked("a", "b")["messages"], *asked("c", "d")["messages"]])
    assert (spelled(example.tokens), counted(example)) == ("a|b<|im_end|>c|d<|im_end|>", "b<|im_end|>d<|im_end|>")


def test_where_a_template_changes_earlier_answers_only_the_last_counts(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, THINKING)
    example, all_count = tokenizer.conversation([*asked("a", "b")["messages"], *asked("c", "d")["messages"]])
    assert (all_count, counted(example)) == (False, "<think>d<|im_end|>")


def test_a_template_shows_the_same_date_on_every_day(tmp_path: Path) -> None:
    example, _ = with_template(tmp_path, DATED).conversation(asked("a", "b")["messages"])
    assert spelled(example.tokens).startswith("26 Jul 2024<|im_start|>user")


def corpus_of(folder: Path, place: Path, records: list[dict[str, Any]], length: int = 64) -> Any:
    """Return the corpus of these training records and a held-out one; an unused field decides the split."""

    def drawn(record: dict[str, Any], *, heldout: bool) -> dict[str, Any]:
        numbered = ({**record, "number": number} for number in count())
        return next(each for each in numbered if is_heldout(json.dumps(each, sort_keys=True), 0.3) is heldout)

    written = [*(drawn(record, heldout=False) for record in records), drawn(asked("x", "y"), heldout=True)]
    return build_chat_corpus(settings_of(folder, write_records(place / "data.jsonl", written)), length)


def test_without_a_template_a_prompt_and_its_completion_are_plain_text(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path / "plain", None)
    example = tokenizer.completion("2+2=", "4")
    assert (spelled(example.tokens), counted(example)) == ("2+2=4<|endoftext|>", "4<|endoftext|>")
    with pytest.raises(DataError, match="has no chat template, which messages need"):
        tokenizer.prompt(asked("a", "b")["messages"])


def test_what_is_cut_and_left_out_is_told(folder: Path, tmp_path: Path) -> None:
    records = [
        asked("short", "1"),
        asked("long", "1" * 40),
        asked("q" * 70, "too late"),
        asked(f"{SPECIAL[2]} in a question", "1"),
        {"messages": [{"role": "user", "content": "no answer"}]},
    ]
    told = corpus_of(folder, tmp_path, records).description()
    assert "2 conversations in" in told
    assert "1 cut at 64 tokens" in told
    assert "2 left out because they have no answer to learn, or none before the cut" in told
    assert "1 left out because their text contains a special token" in told


def test_the_same_conversations_are_held_out_afterwards(folder: Path, tmp_path: Path) -> None:
    settings = settings_of(folder, write_sums(tmp_path / "sums.jsonl"))
    corpus = build_chat_corpus(settings, 48)
    assert isinstance(corpus.tokenizer, ChatTokenizer)
    assert heldout_rows(settings, corpus.tokenizer, 48).digest == corpus.heldout.digest
    assert build_chat_corpus(settings, 48).fingerprint == corpus.fingerprint
    assert build_chat_corpus(settings, 40).fingerprint != corpus.fingerprint
    everything = heldout_rows(settings, corpus.tokenizer, 48, settings.paths)
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
@given(sizes)
def test_rows_hold_everything_once_and_none_is_overfull(sizes: list[int]) -> None:
    rows = pack_rows(sizes, LENGTH)
    assert sorted(number for row in rows for number in row) == list(range(len(sizes)))
    assert all(sum(sizes[number] for number in row) <= LENGTH for row in rows)
    # best fit: no two rows would fit into one
    assert sum(sum(sizes[n] for n in row) <= LENGTH // 2 for row in rows) <= 1


@settings(max_examples=30)
@given(sizes, st.booleans())
def test_each_token_that_counts_is_a_target_once_behind_its_own_example(sizes: list[int], together: bool) -> None:
    examples = examples_of(sizes)
    rows = PackedRows(examples, LENGTH, padding=0, together=together)
    seen: list[int] = []
    for inputs, targets in heldout_batches(rows, LENGTH, 4, 0):
        seen += targets[targets >= 0].tolist()
        # a target follows the token before it in its own example
        assert bool((inputs[targets >= 0] + 1 == targets[targets >= 0]).all())
    assert sorted(seen) == sorted(t for e in examples for t in e.tokens[e.counted].tolist())
    assert rows.counted_tokens == len(seen)


@settings(max_examples=30)
@given(sizes)
def test_the_marks_tell_the_examples_of_a_row_apart(sizes: list[int]) -> None:
    rows = PackedRows(examples_of(sizes), LENGTH, padding=0)
    number_of = {int(token): n for n, each in enumerate(examples_of(sizes)) for token in each.tokens}
    for inputs, targets in heldout_batches(rows, LENGTH, 1, 0):
        documents = document_numbers(targets, ENDS)[0].tolist()
        belongs = [number_of.get(token, -1) for token in inputs[0].tolist()]
        pairs = set(zip(documents, belongs, strict=True))
        assert len(pairs) == len({d for d, _ in pairs}) == len({b for _, b in pairs})


def test_what_counts_and_the_length_are_part_of_the_digest() -> None:
    one, other = examples_of([4, 6]), examples_of([4, 6])
    other[0].counted[:] = [False, True, True, True]
    digests = [PackedRows(each, LENGTH, padding=0).digest for each in (one, other)]
    digests += [PackedRows(one, LENGTH, padding=0, together=False).digest, PackedRows(one, 10, padding=0).digest]
    assert len(set(digests)) == 4
    assert PackedRows(examples_of([4, 6]), LENGTH, padding=0).digest == digests[0]
