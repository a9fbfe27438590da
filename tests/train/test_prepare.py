"""Blocks that are recomputed, compiled, or both: the same bits, the activations that are kept, no graph breaks."""

from collections.abc import Iterator
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


# warnings of torch's tracer about its own code
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", r"ignore:The \.grad attribute of a Tensor")


@pytest.fixture
def counts() -> Iterator[Any]:
    """What torch's tracer counts."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
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
def test_compiled_blocks_have_no_graph_break_and_are_compiled_once(checkpointing: Any, counts: Any) -> None:
    """The backend "aot_eager" generates no code but splits and recomputes like the real one."""
    plain, compiled = build_model(SETTINGS, seed=0), build_model(SETTINGS, seed=0)
    prepare_blocks(compiled, checkpointing=checkpointing, compiled=True, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(gradients(compiled), gradients(plain), rtol=1e-5, atol=1e-6)
    assert counts["stats"]["unique_graphs"] == 1, "one graph serves all blocks"
    assert not counts["graph_break"]


@torch.no_grad()
def test_evaluation_runs_compiled_where_training_does_and_generation_does_not(counts: Any) -> None:
    plain, compiled = build_model(SETTINGS, seed=0), build_model(SETTINGS, seed=0)
    prepare_blocks(compiled, checkpointing="full", compiled=True, backend="aot_eager")
    assert len(list(generate(compiled, [1, 2], torch.Generator(), max_new_tokens=3))) == 3
    assert not counts["stats"]["unique_graphs"]
    for _ in range(2):
        torch.testing.assert_close(compiled(TOKENS[:, :8]), plain(TOKENS[:, :8]), rtol=1e-5, atol=1e-6)
    assert counts["stats"]["unique_graphs"] == 1
