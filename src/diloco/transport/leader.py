"""A replica whose ranks all hold the whole model: position 0 talks to the other replicas, and tells its ranks.

So every rank applies the same average, or none, at the same step (invariant 10), and each value crosses the link
between replicas once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from diloco import errors
from diloco.algorithm.averaging import Contribution, RoundId
from diloco.errors import ConfigurationError, DiLoCoError, ReplicaLostError
from diloco.membership.view import View
from diloco.protocol.actions import Average
from diloco.state_tree import flatten, unflatten
from diloco.transport.base import Pending, SnapshotSource, Transport
from diloco.transport.replica_group import ReplicaGroup

__all__ = ["LeaderTransport"]


class LeaderTransport(Transport):
    """The transport of one rank of a replica, around that of the replica's position 0.

    `agree`, `average`, `Pending.wait`, `fetch` and `shared` must be called on all ranks in the same order. An error on
    position 0 is raised on every rank, of the same class and with the same words.

    Args:
        transport: position 0's way to the other replicas; None on the other ranks.

    Raises:
        ConfigurationError: if a rank has a transport that should have none, or position 0 has none.
    """

    shared_by_ranks = True

    def __init__(self, group: ReplicaGroup, transport: Transport | None) -> None:
        wrong = group.leads == (transport is None)
        if group.any(wrong):
            raise ConfigurationError(
                f"Position 0 of a replica needs a transport to the other replicas, and its other ranks must have none. "
                f"Here position {group.position} was given {'none' if transport is None else 'one'}"
                f"{'' if wrong else ', as it should be, but another rank was not'}."
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
        """On every rank, what ``ask`` returns on position 0's transport, as JSON can hold it, or the error it raises.

        View and traffic are then position 0's, too.
        """
        told: dict[str, Any] = {}
        raised: Exception | None = None
        if self.transport is not None:
            try:
                told["value"] = ask(self.transport)
            except DiLoCoError as error:
                raised, told["error"] = error, _described(error)
            except Exception as error:  # a defect, but the others must not wait for ever
                raised = error
                told["error"] = _described(
                    ReplicaLostError(
                        f"Position 0 of replica {self.group.replica}, which talks to the other replicas, has failed: "
                        f"{error!r}. This rank can't go on without it.",
                        replicas=[self.group.replica],
                    )
                )
            told["view"] = [self.transport.view.id, *self.transport.view.members]
            told["traffic"] = [self.transport.sent_bytes, self.transport.received_bytes]
        told = self.group.share(told)
        identity, *members = told["view"]
        self.view = View(identity, tuple(members))
        self.sent_bytes, self.received_bytes = told["traffic"]
        if "error" in told:
            try:
                raise raised or _rebuilt(told["error"])
            finally:
                del raised  # which holds this frame, and with it the round of whoever called
        return told["value"]

    def shared_tree(self, ask: Callable[[Transport], Any]) -> Any:
        """As `shared`, for anything that `diloco.state_tree` can hold; tensors stay on the same type of device."""
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
    """An average on its way to position 0, and from there to this rank."""

    def __init__(self, transport: LeaderTransport, round_id: RoundId, pending: Pending | None) -> None:
        self._transport = transport
        self._round = round_id
        self._pending = pending

    def wait(self, timeout_s: float | None = None) -> Average:
        averages: list[Average] = []

        def taken(_: Transport) -> dict[str, Any]:
            assert self._pending is not None, "position 0 has the pending average"
            averages.append(average := self._pending.wait(timeout_s))
            return vars(average) | {"round": None, "view": (average.view.id, average.view.members), "residual": None}

        fields = self._transport.shared_tree(taken)
        residual = averages[0].residual if averages else None  # only position 0 sends means
        return Average(**fields | {"round": self._round, "view": View(*fields["view"]), "residual": residual})


def _described(error: DiLoCoError) -> dict[str, Any]:
    """An error as JSON."""
    fields = {name: value for name, value in vars(error).items() if name in ("round", "replicas", "donor", "digest")}
    return {"class": type(error).__name__, "message": str(error), "fields": fields}


def _rebuilt(described: Mapping[str, Any]) -> DiLoCoError:
    """The error that `_described` was given."""
    kind: type[DiLoCoError] = getattr(errors, described["class"])
    return kind(described["message"], **described["fields"])
