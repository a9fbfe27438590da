"""Packed documents that don't see each other."""

from __future__ import annotations

import torch

from diloco.model.language_model import document_numbers
from diloco.model.settings import ModelSettings
from diloco.model.transformer import Transformer, build_model

END = 9


def model() -> Transformer:
    return build_model(ModelSettings(layers=2, width=16, heads=2, ffn_width=32, vocab_size=11, qk_norm=True), seed=0)


def test_a_document_has_the_logits_that_it_has_alone() -> None:
    # rotary positions are relative, so where a document begins makes no difference
    documents = [[1, 2, 3, END], [4, END], [5, 6, 7]]
    packed = torch.tensor([[token for document in documents for token in document]])
    with torch.no_grad():
        together = model()(packed, documents=document_numbers(packed, END))[0]
        alone = torch.cat([model()(torch.tensor([document]))[0] for document in documents])
    torch.testing.assert_close(together, alone)


def test_without_numbers_the_documents_before_are_seen() -> None:
    packed = torch.tensor([[1, 2, END, 3, 4]])
    with torch.no_grad():
        seen, unseen = model()(packed), model()(packed, documents=document_numbers(packed, END))
    torch.testing.assert_close(seen[0, :3], unseen[0, :3])
    assert not torch.allclose(seen[0, 3:], unseen[0, 3:])


def test_the_loss_sees_what_the_logits_see() -> None:
    packed = torch.tensor([[1, 2, END, 3, 4, 5]])
    inputs, targets = packed[:, :-1], packed[:, 1:]
    documents = document_numbers(inputs, END)
    parts = model().loss(inputs, targets, documents)
    expected = torch.nn.functional.cross_entropy(model()(inputs, documents=documents)[0], targets[0])
    torch.testing.assert_close(parts.cross_entropy, expected)


def test_one_document_is_no_mask() -> None:
    tokens = torch.arange(8).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(model()(tokens, documents=torch.zeros_like(tokens)), model()(tokens))
