"""The transport of a replica whose ranks all hold the whole model, over the one transport of its position 0.

Position 0 communicates with the other replicas and broadcasts the results to its ranks. So every rank applies the same
average, or none, at the same step (invariant 10), and each value crosses the link between replicas once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from diloco import errors
from diloco.algorithm import Contribution, RoundId
from diloco.errors import ConfigurationError, DiLoCoError, ReplicaLostError
from diloco.membership import View
from diloco.protocol import Average
from diloco.state_tree import flatten, unflatten
from diloco.transport.base import Pending, SnapshotSource, Transport
from diloco.transport.replica_group import ReplicaGroup


class LeaderTransport(Transport):
    """The transport of one rank of a replica, which uses the transport of the replica's position 0.

    All ranks must call `agree`, `average`, `Pending.wait`, `fetch` and `shared` in the same order. An error on position
    0 is raised on every rank, with the same class and message.

    Args:
        group: the ranks of the replica.
        transport: position 0's transport to the other replicas; None on the other ranks.

    Raises:
        ConfigurationError: if position 0 has no transport, or another rank has one.
    """

    shared_by_ranks = True

    def __init__(self, group: ReplicaGroup, transport: Transport | None) -> None:
        wrong = group.leads == (transport is None)
        if group.any(wrong):
            raise ConfigurationError(
                f"Position 0 of a replica needs a transport to the other replicas, and its other ranks must have none. "
                f"Position {group.position} was given {'none' if transport is None else 'one'}"
                f"{'' if wrong else ', which is right, but another rank breaks this rule'}."
            )
        self.group = group
        self.transport = transport
        self.replica = int(self.shared(lambda leader: leader.replica))

    def average(self, contribution: Contribution) -> Pending:
        kept: list[Pending] = []
        self.shared(lambda leader: kept.append(leader.average(contribution)))
        return _LeaderPending(self, contribution.round, kept[0] if kept else None)

    def agree(self, facts: Mapping[str, str]) -> None:
        self.shared(lambda leader: leader.agree(facts))

    def publish(self, source: SnapshotSource, version: Callable[[int], object] | None = None) -> None:
        if self.transport is not None:
            self.transport.publish(source, version)

    def fetch(self, fragment: int, donors: Sequence[int], expected_bytes: int | None = None) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self.shared_tree(lambda leader: dict(leader.fetch(fragment, donors, expected_bytes)))
        return state

    def tick(self) -> None:
        if self.transport is not None:
            self.transport.tick()

    def shared(self, ask: Callable[[Transport], Any]) -> Any:
        """Call ``ask`` on position 0's transport, and return its result or raise its error on every rank.

        JSON must be able to represent the result. The view and traffic of every rank become those of position 0.
        """
        outcome: dict[str, Any] = {}
        raised: Exception | None = None
        if self.transport is not None:
            try:
                outcome["value"] = ask(self.transport)
            except DiLoCoError as error:
                raised, outcome["error"] = error, _described(error)
            except Exception as error:  # a bug, but the other ranks must not wait forever
                raised = error
                outcome["error"] = _described(
                    ReplicaLostError(
                        f"Position 0 of replica {self.group.replica}, which communicates with the other replicas, has "
                        f"failed: {error!r}. This rank can't continue without it.",
                        replicas=[self.group.replica],
                    )
                )
            outcome["view"] = [self.transport.view.id, *self.transport.view.members]
            outcome["traffic"] = [self.transport.sent_bytes, self.transport.received_bytes]
        outcome = self.group.share(outcome)
        view_id, *members = outcome["view"]
        self.view = View(view_id, tuple(members))
        self.sent_bytes, self.received_bytes = outcome["traffic"]
        if "error" in outcome:
            try:
                raise raised or _rebuilt(outcome["error"])
            finally:
                del raised  # the error refers to this frame, which keeps the caller's round alive
        return outcome["value"]

    def shared_tree(self, ask: Callable[[Transport], Any]) -> Any:
        """Do as `shared` for results that `diloco.state_tree` can represent; tensors keep their device type."""
        tensors: dict[str, Tensor] = {}

        def asked(leader: Transport) -> list[Any]:
            skeleton, found = flatten(ask(leader))
            tensors.update({name: tensor.contiguous() for name, tensor in found.items()})
            return [skeleton, {name: [str(t.dtype), list(t.shape), t.device.type] for name, t in tensors.items()}]

        skeleton, outlines = self.shared(asked)
        for name, (dtype, shape, device) in outlines.items():
            if name not in tensors:
                tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
            self.group.share_(tensors[name])
        return unflatten(skeleton, tensors)


class _LeaderPending:
    """The result of a round in flight, which this rank gets through position 0."""

    def __init__(self, transport: LeaderTransport, round_id: RoundId, pending: Pending | None) -> None:
        self._transport = transport
        self._round = round_id
        self._pending = pending

    def wait(self, timeout_s: float | None = None) -> Average:
        def taken(_: Transport) -> dict[str, Any]:
            assert self._pending is not None, "position 0 has the pending average"
            average = self._pending.wait(timeout_s)
            return vars(average) | {"round": None, "view": (average.view.id, average.view.members)}

        fields = self._transport.shared_tree(taken)
        return Average(**fields | {"round": self._round, "view": View(*fields["view"])})


def _described(error: DiLoCoError) -> dict[str, Any]:
    """Return an error as JSON."""
    fields = {name: value for name, value in vars(error).items() if name in ("round", "replicas", "donor", "digest")}
    return {"class": type(error).__name__, "message": str(error), "fields": fields}


def _rebuilt(described: Mapping[str, Any]) -> DiLoCoError:
    """Return the error from the JSON that `_described` returned."""
    kind: type[DiLoCoError] = getattr(errors, described["class"])
    return kind(described["message"], **described["fields"])
