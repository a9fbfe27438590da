"""Means encoded by their owners, in committed and void rounds and across a checkpoint."""

from typing import Any

import pytest
import torch
from torch import nn

from diloco import RoundId, make_codec
from tests.faults import Fault, FaultyTransport
from tests.replicas import Swarm, agree, apart, quadratic, streaming


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
        "fragments": apart(more.get("make_model", Rows)()),
        "codec": make_codec("int8", block_size=4),
        "mean_codec": make_codec("fp4", block_size=4),
        **more,
    }
    return streaming(num_replicas, **arguments)


@pytest.mark.parametrize(("faulty", "least"), [(False, None), (True, None), (True, 3)])
def test_all_replicas_hold_the_same_bits_and_send_less(faulty: bool, least: int | None) -> None:
    """Also after a round that is void or excludes one."""
    faults = [Fault(kind="drop", replica=2, round=RoundId(0, 1))] if faulty else []
    swarm, plain = (
        encoded(transport=FaultyTransport(4, faults=faults, min_contributors=least), **means)
        for means in ({}, {"mean_codec": "float32"})
    )
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
