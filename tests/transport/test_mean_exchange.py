"""The second half of a reduce-scatter by itself: when the pieces of a mean leave, and what a void round sends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import Future
from unittest.mock import Mock

import torch
from torch import Tensor

from diloco.algorithm import Contribution, MeanEncoding, RoundId, make_codec, plan_exchange
from diloco.transport import MeanExchange, RoundMessages

BLOCK = 64
CODEC = make_codec("fp4", block_size=BLOCK)
ZEROS = CODEC.encode(torch.zeros(BLOCK))
MEANS = MeanEncoding(CODEC)


class Recorded(RoundMessages):
    """Messages to others, whose means are zero. A piece holds one block."""

    def __init__(self, others: Iterable[int]) -> None:
        super().__init__(RoundId(0, 0), Mock(spec=asyncio.AbstractEventLoop), piece_bytes=1)
        self.links = dict.fromkeys(others)  # type: ignore[assignment]  # nothing is sent over them
        self.sent: list[tuple[int, Tensor]] = []

    def send(self, members: Iterable[int], payload: Tensor, piece: int, *, second: bool = False) -> None:
        assert second
        assert list(members) == list(self.links)
        self.sent.append((piece, payload.clone()))

    def receive(self, member: int, buffer: Tensor, piece: int, *, second: bool = False) -> Future[None]:
        buffer.copy_(ZEROS)
        arrived: Future[None] = Future()
        arrived.set_result(None)
        return arrived


def exchange() -> tuple[MeanExchange, Recorded, Tensor]:
    """Return the exchange of one of three replicas, its messages, and the values that it works on."""
    numel, messages = 12 * BLOCK, Recorded({0, 2})
    values = torch.zeros(numel)
    payload = CODEC.encode(values)
    given = Contribution(round=RoundId(0, 0), replica=1, codec=CODEC, numel=numel, payload=payload)
    plan = plan_exchange(CODEC, numel, 3, mean=MEANS)
    assert plan.pattern == "reduce-scatter"
    return MeanExchange(given, plan, (0, 1, 2), messages, values), messages, values


def test_each_piece_leaves_once_its_values_are_summed() -> None:
    """Pieces sent one by one are those that are sent all at once."""
    sums = torch.randn(4 * BLOCK, generator=torch.Generator().manual_seed(0))
    at_once, all_messages, all_values = exchange()
    start, stop = at_once.owned
    assert stop - start == len(sums)
    all_values[start:stop] = sums
    at_once.receive()

    one_by_one, messages, values = exchange()
    for half in range(8):
        low, high = half * BLOCK // 2, (half + 1) * BLOCK // 2
        values[start + low : start + high] = sums[low:high]
        one_by_one.send(start + high)
        assert [piece for piece, _ in messages.sent] == list(range((half + 1) // 2))
    one_by_one.receive()

    for (piece, sent), (same_piece, same) in zip(messages.sent, all_messages.sent, strict=True):
        assert piece == same_piece
        assert torch.equal(sent, same)
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
