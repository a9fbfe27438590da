"""Ranks that shard the parameters of a replica decide together what one of them alone can see."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from diloco import DiLoCo, SyncSchedule
from diloco.algorithm import Contribution, local_shard
from diloco.errors import DivergedError, NonFiniteError, TransportError
from diloco.events import Event, Note, RoundVoid
from diloco.membership import View
from diloco.protocol import Average
from diloco.transport import Pending, Transport
from tests.processes import Processes


class Others(Transport):
    """The other replicas, which hold ``state``; a round in which this rank holds another one ends with ``outcome``."""

    def __init__(self, outcome: Literal["missed", "diverged", "committed"], *, answer: bool = True) -> None:
        self.replica, self.view, self.outcome = 1, View(1, (0, 1)), outcome
        self.answers, self.gone, self.held = answer, "", ""
        self.state: Mapping[str, Any] = {}

    def average(self, contribution: Contribution) -> Pending:
        self.round = contribution
        return Pending(self.wait)

    def wait(self) -> Average:
        differs = self.round.digest != self.held
        if differs and self.outcome == "diverged":
            raise DivergedError("replica 1 differs.", donor=0, digest=self.held, replicas=[1])
        about: dict[str, Any] = {"view": self.view, "contributors": (0, 1), "weight": 2.0, "held": self.held}
        donor, values = 0 if differs and self.outcome == "missed" else None, torch.zeros(self.round.numel)
        return Average(round=self.round.round, values=values, donor=donor, sent_bytes=0, received_bytes=0, **about)

    def publish(self, source: Any, version: Any = None) -> None:
        pass

    def fetch(self, fragment: int, donors: Sequence[int], expected_bytes: int | None = None) -> Any:
        return self  # it is also the fetch

    def done(self) -> bool:
        return self.answers

    def result(self, timeout: float | None = None) -> Mapping[str, Any]:
        if self.gone:
            raise TransportError(self.gone)
        return self.state


def replica(others: Others | None = None, inner_steps: int = 1) -> tuple[DiLoCo, list[Event]]:
    """Return this rank of a replica of two, whose ``others`` hold global parameters that are larger by 1."""
    torch.manual_seed(0)
    model, events = nn.Linear(4, 4, bias=False), list[Event]()
    fully_shard(model)
    diloco = DiLoCo(
        model,
        torch.optim.SGD(model.parameters()),
        transport=others,
        schedule=SyncSchedule(inner_steps=inner_steps),
        on_event=events.append,
        compare_arguments=False,
    )
    if others is not None:
        state = {**diloco.fragments[0].state.snapshot(), "finished_rounds": 1}
        others.state = state | {"global_params": state["global_params"] + 1.0}
        others.held = diloco.fragments[0].state.digest_of(others.state)
    return diloco, events


def rank_of_two(rank: int, store: Path, scenario: Callable[..., Any], *arguments: Any) -> Any:
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    result = scenario(rank, *arguments)
    dist.destroy_process_group()
    return result


def on_both(folder: Path, scenario: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what ``scenario(rank, *arguments)`` returns on both ranks."""
    with Processes() as processes:
        processes.start(2, rank_of_two, folder / "store", scenario, *arguments)
        return list(processes.results(timeout_s=120).values())


def not_finite_on_rank_1(rank: int) -> tuple[str, int]:
    diloco, _ = replica()
    with torch.no_grad():
        if rank == 1:
            local_shard(diloco.model.weight).fill_(torch.nan)  # type: ignore[arg-type]  # a parameter
    with pytest.raises(NonFiniteError) as raised:
        diloco.step()
    return str(raised.value), len(diloco.in_flight)


def test_a_shard_that_is_not_finite_stops_all_ranks_before_they_send(tmp_path: Path) -> None:
    """Else one rank would wait for others of its replica that have ended, and other replicas get half of the work."""
    (other, other_flights), (own, own_flights) = on_both(tmp_path, not_finite_on_rank_1)
    assert "the local values of no parameter of this rank contain NaN or infinity. Nothing was sent" in other
    assert "the local values of weight contain NaN or infinity. Nothing was sent" in own
    assert (other_flights, own_flights) == (0, 0)


def late_joiner(rank: int, failure: str) -> tuple[list[bool], list[str]]:
    """Return for each step whether the rank has adopted the state; that of rank 1 arrives after step 2, else 5."""
    others = Others("missed", answer=False)
    diloco, events = replica(others, inner_steps=2)
    adopted = []
    for step in range(1, 9):  # sends at 2, 4, 6 and 8
        diloco.step()
        adopted.append(torch.equal(diloco.fragments[0].global_params, others.state["global_params"]))
        if step == (2 if rank else 5):
            others.answers, others.gone = True, "gone." if rank and failure else ""
    return adopted, [event.text for event in events if isinstance(event, Note)]


@pytest.mark.parametrize("failure", ["", "gone"])
def test_the_ranks_of_a_late_joiner_adopt_in_the_same_step(tmp_path: Path, failure: str) -> None:
    (first, first_notes), (second, second_notes) = on_both(tmp_path, late_joiner, failure)
    assert first == second == ([False] * 8 if failure else [False] * 5 + [True] * 3)
    assert any("could not fetch its part" in note for note in first_notes) == bool(failure)
    assert any("gone." in note for note in second_notes) == bool(failure)


def diverged_on_rank_0(rank: int, lies: bool) -> dict[str, Any]:
    others = Others("committed" if rank else "diverged")
    diloco, events = replica(others)
    globals_of_others = others.state["global_params"]
    if lies:
        others.state = {**others.state, "global_params": globals_of_others + 1.0}
    diloco.step()
    kept = diloco.fragments[0].state_dict()
    return {
        "moved": torch.equal(kept["global_params"], globals_of_others),
        "counts": {n: kept[n] for n in ("committed", "void", "trained", "submitted", "finished_rounds")},
        "reason": next(event.reason for event in events if isinstance(event, RoundVoid)),
    }


@pytest.mark.parametrize("lies", [False, True])
def test_a_round_in_which_one_shard_has_diverged_is_void_for_all_ranks(tmp_path: Path, lies: bool) -> None:
    """Invariant 10: they keep the same counts and weights, of which a checkpoint has those of one rank."""
    first, second = on_both(tmp_path, diverged_on_rank_0, lies)
    assert first["counts"] == second["counts"]
    assert (first["counts"]["void"], first["counts"]["committed"]) == (1, 0)
    assert (first["moved"], second["moved"]) == (not lies, False)
    assert ("differs from the one" if lies else "majority's state") in first["reason"]
    assert second["reason"].startswith("it is void for another rank of this replica. ")
