"""The second half of a reduce-scatter by itself: when the pieces of a mean leave, and what a void round sends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import Future
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from diloco.algorithm import Contribution, MeanEncoding, Residual, RoundId, make_codec, plan_exchange
from diloco.transport import MeanExchange, RoundMessages

BLOCK = 64
CODEC = make_codec("fp4", block_size=BLOCK)
ZEROS = CODEC.encode(torch.zeros(BLOCK))
FEEDBACK = MeanEncoding(CODEC, decay=1.0)


class Recorded(RoundMessages):
    """Messages to others, whose means and residuals are zero. A piece holds one block."""

    def __init__(self, others: Iterable[int]) -> None:
        super().__init__(RoundId(0, 0), Mock(spec=asyncio.AbstractEventLoop), piece_bytes=1)
        self.links = dict.fromkeys(others)  # type: ignore[assignment]  # nothing is sent over them
        self.sent: list[tuple[int, Tensor]] = []

    def send(self, members: Iterable[int], payload: Tensor, piece: int, *, second: bool = False) -> None:
        assert second
        assert list(members) == list(self.links)
        self.sent.append((piece, payload.clone()))

    def receive(self, member: int, buffer: Tensor, piece: int, *, second: bool = False) -> Future[None]:
        if len(buffer) == len(ZEROS):  # a mean, not a residual
            buffer.copy_(ZEROS)
        arrived: Future[None] = Future()
        arrived.set_result(None)
        return arrived


def exchange(
    *, replica: int = 1, blocks: int = 12, residual: Residual | None = None
) -> tuple[MeanExchange, Recorded, Tensor]:
    """Return the exchange of one of three replicas, its messages, and the values that it works on."""
    numel, messages = blocks * BLOCK, Recorded({0, 1, 2} - {replica})
    values = torch.zeros(numel)
    payload = CODEC.encode(values)
    given = Contribution(
        round=RoundId(0, 0), replica=replica, codec=CODEC, numel=numel, payload=payload, residual=residual
    )
    plan = plan_exchange(CODEC, numel, 3, mean=FEEDBACK)
    assert plan.pattern == "reduce-scatter"
    return MeanExchange(given, plan, (0, 1, 2), messages, values), messages, values


@pytest.mark.parametrize("residual", [None, Residual(4 * BLOCK, torch.full((4 * BLOCK,), 0.25))])
def test_each_piece_leaves_once_its_values_are_summed(residual: Residual | None) -> None:
    """Pieces sent one by one are those that are sent all at once."""
    sums = torch.randn(4 * BLOCK, generator=torch.Generator().manual_seed(0))
    at_once, all_messages, all_values = exchange(residual=residual)
    start, stop = at_once.owned
    assert stop - start == len(sums)
    all_values[start:stop] = sums
    all_left = at_once.receive()

    one_by_one, messages, values = exchange(residual=residual)
    for half in range(8):
        low, high = half * BLOCK // 2, (half + 1) * BLOCK // 2
        values[start + low : start + high] = sums[low:high]
        one_by_one.send(start + high)
        assert [piece for piece, _ in messages.sent] == list(range((half + 1) // 2))
    left = one_by_one.receive()

    for (piece, sent), (same_piece, same) in zip(messages.sent, all_messages.sent, strict=True):
        assert piece == same_piece
        assert torch.equal(sent, same)
    assert left is not None
    assert all_left is not None
    assert torch.equal(left.values, all_left.values)
    assert torch.equal(values, all_values)


def test_a_void_round_sends_zeros_for_what_it_has_not_sent() -> None:
    """Every member receives as many pieces as in any other round, so the links are clean for the next one."""
    means, messages, values = exchange()
    start, stop = means.owned
    values[start:stop] = 1.0
    means.send(start + 2 * BLOCK)
    means.drain()
    assert [piece for piece, _ in messages.sent] == [0, 1, 2, 3]
    assert [float(CODEC.decode(sent, BLOCK).max()) for _, sent in messages.sent] == [1.0, 1.0, 0.0, 0.0]
    means.drain()
    assert len(messages.sent) == 4


def test_a_replica_that_owns_no_values_keeps_an_empty_residual() -> None:
    means, messages, _ = exchange(replica=0, blocks=2)
    left = means.receive()
    assert left is not None
    assert left.values.numel() == 0
    assert not messages.sent
