"""Means encoded by their owners, in committed and void rounds and across a checkpoint."""

import pytest
import torch
from torch import nn

from diloco import RoundId, make_codec
from tests.faults import Fault
from tests.replicas import agree, apart, quadratic, streaming


class Rows(nn.Module):
    """Three parameters of several blocks each, one for each of three fragments."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.second, self.third = (
            nn.Parameter(torch.randn(size, generator=generator)) for size in (40, 48, 57)
        )


@pytest.mark.parametrize(("faulty", "least"), [(False, None), (True, None), (True, 3)])
def test_all_replicas_hold_the_same_bits_and_send_less(faulty: bool, least: int | None) -> None:
    """Also after a round that is void or excludes one."""
    faults = [Fault(kind="drop", replica=2, round=RoundId(0, 1))] if faulty else []
    codec, arguments = make_codec("int8", block_size=4), {"make_model": Rows, "fragments": apart(Rows())}
    swarm, plain = (
        streaming(4, faults=faults, least=least, codec=codec, mean_codec=mean, **arguments)
        for mean in (make_codec("fp4", block_size=4), "float32")
    )
    for each in (swarm, plain):
        each.run(26, quadratic())
    assert agree(swarm)
    assert not torch.equal(plain.global_params(0), swarm.global_params(0))
    sent = [each.transport.endpoint(0).sent_bytes for each in (swarm, plain)]
    assert sent[0] < 0.6 * sent[1]
