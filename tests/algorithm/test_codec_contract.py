"""The contract tests of codecs: the package's codecs pass, and each broken contract is reported."""

from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.algorithm import Codec
from diloco.errors import ContractError
from diloco.testing import check_codec
from tests.algorithm.codecs import ACCURATE, COARSE, OURS, SIZES

ALL = ACCURATE | COARSE


@pytest.mark.parametrize("name", OURS)
def test_every_registered_codec_is_tried_in_every_implementation(name: str) -> None:
    assert name in ALL


@pytest.mark.parametrize("name", ALL)
def test_ours_keep_the_contract(name: str) -> None:
    tile = ALL[name]().block_size
    check_codec(ALL[name], sizes=[*SIZES, tile - 1, tile, tile + 1, 3 * tile + 70])


def halved(values: Tensor) -> Tensor:
    return values.clamp(-65504, 65504).half().view(torch.uint8)


class Halves(Codec):
    """A codec that keeps the contract. Each codec in `BROKEN` breaks it in one place."""

    name = "halves"

    def payload_bytes(self, numel: int) -> int:
        return 2 * numel

    def _encode(self, values: Tensor, payload: Tensor) -> None:
        payload.copy_(halved(values))

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        out.copy_(payload.clone().view(torch.float16))


BROKEN: dict[str, dict[str, Any]] = {
    "two instances encode": {"__init__": lambda self: setattr(self, "offset", float(torch.rand(())))},
    "encoding them again gives different bytes": {
        "_encode": lambda self, v, p: p.copy_(halved(v + torch.rand(()) - 0.5))
    },
    "encode changed them": {"_encode": lambda self, v, p: p.copy_(halved(v.add_(1).clamp_(-60000, 60000)))},
    "the payload shares their memory": {
        "payload_bytes": lambda s, n: 4 * n,
        "encode": lambda s, v: v.view(torch.uint8),
    },
    "leaves values unwritten": {"_decode": lambda s, p, o: o[1:].copy_(p.clone().view(torch.float16)[1:])},
    "with two roundings": {"_accumulate": lambda s, p, o, w: o.add_(s.decode(p, o.numel()).double() * w)},
    "at an odd address": {"_decode": lambda s, p, o: o.copy_((p.data_ptr() % 2) + p.clone().view(torch.float16))},
    "differs from the payload of these values": {
        "_cut": lambda self, payload, n, start, stop: payload[: 2 * (stop - start)]
    },
    "contains NaN or infinity": {"_encode": lambda self, v, p: p.copy_(v.half().view(torch.uint8))},
    "accepts bytes that decode to NaN": {"_find_fault": lambda self, payload, numel: None},
    "may only raise CodecError": {
        "_find_fault": lambda self, payload, numel: [None][Codec._find_fault(self, payload, numel) is not None]
    },
    "validate accepts a payload that is too short": {"_check_payload": lambda self, payload, numel: None},
    "decode writes to an `out`": {"_check_out": lambda self, payload, numel, out: None},
    "its name is not a string": {"name": 3},
    "block_size is 0": {"block_size": 0},
    "which replicas can't compare": {"parameters": lambda self: {"x": torch.zeros(1)}},
}


def test_a_codec_that_leaves_all_to_the_base_class_keeps_the_contract() -> None:
    check_codec(Halves)


@pytest.mark.parametrize("words", BROKEN)
def test_what_is_not_kept_is_told(words: str) -> None:
    members = dict(BROKEN[words])
    if "__init__" in members:
        members["_encode"] = lambda self, values, payload: payload.copy_(halved(values + self.offset))
    with pytest.raises(ContractError, match=words):
        check_codec(type("Broken", (Halves,), members))
