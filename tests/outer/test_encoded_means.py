"""Means encoded by their owners in committed and void rounds and across views: each residual is sent exactly once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco.algorithm import RoundId, make_codec, partition
from diloco.events import RoundCommitted, RoundVoid
from diloco.transport import Fault, InProcessTransport
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


def test_converges_to_the_mean_of_the_replicas_targets() -> None:
    """The result is as close as with float32 means, up to the noise of the gradients."""
    codecs = [make_codec("float32"), *(make_codec(name, block_size=4) for name in ("int8", "fp4"))]
    found = []
    for codec in codecs:
        swarm = encoded(mean_codec=codec, mean_error_feedback=codec.name != "float32")
        swarm.run(120, quadratic())
        found.append(swarm.global_params(0))
    generators = [torch.Generator().manual_seed(m) for m in range(4)]
    drawn = [torch.cat([torch.randn(p.shape, generator=g) for p in Rows().parameters()]) for g in generators]
    target = torch.stack(drawn).mean(0)
    plain, *means = (float((each - target).abs().mean()) for each in found)
    assert all(each < 1.2 * plain + 0.005 for each in means)
    assert not any(torch.equal(each, found[0]) for each in found[1:]), "they were encoded"


@pytest.mark.parametrize("least", [None, 3])
def test_a_void_round_leaves_what_was_lost_as_it_was(least: int | None) -> None:
    """A round that excludes a replica's contribution changes it: that replica still owns its part."""
    fault = Fault(kind="drop", replica=2, round=RoundId(0, 1))
    swarm = encoded(transport=InProcessTransport(4, faults=[fault], min_contributors=least))
    swarm.run(9, quadratic())  # round (0, 1) was sent at 8 and is merged at 10
    before = residuals(swarm)
    swarm.run(1, quadratic())
    for old, new in zip(before, residuals(swarm), strict=True):
        assert old is not None
        assert new is not None
        assert torch.equal(old[1], new[1]) == (least is None)
    swarm.run(10, quadratic())
    assert agree(swarm)


def test_who_misses_a_commit_drops_what_it_held_and_says_so() -> None:
    """The others have applied a mean that contains the residual, so keeping it would send it twice."""
    fault = Fault(kind="miss-commit", replica=1, round=RoundId(0, 1))
    swarm = encoded(transport=InProcessTransport(4, faults=[fault]))
    swarm.run(11, quadratic())
    assert residuals(swarm)[1] is not None, "replica 1 does not know of the commit yet"
    swarm.run(3, quadratic())
    void = [event for event in swarm.events if isinstance(event, RoundVoid) and event.outer_step == 2]
    assert [event.reason.endswith("It drops the residual of its earlier means.") for event in void] == [
        event.replica == 1 for event in void
    ]
    held = residuals(swarm)
    assert held[1] is None
    assert all(held[m] is not None for m in (0, 2, 3))
    swarm.run(4, quadratic())
    committed = [e for e in swarm.events if isinstance(e, RoundCommitted) and (e.fragment, e.outer_step) == (0, 3)]
    assert {event.note for event in committed} == {"the residual of the mean of 12 of 40 values is lost with its owner"}
    assert agree(swarm)


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


def test_what_was_lost_goes_to_the_owners_among_other_replicas() -> None:
    """Three replicas continue from a checkpoint of four: replica 3's residual is lost, the others get new owners."""
    four, three = encoded(), encoded(3)
    four.run(6, quadratic())
    for diloco in four.replicas:
        diloco.drain()
    for m, diloco in enumerate(three.replicas):
        three.models[m].load_state_dict(four.models[m].state_dict())
        diloco.load_state_dict(four.replicas[m].state_dict())
    held = [part for part in residuals(four) if part is not None]
    three.run(4, quadratic())
    committed = [e for e in three.events if isinstance(e, RoundCommitted) and e.fragment == 0]
    assert [event.note for event in committed] == [
        "the residual of the mean of 12 of 40 values is lost with its owner"
    ] * 3
    assert [part and part[0] for part in residuals(three)] == [0, 12, 24]
    assert len(held) == 4
    assert agree(three)


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


def test_what_eight_have_lost_waits_while_they_are_seven() -> None:
    """Seven replicas use exact float32 means. Among eight again, all residuals but the departed one's are sent."""
    eight, seven, again = (by_itself(number, "int8") for number in (8, 7, 8))
    eight.run(6, quadratic())
    for before, after in ((eight, seven), (seven, again)):
        for diloco in before.replicas:
            diloco.drain()
        for m, diloco in enumerate(after.replicas):
            old = before.replicas[min(m, 6)]
            after.models[m].load_state_dict(before.models[min(m, 6)].state_dict())
            diloco.load_state_dict(old.state_dict() | ({"mean_residuals": [None] * 3} if m == 7 else {}))
        held = residuals(before)
        after.run(4, quadratic())
        notes = {e.note for e in after.events if isinstance(e, RoundCommitted) and e.fragment == 0}
        if after is seven:
            assert notes == {""}
            for mine, theirs in zip(residuals(after), held, strict=False):
                assert mine is not None
                assert theirs is not None
                assert torch.equal(mine[1], theirs[1])
        else:
            assert notes == {"the residual of the mean of 512 of 2560 values is lost with its owner"}
    assert all(each is not None for each in residuals(again))
    assert agree(again)


def test_a_state_without_what_means_lost_is_told_of() -> None:
    first, second = encoded(), encoded()
    first.run(6, quadratic())
    for old, new in zip(first.replicas, second.replicas, strict=True):
        state = old.state_dict()
        del state["mean_residuals"]
        new.load_state_dict(state)
    assert [getattr(event, "text", "") for event in second.events] == [
        "The saved state has no residuals of encoded means. Their error feedback restarts at zero."
    ] * 4


def test_who_takes_over_the_state_of_others_forgets_what_it_held() -> None:
    swarm = encoded()
    swarm.run(13, quadratic())
    for diloco in swarm.replicas:
        diloco.drain()
    assert all(each is not None for each in residuals(swarm))
    swarm.replicas[0].take_over([1])
    swarm.replicas[1].begin_from_global()
    assert [each is None for each in residuals(swarm)] == [True, True, False, False]
