"""Generation equals sampling with full forward passes; its limits, modes and errors."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.data import ByteTokenizer, DataSettings, Tokenizer, make_tokenizer
from diloco.errors import ConfigurationError, NonFiniteError
from diloco.model import DecoderSettings, Transformer
from diloco.trained import Sampling, generate, text_of, without_end
from tests.model.decoders import build_lively
from tests.vocabularies import FAMILIES, ODD

SETTINGS = DecoderSettings(layers=2, width=16, ffn_width=32, heads=4, kv_heads=2, vocab_size=23, max_sequence_length=12)
PROMPT = [3, 1, 4, 1, 5]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def begin(model: Transformer, **changes: Any) -> Iterator[int]:
    """Call `generate` with the fields of `Sampling` as arguments."""
    arguments: dict[str, Any] = {"prompt_tokens": PROMPT, "max_new_tokens": 7, "generator": seeded(), **changes}
    drawing = {field.name: arguments.pop(field.name) for field in fields(Sampling) if field.name in arguments}
    return generate(model, sampling=Sampling(**drawing), **arguments)


def run(model: Transformer, **changes: Any) -> list[int]:
    return list(begin(model, **changes))


def next_logits(model: Transformer, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens]))[0, -1]
    return logits


def greedy_reference(model: Transformer, prompt: list[int], count: int, window: int) -> list[int]:
    """Use a full forward pass for every token; when the window is full, continue from its second half."""
    tokens, context = list(prompt), list(prompt[-window:])
    for index in range(count):
        if index and len(context) == window:
            context = [*context, tokens[-1]][-max(1, window // 2) :]
        elif index:
            context.append(tokens[-1])
        tokens.append(int(next_logits(model, context).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("prompt_length", [1, 5, 12, 30])
@pytest.mark.parametrize("window", [None, 12, 7, 2, 1])
def test_greedy_equals_full_forward_passes_beyond_the_window(prompt_length: int, window: int | None) -> None:
    model, prompt = build_lively(SETTINGS), torch.randint(23, (prompt_length,), generator=seeded(5)).tolist()
    expected = greedy_reference(model, prompt, 25, window or 12)
    assert run(model, prompt_tokens=prompt, max_new_tokens=25, temperature=0, window=window) == expected
    assert len(set(expected)) > 1


def test_the_model_reads_each_token_once_within_the_window() -> None:
    """Hooks see every step; FSDP gathers the parameters in them."""
    model, read = build_lively(SETTINGS), list[int]()
    model.register_forward_pre_hook(lambda _, arguments: read.append(arguments[0].shape[1]))
    run(model, max_new_tokens=10)
    assert read == [5, 1, 1, 1, 1, 1, 1, 1, 6, 1]  # the prompt, up to 12 tokens, the second half, further tokens


@pytest.mark.parametrize(
    ("changes", "temperature", "kept"),
    [
        ({"top_k": None}, 2.0, 23),
        ({"top_k": 23}, 1.0, 23),
        ({"top_k": 1000, "top_p": 1.0}, 1.0, 23),
        ({"top_k": 3}, 2.0, 3),
        ({"top_k": None, "top_p": 0.6}, 3.0, None),
        ({"top_k": 20, "top_p": 1e-9}, 1.0, 1),
        ({"top_k": None}, 1e-30, 1),
    ],
)
def test_samples_are_drawn_from_the_stated_distribution(
    changes: dict[str, Any], temperature: float, kept: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coldest are the greedy choice."""
    model, drawn_from, multinomial = build_lively(SETTINGS), [], torch.multinomial

    def recording(probabilities: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        drawn_from.append((probabilities, multinomial(probabilities, *arguments, **keywords)))
        return drawn_from[-1][1]

    monkeypatch.setattr(torch, "multinomial", recording)
    (token,) = run(model, max_new_tokens=1, temperature=temperature, **changes)
    ((weights, index),) = drawn_from
    expected, order = (next_logits(model, PROMPT) / temperature).softmax(0).sort(descending=True, stable=True)
    if kept is None:
        kept = int((expected.cumsum(0) < 0.6).sum()) + 1  # the token that reaches 0.6 is included
        assert 1 < kept < 23
    distribution = torch.zeros(23)
    distribution[: len(weights)] = weights / weights.sum()
    wanted = expected * (torch.arange(23) < kept)
    torch.testing.assert_close(distribution, wanted / wanted.sum(), rtol=1e-4, atol=1e-6)
    assert token == order[index]


def test_it_ends_at_the_stop_token_and_leaves_it_out() -> None:
    model = build_lively(SETTINGS)
    free = run(model, temperature=0, max_new_tokens=30)
    stop = next(token for token in free if token != free[0])
    assert run(model, temperature=0, max_new_tokens=30, stop_tokens=[stop]) == free[: free.index(stop)]


@pytest.mark.parametrize("training", [True, False])
def test_tokens_are_computed_when_asked_for_in_evaluation_mode_and_the_caller_is_left_alone(training: bool) -> None:
    """Also after an error."""
    model = build_lively(SETTINGS).train(training)
    tokens = generate(model, PROMPT, seeded(), max_new_tokens=7)
    first = next(tokens)
    assert torch.is_grad_enabled()
    assert not model.training
    assert not model.model.norm.training
    assert [first, *tokens] == run(model)
    assert model.training is model.model.norm.training is training
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(NonFiniteError, match="not finite"):
        run(model)
    assert model.training is model.model.norm.training is training


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"max_new_tokens": -1}, "max_new_tokens must be"),
    ({"temperature": -0.1}, "temperature must be .*, got -0.1"),
    ({"top_k": 0}, "top_k must be .*, got 0"),
    ({"top_p": 1.1}, r"top_p must be .*, got 1\.1"),
    ({"window": 13}, "window must be a whole number from 1 to 12"),
    ({"prompt_tokens": []}, "The prompt is empty"),
    ({"prompt_tokens": [23]}, "token 23 is not in the model's vocabulary, 0 to 22"),
    ({"stop_tokens": [-1]}, "token -1"),
)


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_arguments_that_cannot_work_are_refused_at_once(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        begin(build_lively(SETTINGS), **changes)


BPE = make_tokenizer(DataSettings(tokenizer="bpe:275"), ["abab cabab ümlaut abc abcd 日本語 ababab"] * 4)


TOKENIZERS = {
    "bytes": ByteTokenizer(),
    "bpe": BPE,
    **{name: Tokenizer(made().to_str()) for name, made in FAMILIES.items()},
}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=40)
@given(
    tokens=st.lists(st.integers(0, 300), max_size=40) | st.text("abé本\n", max_size=30).map(lambda t: list(t.encode())),
    prompt=st.sampled_from(["", "the", "the quick ", "thé \n", "สวัสดี"]),
)
def test_pieces_together_are_the_text(name: str, tokens: list[int], prompt: str) -> None:
    tokenizer = TOKENIZERS[name]
    assert "".join(text_of(tokens, tokenizer)) == tokenizer.decode(tokens)
    before = tokenizer.encode_prompt(prompt)
    whole, begin = tokenizer.decode([*before, *tokens]), tokenizer.decode(before)
    if whole.startswith(begin):  # bytes after those of a character may spoil it
        assert begin + "".join(text_of(tokens, tokenizer, before)) == whole


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_of_a_long_text_are_whole_characters_and_come_soon(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    tokens = tokenizer.encode((ODD + "the quick brown fox. " * 4) * 8)
    pieces = list(text_of(tokens, tokenizer, tokenizer.encode_prompt("the")))
    whole = tokenizer.decode([*tokenizer.encode_prompt("the"), *tokens])
    assert tokenizer.decode(tokenizer.encode_prompt("the")) + "".join(pieces) == whole
    assert "\ufffd" not in "".join(pieces)
    assert len(pieces) == len(tokens) + 1
    assert len(pieces[-1]) < 4


def test_a_space_between_prompt_and_answer_is_not_lost() -> None:
    tokenizer = TOKENIZERS["Llama 2"]
    prompt, tokens = tokenizer.encode_prompt("quick"), tokenizer.encode("the")
    assert "".join(text_of(tokens, tokenizer, prompt)) == " the"
    assert "".join(text_of(tokens, tokenizer, tokenizer.encode_prompt(""))) == "the"


def test_a_closing_that_is_text_is_not_part_of_an_answer() -> None:
    for pieces in (["yes", "\n", "\n"], ["yes\n\n"], ["yes"], ["y", "es\n\n"]):
        assert "".join(without_end(pieces, "\n\n")) == "yes"
    for pieces in (["a\n\nb", "\n"], ["a\n", "\nb\n"], [*"a\n\nb\n"]):
        assert "".join(without_end(pieces, "\n\n")) == "a\n\nb\n"
    assert "".join(without_end(["yes"], "")) == "yes"
