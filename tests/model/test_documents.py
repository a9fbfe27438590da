"""Packed documents that are masked from each other."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from diloco.model import DecoderSettings, Transformer, attend, block_mask, boolean_mask, build_model, document_numbers

END = 9


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Allow FlexAttention's backward pass on the CPU, which torch refuses because it is slow; silence its warning."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *heads: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def model() -> Transformer:
    return build_model(DecoderSettings(layers=2, width=16, heads=2, ffn_width=32, vocab_size=11, qk_norm=True), seed=0)


def test_a_document_has_the_logits_that_it_has_alone() -> None:
    # rotary positions are relative, so the beginning of a document does not matter
    documents = [[1, 2, 3, END], [4, END], [5, 6, 7]]
    packed = torch.tensor([[token for document in documents for token in document]])
    with torch.no_grad():
        together = model()(packed, documents=document_numbers(packed, END))[0]
        alone = torch.cat([model()(torch.tensor([document]))[0] for document in documents])
    torch.testing.assert_close(together, alone)


def test_the_loss_sees_what_the_logits_see() -> None:
    packed = torch.tensor([[1, 2, END, 3, 4, 5]])
    inputs, targets = packed[:, :-1], packed[:, 1:]
    documents = document_numbers(inputs, END)
    parts = model().loss(inputs, targets, documents)
    expected = torch.nn.functional.cross_entropy(model()(inputs, documents=documents)[0], targets[0])
    torch.testing.assert_close(parts.cross_entropy, expected)


@pytest.mark.usefixtures("flex_on_cpu")
def test_flex_attention_attends_as_the_boolean_mask_says() -> None:
    """The mask for CUDA, with torch's uncompiled reference: values and gradients, grouped heads, uneven blocks."""
    tokens = torch.randint(10, (2, 150), generator=torch.Generator().manual_seed(0))
    numbers = document_numbers(tokens, END)
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 150, 8), (2, 2, 150, 8), (2, 2, 150, 8))
    heads = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    found = []
    for mask in (block_mask(numbers), boolean_mask(numbers)):
        attended = attend(heads[0], heads[1], heads[2], mask, grouped=True)
        found.append([attended.detach(), *torch.autograd.grad(attended.square().sum(), heads)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
