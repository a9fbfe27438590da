"""The loss computed in chunks with the output projection: values, gradients, memory."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from diloco.model import build_model, cross_entropy_with_z_loss, projected_cross_entropy
from tests.model.decoders import SMALL, random_tokens


def draw(tokens: int, width: int, vocab: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(vocab, (tokens,), generator=generator)


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 20),
    width=st.integers(1, 6),
    vocab=st.integers(1, 9),
    chunk_tokens=st.integers(1, 25),
    z_loss=st.sampled_from([0.0, 1e-4, 0.1]),
    upstream=st.sampled_from([1.0, 0.3, 65536.0]),
)
def test_it_is_the_loss_of_all_logits_at_once(
    tokens: int, width: int, vocab: int, chunk_tokens: int, z_loss: float, upstream: float
) -> None:
    """Property: values and both gradients, for every chunk size, including a single chunk."""
    hidden, weight, targets = draw(tokens, width, vocab)
    parts = projected_cross_entropy(hidden, weight, targets, z_loss, chunk_tokens=chunk_tokens)
    expected = cross_entropy_with_z_loss(hidden.double() @ weight.double().T, targets, z_loss)
    for part, value in zip(parts, expected, strict=True):
        torch.testing.assert_close(part.double(), value, rtol=1e-5, atol=1e-6)
    assert not parts[1].requires_grad
    gradients = torch.autograd.grad(parts[0], (hidden, weight), torch.tensor(upstream))
    wanted = torch.autograd.grad(expected[0], (hidden, weight), torch.tensor(upstream, dtype=torch.float64))
    for gradient, value in zip(gradients, wanted, strict=True):
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, value, rtol=1e-4, atol=1e-6 * upstream)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_it_is_as_near_to_float32_as_the_logits_at_once(dtype: torch.dtype) -> None:
    """In float16, tiny gradients (many tokens, a large vocabulary) do not vanish, and sums do not overflow."""
    hidden, weight, targets = draw(3 * 1024, 8, 300)
    targets.zero_()  # all equal: the largest sum that a row of the projection can get
    exact = projected_cross_entropy(hidden, weight, targets, 1e-4, chunk_tokens=10**6)
    wanted = torch.autograd.grad(exact[0], (hidden, weight))
    with torch.autocast("cpu", dtype):
        chunked = projected_cross_entropy(hidden, weight, targets, 1e-4, chunk_tokens=10**6)
        at_once = cross_entropy_with_z_loss(torch.nn.functional.linear(hidden, weight).float(), targets, 1e-4)
    scale = torch.tensor(2.0**16)  # the initial scale of a gradient scaler
    errors = []
    for parts in (chunked, at_once):
        assert parts[0].dtype == torch.float32
        gradients = torch.autograd.grad(parts[0], (hidden, weight), scale)
        errors.append([float((g / scale - w).norm() / w.norm()) for g, w in zip(gradients, wanted, strict=True)])
    assert all(mine <= 1.2 * theirs + 1e-4 for mine, theirs in zip(*errors, strict=True)), errors
    assert max(errors[0]) < 0.01


@pytest.mark.parametrize("change", [{}, {"tie_embeddings": True, "qk_norm": True, "z_loss": 1e-2}])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_model_has_the_same_loss_and_gradients_in_chunks(change: dict[str, Any], precision: torch.dtype) -> None:
    """A tied embedding gets the sum of the gradients of both uses."""
    model = build_model(replace(SMALL, **change), seed=0)
    tokens = random_tokens(3, 14)
    results = []
    for chunk_tokens in (0, 5):
        model.loss_chunk_tokens = chunk_tokens
        model.zero_grad()
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            parts = model.loss(tokens[:, :-1], tokens[:, 1:])
        torch.autograd.backward(parts.loss)
        results.append((parts, [p.grad for p in model.parameters()]))
    rtol = 1e-5 if precision == torch.float32 else 2e-2
    torch.testing.assert_close(results[1][0], results[0][0], rtol=rtol, atol=1e-6)
    for one, other in zip(results[0][1], results[1][1], strict=True):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(other, one, rtol=rtol, atol=rtol * float(one.abs().max()))


class LargestOutput(TorchDispatchMode):
    """Records the bytes of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self.nbytes = max(self.nbytes, value.numel() * value.element_size())
        return result


def test_no_array_is_larger_than_a_chunks_logits() -> None:
    """640 tokens and a vocabulary of 500: all logits are 1.28 MB, and those of 64 tokens a tenth of that."""
    model = build_model(replace(SMALL, vocab_size=500, max_sequence_length=320), seed=0)
    tokens = random_tokens(2, 321, vocab=500)
    largest = []
    for chunk_tokens in (640, 64):
        model.loss_chunk_tokens = chunk_tokens
        with LargestOutput() as measured:
            torch.autograd.backward(model.loss(tokens[:, :-1], tokens[:, 1:]).loss)
        largest.append(measured.nbytes)
    assert largest[0] == 640 * 500 * 4, "a batch no larger than a chunk must be computed without chunks"
    assert largest[1] == 64 * 500 * 4
