"""Void rounds, excluded and diverged replicas: no work is lost and all replicas agree again."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from diloco.algorithm import (
    AlphaMerge,
    MergeRule,
    RebaseMerge,
    RoundId,
    make_codec,
)
from diloco.errors import NonFiniteError
from diloco.events import RoundCommitted, RoundVoid
from diloco.outer import DiLoCo
from tests.faults import Fault, FaultKind
from tests.replicas import agree, apart, quadratic, streaming


@pytest.mark.parametrize("kind", ["drop", "truncate", "non-finite"])
@pytest.mark.parametrize(("codec", "error_feedback"), [("float32", False), ("fp4", False), ("fp4", True)])
def test_a_void_round_moves_nothing_and_loses_nothing(kind: FaultKind, codec: str, error_feedback: bool) -> None:
    """Invariant 2: no replica steps, and the next round of the fragment commits with the work of both rounds."""
    fault = Fault(kind=kind, replica=1, round=RoundId(0, 1))
    swarm = streaming(faults=[fault], codec=codec, error_feedback=error_feedback)
    swarm.run(9, quadratic())
    first = swarm.replicas[0].fragments[0]
    held = {name: swarm.replicas[0].named_global_params()[name].clone() for name in first.names}
    swarm.run(1, quadratic())  # round (0, 1) was sent at 8 and would merge at 10
    after = swarm.replicas[0].named_global_params()
    assert all(torch.equal(after[name], held[name]) for name in first.names)
    assert [event.replica for event in swarm.events if isinstance(event, RoundVoid)] == [0, 1, 2]
    swarm.run(10, quadratic())
    assert agree(swarm)
    moved = swarm.replicas[0].named_global_params()
    assert not any(torch.equal(moved[name], held[name]) for name in first.names)
    assert all(diloco.rounds_void == 1 for diloco in swarm.replicas)


@pytest.mark.parametrize("merge", [AlphaMerge(0.0), RebaseMerge()])
def test_a_replica_left_out_of_the_mean_keeps_its_work(merge: MergeRule) -> None:
    """Its local parameters follow the global ones, and its next pseudo-gradient contains all its work."""
    fault = Fault(kind="drop", replica=2, round=RoundId(0, 0))
    swarm = streaming(faults=[fault], least=2, merge=merge, codec="float32")
    swarm.run(5, quadratic())
    fragment = swarm.replicas[2].fragments[0]
    before, _, _ = fragment.pseudo_gradient()
    local = swarm.models[2]
    held = [p.detach().clone() for p in local.parameters()]
    for diloco in swarm.replicas:
        diloco.begin()
    for diloco in swarm.replicas:
        diloco.finish()
    assert agree(swarm)
    after, _, _ = fragment.pseudo_gradient()
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(p, q) for p, q in zip(local.parameters(), held, strict=True))
    assert [e.contributors for e in swarm.events if isinstance(e, RoundCommitted)] == [(0, 1)] * 3


def test_who_misses_a_commit_is_found_out_and_takes_over_the_majoritys_state() -> None:
    fault = Fault(kind="miss-commit", replica=1, round=RoundId(0, 0))
    swarm = streaming(faults=[fault])
    swarm.run(7, quadratic())
    assert not agree(swarm)
    swarm.run(3, quadratic())  # the fragment's next exchange: sent at 8, due at 10
    assert agree(swarm)
    reasons = [event.reason for event in swarm.events if isinstance(event, RoundVoid)]
    assert len(reasons) == 1 + 3
    assert "adopted the majority's state" in " ".join(reasons)
    swarm.run(20, quadratic())
    assert agree(swarm)
    assert [diloco.rounds_void for diloco in swarm.replicas] == [1, 2, 1]


@pytest.mark.parametrize("all_lie", [False, True])
def test_a_donors_state_is_taken_over_only_if_it_is_what_the_majority_holds(
    all_lie: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replica 0 sends a wrong state, so replica 2 is asked; no state is adopted if both send a wrong one."""
    swarm = streaming(faults=[Fault(kind="miss-commit", replica=1, round=RoundId(0, 0))])
    endpoint = swarm.replicas[1].transport
    fetch = endpoint.fetch

    def tampered_fetch(fragment: int, donors: Sequence[int], expected_bytes: int | None = None) -> Any:
        fetching = fetch(fragment, donors, expected_bytes)
        if donors[0] == 0 or all_lie:
            fetching.result()["global_params"].add_(1)
        return fetching

    monkeypatch.setattr(endpoint, "fetch", tampered_fetch)
    swarm.run(10, quadratic())
    assert agree(swarm) == (not all_lie)
    reasons = " ".join(event.reason for event in swarm.events if isinstance(event, RoundVoid))
    assert ("the received state differs from the one that the other replicas hold" in reasons) == all_lie


def test_a_corrupted_replica_is_found_before_its_first_average() -> None:
    """A single changed value in the global parameters of one replica is detected in round 0."""
    swarm = streaming()
    swarm.replicas[2].fragments[1].global_params[0] += 1e-6
    swarm.run(8, quadratic())
    reasons = {event.reason for event in swarm.events if isinstance(event, RoundVoid)}
    assert any("replica 2 differ from those of replica 0" in reason for reason in reasons)
    assert agree(swarm)


def test_a_replica_that_is_not_finite_sends_nothing_and_names_the_parameter() -> None:
    swarm = streaming()
    swarm.run(3, quadratic())
    with torch.no_grad():
        swarm.models[0].third[0] = float("nan")  # type: ignore[union-attr, index]  # a parameter
    fragment = next(f.index for f in swarm.replicas[0].fragments if "third" in f.names)
    with pytest.raises(NonFiniteError, match="local values of third contain NaN"):
        swarm.replicas[0].fragments[fragment].pseudo_gradient()


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


def residuals(diloco: DiLoCo) -> list[torch.Tensor]:
    """Return the error-feedback residual of each fragment."""
    return [fragment.residual.clone() for fragment in diloco.fragments if fragment.residual is not None]


@pytest.mark.parametrize("least", [None, 2])
def test_what_the_codec_lost_is_kept_only_of_work_that_a_mean_took(least: int | None) -> None:
    """If the round is void or excludes replica 2, the next pseudo-gradient contains that work and its residual."""
    fault = Fault(kind="drop", replica=2, round=RoundId(0, 1))
    swarm = streaming(faults=[fault], least=least, codec="int8", error_feedback=True)
    swarm.run(9, quadratic())  # round (0, 1) was sent at 8 and is merged at 10
    before = [residuals(diloco)[0] for diloco in swarm.replicas]
    assert all(bool(residual.any()) for residual in before)
    swarm.run(1, quadratic())
    after = [residuals(diloco)[0] for diloco in swarm.replicas]
    kept = [torch.equal(old, new) for old, new in zip(before, after, strict=True)]
    assert kept == ([False, False, True] if least else [True, True, True])
    swarm.run(4, quadratic())
    assert not any(torch.equal(old, residuals(diloco)[0]) for old, diloco in zip(after, swarm.replicas, strict=True))


def test_a_void_round_counts_as_finished() -> None:
    """The count is part of the state that others fetch and of checkpoints."""
    swarm = streaming(faults=[Fault(kind="drop", replica=1, round=RoundId(0, 1))])
    found, saved = [], []
    for steps in (6, 4, 4):
        swarm.run(steps, quadratic())
        fetched = swarm.transport.endpoint(1).fetch(0, [0]).result()
        found.append((fetched["finished_rounds"], fetched["outer_step"]))
        saved.append(swarm.replicas[0].state_dict()["fragments"][0]["finished_rounds"])
    assert found == [(1, 1), (2, 1), (3, 2)]
    assert saved == [1, 2, 3]
    again = streaming()
    again.replicas[0].load_state_dict(swarm.replicas[0].state_dict())
    assert again.transport.endpoint(1).fetch(0, [0]).result()["finished_rounds"] == 3
