"""Replicas whose `DiLoCo`s were given different arguments refuse each other; those that take more steps are told."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn

from diloco import AlphaMerge, DiLoCo, Nesterov, SyncSchedule
from diloco.errors import ConfigurationError, RendezvousError, ReplicaLostError
from diloco.protocol import Rules
from diloco.transport import InProcessTransport, Place, Transport, connect
from tests.transport.wires import QUICK, Wires, at_once


def made(transport: Transport, width: int = 2, **arguments: Any) -> DiLoCo:
    model = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1))
    for parameter in model.parameters():  # not random, as replicas in threads share torch's generator
        parameter.data.fill_(0.5)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"schedule": SyncSchedule(inner_steps=2), "on_event": lambda event: None, **arguments}
    return DiLoCo(model, inner, transport=transport, **given)


def train(diloco: DiLoCo, steps: int) -> DiLoCo:
    for _ in range(steps):
        for parameter in diloco.model.parameters():
            parameter.data.sub_(0.1)
        diloco.step()
    return diloco


DIFFERENT = [
    ({"schedule": SyncSchedule(inner_steps=3)}, "schedule = H 2, .* schedule = H 3, "),
    ({"codec": "fp4"}, r"codec = float32 .* codec = fp4 \(block_size 256\)"),
    ({"width": 3}, r"fragment 0 = 0.weight \(2, 2\).* fragment 0 = 0.weight \(3, 2\)"),
    ({"outer_optimizer": Nesterov(learning_rate=0.5)}, r".*learning_rate=0\.7.*learning_rate=0\.5"),
    ({"merge": AlphaMerge(0.25)}, r"merge = AlphaMerge\(alpha=0\.0\).*merge = AlphaMerge\(alpha=0\.25\)"),
    ({"isotropic": True}, r"isotropic = False .* isotropic = True"),
    ({"max_norm": 1.0}, r"max norm = None .* max norm = 1\.0"),
    ({"error_feedback": True}, r"error feedback = False .*error feedback = True"),
]


@pytest.mark.parametrize("different", DIFFERENT, ids=lambda each: next(iter(each[0])))
def test_other_arguments_are_refused_in_process(different: tuple[dict[str, Any], str]) -> None:
    arguments, words = different
    hub = InProcessTransport(2)
    first = made(hub.endpoint(0))
    with pytest.raises(ConfigurationError, match=f"replica 0 has {words}"):
        made(hub.endpoint(1), **arguments)
    with pytest.raises(ConfigurationError, match=f"replica 0 has {words}"):
        train(first, 2)
    made(hub.endpoint(1))
    train(first, 1)


def test_ranks_of_one_replica_are_compared_as_well(wires: Wires) -> None:
    ways = wires.meet(2, ranks_per_replica=2)
    found = at_once([lambda rank=rank: made(ways[rank], codec="int8" if rank == 3 else "fp4") for rank in range(4)])
    for each in found:
        assert isinstance(each, ConfigurationError), found
        assert "replica 1" in str(each)
        assert "codec = int8" in str(each)


def test_who_is_waited_for_is_named_when_the_time_is_over(wires: Wires) -> None:
    ways = wires.meet(2, round_timeout_s=2.0, silence_s=2.0)
    with pytest.raises(RendezvousError, match=r"has waited 2 s for replica 1, which is connected but not ready"):
        ways[0].agree({"codec": "fp4"})


def test_a_joiner_with_other_arguments_is_refused_and_the_others_train_on(wires: Wires) -> None:
    ways = wires.meet(2, continue_without_lost=True, late_s=10.0)
    members = at_once([lambda m=m: made(ways[m]) for m in range(2)])
    ways[1].leave()
    ways[1].close()
    train(members[0], 2)
    place = Place(replica=1, num_replicas=2, rendezvous=ways[0].address)
    stranger = connect(place, Rules(**(QUICK | {"continue_without_lost": True})))
    with (
        closing(stranger.transport),
        pytest.raises(ConfigurationError, match=r"replica 0 .* has schedule = H 2, .* replica 1 .*H 3"),
    ):
        made(stranger.transport, schedule=SyncSchedule(inner_steps=3))
    train(members[0], 2)
    assert ways[0].failure is None


@pytest.mark.parametrize("survive", [False, True], ids=["stop", "continue"])
def test_who_takes_more_steps_is_told_at_once_who_left_and_when(wires: Wires, *, survive: bool) -> None:
    """Formerly each waited without a message until a round had timed out, and again for the next round."""
    ways = wires.meet(2, continue_without_lost=survive, round_timeout_s=1e6)

    def replica(number: int, steps: int) -> DiLoCo:
        with closing(ways[number]):
            with made(ways[number]) as diloco:
                train(diloco, steps)
            ways[number].finish()
            return diloco

    found = at_once([lambda: replica(0, 8), lambda: replica(1, 5)])
    assert found[1].rounds_committed == 2, found
    if survive:
        assert found[0].rounds_committed == 4
    else:
        assert isinstance(found[0], ReplicaLostError), found
        assert "replica 1 left after step 5" in str(found[0])
