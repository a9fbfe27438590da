"""Blocks that are recomputed, compiled, or both: the same bits, the activations that are kept, no graph breaks."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.model import DecoderSettings, Transformer, build_model, document_numbers
from diloco.train import prepare_blocks
from diloco.trained import generate

SETTINGS = DecoderSettings(
    layers=2, width=16, ffn_width=24, heads=4, kv_heads=2, vocab_size=17, qk_norm=True, max_sequence_length=16
)
TOKENS = torch.randint(17, (2, 13), generator=torch.Generator().manual_seed(0))


def gradients(model: Transformer, *, documents: bool = False, precision: Any = torch.float32) -> list[Tensor]:
    inputs, targets = TOKENS[:, :-1], TOKENS[:, 1:]
    model.zero_grad()
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        loss = model.loss(inputs, targets, document_numbers(inputs, 3) if documents else None).loss
    torch.autograd.backward(loss)
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@contextmanager
def tracing() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        # a warning of torch's tracer about its own code
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor", category=UserWarning)
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_recomputing_changes_no_bit(checkpointing: Any, precision: torch.dtype) -> None:
    plain, recomputed = build_model(SETTINGS, seed=0), build_model(SETTINGS, seed=0)
    prepare_blocks(recomputed, checkpointing=checkpointing)
    for documents in (False, True):
        expected = gradients(plain, documents=documents, precision=precision)
        found = gradients(recomputed, documents=documents, precision=precision)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_compiled_blocks_have_no_graph_break_and_are_compiled_once(checkpointing: Any) -> None:
    """The backend "aot_eager" generates no code but splits and recomputes like the real one."""
    plain, compiled = build_model(SETTINGS, seed=0), build_model(SETTINGS, seed=0)
    with tracing():
        prepare_blocks(compiled, checkpointing=checkpointing, compiled=True, backend="aot_eager")
        for _ in range(2):
            expected, found = gradients(plain), gradients(compiled)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "one graph serves all blocks"
        assert not torch._dynamo.utils.counters["graph_break"]


def test_evaluation_runs_compiled_where_training_does_and_generation_does_not() -> None:
    plain, compiled = build_model(SETTINGS, seed=0), build_model(SETTINGS, seed=0)
    tokens = torch.randint(SETTINGS.vocab_size or 0, (2, 8), generator=torch.Generator().manual_seed(0))
    with tracing(), torch.no_grad():
        prepare_blocks(compiled, checkpointing="full", compiled=True, backend="aot_eager")
        assert len(list(generate(compiled, [1, 2], torch.Generator(), max_new_tokens=3))) == 3
        assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for _ in range(2):
            torch.testing.assert_close(compiled(tokens), plain(tokens), rtol=1e-5, atol=1e-6)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
