"""Means encoded by their owners, in committed and void rounds and across a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from diloco import RoundId, make_codec, partition
from tests.faults import Fault, FaultyTransport
from tests.replicas import Swarm, agree, quadratic, streaming


class Rows(nn.Module):
    """Three parameters of several blocks each, one for each of three fragments."""

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.second, self.third = (
            nn.Parameter(torch.randn(scale * size, generator=generator)) for size in (40, 48, 57)
        )


def encoded(num_replicas: int = 4, **more: Any) -> Swarm:
    """Streaming DiLoCo with contributions in int8 and means in fp4, in blocks of four values."""
    arguments = {
        "make_model": Rows,
        "fragments": partition(
            more.get("make_model", Rows)(), strategy="patterns", patterns=(("first",), ("second",), ("third",))
        ),
        "codec": make_codec("int8", block_size=4),
        "mean_codec": make_codec("fp4", block_size=4),
        **more,
    }
    return streaming(num_replicas, **arguments)


def test_all_replicas_hold_the_same_bits_and_send_less() -> None:
    swarm, plain = encoded(), encoded(mean_codec="float32")
    for each in (swarm, plain):
        each.run(26, quadratic())
    assert agree(swarm)
    assert not torch.equal(plain.global_params(0), swarm.global_params(0))
    sent = [each.transport.endpoint(0).sent_bytes for each in (swarm, plain)]
    assert sent[0] < 0.6 * sent[1]


def test_a_lone_replica_has_its_own_mean_to_the_bit() -> None:
    swarms = encoded(1, mean_codec="fp4"), encoded(1, mean_codec="float32")
    for each in swarms:
        each.run(20, quadratic())
    assert torch.equal(*(each.global_params(0) for each in swarms))


def test_converges_to_the_mean_of_the_replicas_targets() -> None:
    """With int8 means, the result is as close as with float32 means, up to the noise of the gradients."""
    results = []
    for codec in (make_codec("float32"), make_codec("int8", block_size=4)):
        swarm = encoded(mean_codec=codec)
        swarm.run(120, quadratic())
        results.append(swarm.global_params(0))
    generators = [torch.Generator().manual_seed(m) for m in range(4)]
    drawn = [torch.cat([torch.randn(p.shape, generator=g) for p in Rows().parameters()]) for g in generators]
    plain, means = (float((each - torch.stack(drawn).mean(0)).abs().mean()) for each in results)
    assert means < 1.2 * plain + 0.005
    assert not torch.equal(*results), "they were encoded"


@pytest.mark.parametrize("least", [None, 3])
def test_replicas_agree_after_a_round_that_is_void_or_excludes_one(least: int | None) -> None:
    fault = Fault(kind="drop", replica=2, round=RoundId(0, 1))
    swarm = encoded(transport=FaultyTransport(4, faults=[fault], min_contributors=least))
    swarm.run(20, quadratic())
    assert agree(swarm)


@pytest.mark.parametrize("stop_at", [6, 8])
def test_stopping_anywhere_and_going_on_is_never_stopping(stop_at: int) -> None:
    """Invariant 6; at 8 fragments are in flight."""
    whole, first, second = encoded(), encoded(), encoded()
    whole.run(20, quadratic())
    first.run(stop_at, quadratic())
    second.resume_from(first)
    second.run(20 - stop_at, quadratic())
    for m in range(4):
        assert torch.equal(second.local(m), whole.local(m))
        assert torch.equal(second.global_params(m), whole.global_params(m))


@pytest.mark.parametrize(
    ("number", "codec", "name"), [(7, "int8", "float32"), (8, "int8", "int8"), (8, "bfloat16", "float32")]
)
def test_by_default_means_are_int8_among_eight_and_float32_among_seven(number: int, codec: str, name: str) -> None:
    """Each fragment has at least 10 blocks of 256 values."""
    auto, plain = (
        encoded(number, make_model=lambda: Rows(64), codec=codec, mean_codec=mean) for mean in ("auto", name)
    )
    for swarm in (auto, plain):
        swarm.run(10, quadratic())
    assert torch.equal(auto.global_params(0), plain.global_params(0))
    sent = [[each.transport.sent_bytes for each in swarm.replicas] for swarm in (auto, plain)]
    assert sent[0] == sent[1]
    assert agree(auto)
