"""A digest depends on every bit of the state and on nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diloco.algorithm import OuterState, digest_state, digest_tensors, host_pieces

SIZE = 67


def flipped(values: Tensor, index: int, bit: int) -> Tensor:
    copy = values.clone()
    copy.view(torch.int32)[index] ^= -(1 << 31) if bit == 31 else 1 << bit
    return copy


@given(index=st.integers(0, SIZE - 1), bit=st.integers(0, 31))
def test_any_one_bit_of_parameters_or_momentum_changes_it(index: int, bit: int) -> None:
    """Property: this includes the sign of a zero and the payload of a NaN."""
    params, momentum = torch.zeros(SIZE), torch.full((SIZE,), float("nan"))
    digest = digest_state(params, OuterState(3, {"momentum": momentum}))
    assert digest_state(flipped(params, index, bit), OuterState(3, {"momentum": momentum})) != digest
    assert digest_state(params, OuterState(3, {"momentum": flipped(momentum, index, bit)})) != digest
    assert digest_state(params.clone(), OuterState(3, {"momentum": momentum.clone()})) == digest


def test_the_outer_step_the_slots_and_their_names_are_in_it() -> None:
    params, one, two = torch.ones(4), torch.zeros(4), torch.full((4,), 2.0)
    digests = [
        digest_state(params, OuterState(1)),
        digest_state(params, OuterState(2)),
        digest_state(params, OuterState(12)),
        digest_state(params, OuterState(1, {"mean": one, "square": two})),
        digest_state(params, OuterState(1, {"mean": two, "square": one})),
        digest_state(params, OuterState(1, {"first": one, "square": two})),
        digest_state(params, OuterState(1, {"mean": one})),
    ]
    assert len(set(digests)) == len(digests)


def test_layout_in_memory_does_not_count() -> None:
    values = torch.arange(24, dtype=torch.float32)
    table = values.view(4, 6)
    same = {
        digest_tensors({"x": values}),
        digest_tensors({"x": table}),
        digest_tensors({"x": table.t().contiguous().t()}),  # the same values, columns first
        digest_tensors({"x": torch.stack([values, -values], dim=1)[:, 0]}),  # every other value
        digest_tensors({"x": torch.cat([torch.zeros(1), values])[1:]}),  # at an offset in its memory
        digest_tensors({"x": values.clone().requires_grad_()}),
    }
    assert len(same) == 1
    assert digest_tensors({"x": table.t()}) not in same


def test_it_is_the_same_on_every_machine() -> None:
    """XXH3-128 over name, a zero byte and little-endian bytes. A change here makes old and new replicas diverge."""
    assert digest_tensors({"x": torch.tensor([1.0, -2.0])}) == "8a8afd0bcf978a344cf2b1830dd52557"


@pytest.mark.parametrize("piece_bytes", [1, 3, 4, 11, 100])
@pytest.mark.parametrize("size", [0, 1, 11])
def test_pieces_are_all_there_in_order_and_stay_until_the_next_is_asked_for(piece_bytes: int, size: int) -> None:
    data = torch.arange(size, dtype=torch.uint8)
    seen: list[int] = []
    for piece in host_pieces(data, piece_bytes):
        assert len(piece) <= piece_bytes
        seen += piece.tolist()
    assert seen == data.tolist()
