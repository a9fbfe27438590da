"""Void rounds, excluded and diverged replicas: no work is lost and all replicas agree again."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco.algorithm import AlphaMerge, Contribution, MergeRule, RebaseMerge, RoundId, SyncSchedule
from diloco.errors import TransportError
from diloco.events import RoundCommitted, RoundVoid
from diloco.outer import DiLoCo
from diloco.transport import InProcessTransport, Pending, Transport
from tests.faults import Fault, FaultKind
from tests.replicas import Swarm, agree, quadratic, streaming


def reasons(swarm: Swarm) -> list[str]:
    """Return why rounds were void, once for each replica."""
    return [event.reason for event in swarm.events if isinstance(event, RoundVoid)]


def residuals(swarm: Swarm) -> list[Tensor]:
    """Return the error-feedback residual of fragment 0 of each replica."""
    held = [diloco.fragments[0].residual for diloco in swarm.replicas]
    return [residual.clone() for residual in held if residual is not None]


@pytest.mark.parametrize(
    ("kind", "codec"), [("drop", "int8"), ("truncate", "fp4"), ("non-finite", "fp4"), ("non-finite", "int8")]
)
@pytest.mark.parametrize("least", [None, 2])
@pytest.mark.parametrize("merge", [AlphaMerge(0.0), RebaseMerge()])
def test_work_that_no_mean_took_and_what_the_codec_lost_of_it_are_sent_with_the_next_round(
    kind: FaultKind, codec: str, least: int | None, merge: MergeRule
) -> None:
    """Invariant 2: no replica steps in a void round, which counts as finished; without replica 2, its work stays."""
    fault = Fault(kind=kind, replica=2, round=RoundId(0, 1))
    swarm = streaming(faults=[fault], least=least, codec=codec, merge=merge, error_feedback=True)
    swarm.run(9, quadratic())  # round (0, 1) was sent at 8 and is merged at 10
    first, third = swarm.replicas[0].fragments[0], swarm.replicas[2].fragments[0]
    (work, _, _), held, before = third.pseudo_gradient(), first.global_params.clone(), residuals(swarm)
    for diloco in swarm.replicas:
        diloco.begin()
    for diloco in swarm.replicas:
        diloco.finish()
    fetched, after = swarm.transport.endpoint(1).fetch(0, [0]).result(), residuals(swarm)
    assert (fetched["finished_rounds"], fetched["outer_step"]) == (2, 2 if least else 1)
    assert torch.equal(first.global_params, held) == (least is None)
    torch.testing.assert_close(third.pseudo_gradient()[0], work, rtol=1e-5, atol=1e-6)
    kept = [torch.equal(old, new) for old, new in zip(before, after, strict=True)]
    assert kept == ([False, False, True] if least else [True, True, True])
    committed = [event for event in swarm.events if isinstance(event, RoundCommitted)]
    who = {event.contributors for event in committed if (event.fragment, event.outer_step) == (0, 1)}
    assert who == ({(0, 1)} if least else set())
    swarm.run(10, quadratic())
    assert agree(swarm)
    assert not torch.equal(first.global_params, held)
    assert not any(torch.equal(old, new) for old, new in zip(after, residuals(swarm), strict=True))
    assert [diloco.rounds_void for diloco in swarm.replicas] == ([0] * 3 if least else [1] * 3)


@pytest.mark.parametrize("damaged", [(), (0,), (0, 2)])
def test_who_misses_a_commit_takes_over_the_state_that_the_majority_holds(
    damaged: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a donor sends a wrong state, another is asked; no state is adopted if all send a wrong one."""
    swarm = streaming(faults=[Fault(kind="miss-commit", replica=1, round=RoundId(0, 0))])
    endpoint = swarm.replicas[1].transport
    fetch = endpoint.fetch

    def tampered_fetch(fragment: int, donors: Sequence[int], expected_bytes: int | None = None) -> Any:
        fetching = fetch(fragment, donors, expected_bytes)
        if donors[0] in damaged:
            fetching.result()["global_params"].add_(1)
        return fetching

    monkeypatch.setattr(endpoint, "fetch", tampered_fetch)
    swarm.run(7, quadratic())
    assert not agree(swarm)
    swarm.run(3, quadratic())  # the fragment's next exchange: sent at 8, due at 10
    assert [diloco.rounds_void for diloco in swarm.replicas] == [1, 2, 1]
    refused = "the received state differs from the one that the other replicas hold"
    assert (refused if len(damaged) == 2 else "adopted the majority's state") in " ".join(reasons(swarm))
    swarm.run(20, quadratic())
    assert agree(swarm) == (len(damaged) < 2)


def test_a_corrupted_replica_is_found_before_its_first_average() -> None:
    """A single changed value in the global parameters of one replica is detected in round 0."""
    swarm = streaming()
    swarm.replicas[2].fragments[1].global_params[0] += 1e-6
    swarm.run(8, quadratic())
    assert "replica 2 differ from those of replica 0" in " ".join(reasons(swarm))
    assert agree(swarm)


class Foreign(Transport):
    """A transport of one's own, which fails in a way that this package does not know."""

    def __init__(self, pending: object) -> None:
        alone = InProcessTransport(1).endpoint(0)
        self.replica, self.view, self.pending = alone.replica, alone.view, pending
        self.publish = alone.publish  # type: ignore[method-assign]  # that of another

    def average(self, contribution: Contribution) -> Pending:
        return self.pending() if callable(self.pending) else self.pending  # type: ignore[return-value]  # on purpose

    def publish(self, *_: Any) -> None: ...

    def fetch(self, *_: Any) -> Any: ...


def fail() -> Any:
    raise OSError("the cable is cut")


@pytest.mark.parametrize(
    ("pending", "words"),
    [
        (fail, "average of the transport .*Foreign raised OSError: the cable is cut"),
        (None, "average of the transport .*Foreign raised TypeError: it returned NoneType, not Pending"),
        (Pending(fail), "Pending.wait of the transport .*Foreign raised OSError: the cable is cut"),
        (Pending(lambda: 3), "Pending.wait of the transport .*Foreign raised TypeError: it returned int, not Average"),  # type: ignore[arg-type, return-value]  # on purpose
    ],
    ids=["average", "no pending", "wait", "no average"],
)
def test_a_transport_that_fails_in_its_own_way_is_named(pending: object, words: str) -> None:
    """Regression: a loop that went on after the error of `Pending.wait` ended in an assertion."""
    model = nn.Linear(2, 1)
    diloco = DiLoCo(
        model, torch.optim.SGD(model.parameters()), transport=Foreign(pending), schedule=SyncSchedule(inner_steps=1)
    )
    with pytest.raises(TransportError, match=words) as raised:
        diloco.step()
    assert raised.value.__cause__ is not None
    again = "waiting for its average has failed, so the fragment can't be sent again" if diloco.in_flight else words
    with pytest.raises(TransportError, match=again):
        diloco.step()
