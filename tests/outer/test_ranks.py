"""Ranks that shard the parameters of a replica decide together what one of them alone can see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from diloco import DiLoCo, SyncSchedule
from diloco.algorithm import Contribution, RoundId, local_shard
from diloco.errors import DivergedError, NonFiniteError, TransportError
from diloco.events import Note, RoundVoid
from diloco.membership import View
from diloco.protocol import Average
from diloco.transport import Fetching, Pending, Transport
from tests.processes import Processes


def start(rank: int, store: Path) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(4, 4, bias=False)
    fully_shard(model)
    return model


def not_finite_on_rank_1(rank: int, store: Path) -> tuple[str, int]:
    model = start(rank, store)
    diloco = DiLoCo(model, torch.optim.SGD(model.parameters()), schedule=SyncSchedule(inner_steps=1))
    with torch.no_grad():
        if rank == 1:
            local_shard(model.weight).fill_(torch.nan)  # type: ignore[arg-type]  # a parameter
    with pytest.raises(NonFiniteError) as raised:
        diloco.step()
    dist.destroy_process_group()
    return str(raised.value), len(diloco.in_flight)


def test_a_shard_that_is_not_finite_stops_all_ranks_before_they_send(tmp_path: Path) -> None:
    """Else one rank would wait for others of its replica that have ended, and other replicas get half of the work."""
    with Processes() as processes:
        processes.start(2, not_finite_on_rank_1, tmp_path / "store")
        (other, other_flights), (own, own_flights) = processes.results(timeout_s=120).values()
    assert "the local values of no parameter of this rank contain NaN or infinity. Nothing was sent" in other
    assert "the local values of weight contain NaN or infinity. Nothing was sent" in own
    assert (other_flights, own_flights) == (0, 0)


class Arriving:
    """A fetch whose state arrives when ``donor`` says so."""

    def __init__(self, donor: Donor, fragment: int) -> None:
        self.donor, self.fragment = donor, fragment

    def done(self) -> bool:
        return self.donor.answers

    def result(self, timeout: float | None = None) -> Mapping[str, Any]:
        if self.donor.failure:
            raise TransportError(self.donor.failure)
        return self.donor.state


class Donor(Transport):
    """A transport of a joiner whose first round shows that it lacks the others' state."""

    def __init__(self) -> None:
        self.replica, self.view = 1, View(1, (0, 1))
        self.answers, self.failure = False, ""
        self.state: Mapping[str, Any] = {}
        self.held = ""

    def average(self, contribution: Contribution) -> Pending:
        self.round = contribution
        return self  # type: ignore[return-value]  # it is also the round in flight

    def wait(self, timeout_s: float | None = None) -> Average:
        contribution, missed = self.round, self.round.digest != self.held
        return Average(
            round=RoundId(0, contribution.round.outer_step),
            values=torch.zeros(contribution.numel),
            view=self.view,
            contributors=(0, 1),
            weight=2.0,
            sent_bytes=0,
            received_bytes=0,
            wait_s=0.0,
            donor=0 if missed else None,
            held=self.held,
        )

    def publish(self, source: Any, version: Any = None) -> None:
        pass

    def fetch(self, fragment: int, donors: Sequence[int], expected_bytes: int | None = None) -> Mapping[str, Any]:
        raise NotImplementedError

    def fetch_in_background(self, fragment: int, donors: Sequence[int], expected_bytes: int | None = None) -> Fetching:
        return Arriving(self, fragment)


def late_joiner(rank: int, store: Path, failure: str) -> tuple[list[bool], list[str]]:
    """Return for each step whether the rank has adopted the state; that of rank 1 arrives after step 2, else 5."""
    model, donor, notes = start(rank, store), Donor(), []
    diloco = DiLoCo(
        model,
        torch.optim.SGD(model.parameters()),
        transport=donor,
        schedule=SyncSchedule(inner_steps=2),
        on_event=lambda event: notes.append(event.text) if isinstance(event, Note) else None,
        compare_arguments=False,
    )
    (fragment,) = diloco.fragments
    snapshot = fragment.state.snapshot()
    donor.state = {**snapshot, "global_params": snapshot["global_params"] + 1.0, "finished_rounds": 1}
    donor.held = fragment.state.digest_of(donor.state)
    adopted = []
    for step in range(1, 9):  # sends at 2, 4, 6 and 8
        diloco.step()
        adopted.append(torch.equal(fragment.global_params, donor.state["global_params"]))
        if step == (2 if rank else 5):
            donor.answers = True
            donor.failure = "gone." if rank and failure else ""
    dist.destroy_process_group()
    return adopted, notes


@pytest.mark.parametrize("failure", ["", "gone"])
def test_the_ranks_of_a_late_joiner_adopt_in_the_same_step(tmp_path: Path, failure: str) -> None:
    with Processes() as processes:
        processes.start(2, late_joiner, tmp_path / "store", failure)
        (first, first_notes), (second, second_notes) = processes.results(timeout_s=120).values()
    assert first == second
    if failure:
        assert not any(first)
        assert any("could not fetch its part" in note for note in first_notes)
        assert any("gone." in note for note in second_notes)
    else:
        assert first == [False] * 5 + [True] * 3
        assert first_notes == second_notes == []


class Majority(Donor):
    """A transport whose other replicas agree, and differ from rank 0 of this replica in its first round."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.answers = rank, True

    def wait(self, timeout_s: float | None = None) -> Average:
        if self.rank == 0 and self.round.digest != self.held:
            raise DivergedError("replica 1 differs.", donor=0, digest=self.held, replicas=[1])
        return replace(super().wait(), donor=None)


def diverged_on_rank_0(rank: int, store: Path, answer: str) -> dict[str, Any]:
    model, transport, events = start(rank, store), Majority(rank), []
    diloco = DiLoCo(
        model,
        torch.optim.SGD(model.parameters()),
        transport=transport,
        schedule=SyncSchedule(inner_steps=1),
        on_event=events.append,
        compare_arguments=False,
    )
    (fragment,) = diloco.fragments
    state = {**fragment.state.snapshot(), "finished_rounds": 1}
    state["global_params"] = state["global_params"] + 1.0
    transport.held = fragment.state.digest_of(state)
    transport.state = {**state, "global_params": state["global_params"] + 1.0} if answer == "lie" else state
    diloco.step()
    kept = fragment.state_dict()
    moved = torch.equal(fragment.global_params, state["global_params"])
    dist.destroy_process_group()
    counts = {name: kept[name] for name in ("committed", "void", "trained", "submitted", "finished_rounds")}
    return {"moved": moved, "counts": counts, "reason": next(e.reason for e in events if isinstance(e, RoundVoid))}


@pytest.mark.parametrize("answer", ["state", "lie"])
def test_a_round_in_which_one_shard_has_diverged_is_void_for_all_ranks(tmp_path: Path, answer: str) -> None:
    """Invariant 10: they keep the same counts and weights, of which a checkpoint has those of one rank."""
    with Processes() as processes:
        processes.start(2, diverged_on_rank_0, tmp_path / "store", answer)
        first, second = processes.results(timeout_s=120).values()
    assert first["counts"] == second["counts"]
    assert (first["counts"]["void"], first["counts"]["committed"]) == (1, 0)
    assert (first["moved"], second["moved"]) == (answer == "state", False)
    assert ("majority's state" if answer == "state" else "differs from the one") in first["reason"]
    assert second["reason"].startswith("The round is void for another rank of this replica.")
