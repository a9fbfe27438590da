"""Means encoded by their owners in committed and void rounds and across views: each residual is sent exactly once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco.algorithm import make_codec, partition
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
        "mean_error_feedback": True,
        **more,
    }
    return streaming(num_replicas, **arguments)


def residuals(swarm: Swarm, fragment: int = 0) -> list[tuple[int, Tensor] | None]:
    """Return the residual of each replica for the means of a fragment: its start and its values."""
    found = [diloco.state_dict()["mean_residuals"][fragment] for diloco in swarm.replicas]
    return [None if each is None else (each["start"], each["values"].clone()) for each in found]


def test_all_replicas_hold_the_same_bits_and_each_a_part_of_what_was_lost() -> None:
    swarm = encoded()
    swarm.run(6, quadratic())
    held = residuals(swarm)
    assert [each and (each[0], len(each[1])) for each in held] == [(0, 8), (8, 12), (20, 8), (28, 12)]
    assert all(each is not None and bool(each[1].any()) for each in held)
    swarm.run(20, quadratic())
    assert agree(swarm)
    plain = encoded(mean_codec="float32", mean_error_feedback=False)
    plain.run(26, quadratic())
    assert not torch.equal(plain.global_params(0), swarm.global_params(0))
    sent = [each.transport.endpoint(0).sent_bytes for each in (swarm, plain)]
    assert sent[0] < 0.6 * sent[1]


def test_without_feedback_nothing_is_kept() -> None:
    swarm = encoded(mean_error_feedback=False)
    swarm.run(26, quadratic())
    assert agree(swarm)
    assert residuals(swarm) == [None] * 4


@pytest.mark.parametrize("mean_codec", ["float32", "fp4"])
def test_a_lone_replica_has_its_own_mean_to_the_bit(mean_codec: str) -> None:
    swarm = encoded(1, mean_codec=mean_codec)
    plain = encoded(1, mean_codec="float32", mean_error_feedback=False)
    for each in (swarm, plain):
        each.run(20, quadratic())
    assert torch.equal(swarm.global_params(0), plain.global_params(0))


@pytest.mark.parametrize("stop_at", [4, 6, 8, 9])
def test_stopping_anywhere_and_going_on_is_never_stopping(stop_at: int) -> None:
    """Invariant 6; at 4, 8 and 9 fragments are in flight."""
    whole = encoded()
    whole.run(20, quadratic())
    first, second = encoded(), encoded()
    first.run(stop_at, quadratic())
    second.resume_from(first)
    second.run(20 - stop_at, quadratic())
    for m in range(4):
        assert torch.equal(second.local(m), whole.local(m))
        assert torch.equal(second.global_params(m), whole.global_params(m))
    for mine, theirs in zip(residuals(second), residuals(whole), strict=True):
        assert mine is not None
        assert theirs is not None
        assert (mine[0], mine[1].tolist()) == (theirs[0], theirs[1].tolist())


def by_itself(num_replicas: int, codec: str, **more: Any) -> Swarm:
    """Return a swarm whose fragments have at least 10 blocks of 256 values."""
    return encoded(num_replicas, make_model=lambda: Rows(64), codec=codec, **{"mean_codec": "auto", **more})


def test_by_default_means_are_int8_among_eight_and_float32_among_seven() -> None:
    for number, codec, name in ((7, "int8", "float32"), (8, "int8", "int8"), (8, "bfloat16", "float32")):
        found, expected = by_itself(number, codec), by_itself(number, codec, mean_codec=name)
        for swarm in (found, expected):
            swarm.run(10, quadratic())
        assert torch.equal(found.global_params(0), expected.global_params(0))
        assert [each.transport.sent_bytes for each in found.replicas] == [
            each.transport.sent_bytes for each in expected.replicas
        ]
        assert (residuals(found)[7 % number] is not None) == (name == "int8")
        assert agree(found)
