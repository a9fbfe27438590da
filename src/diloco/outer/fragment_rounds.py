"""The rounds of one replica, each from a fragment's pseudo-gradient to its merge.

The codec's residual and the number of trained steps follow the outcome of a round: they commit if the average contains
this replica's contribution, and otherwise carry over to its next contribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diloco.algorithm import (
    Contribution,
    ErrorFeedback,
    OuterLoop,
    RoundId,
    TrainedSteps,
    collect_buffers,
    contribution_weight,
    measured_outer_step,
    not_finite,
    restore_buffers_,
)
from diloco.errors import DivergedError, RoundVoidError
from diloco.events import RoundCommitted, RoundSent, RoundVoid
from diloco.outer.arguments import Arguments
from diloco.outer.recovery import SharedState, StateRecovery
from diloco.protocol import Average
from diloco.transport import Pending, Transport

__all__ = ["FragmentRounds"]

_SAVED_FIELDS = ("payload", "weight", "base_weight", "digest", "buffers", "integers", "withdrawn")
"""The fields that are saved of a contribution in flight."""


@dataclass(frozen=True, eq=False)
class _InFlight:
    """A fragment between sending and merging."""

    contribution: Contribution  # submitted again after a resume, it gives the same average
    pending: Pending  # the average in flight
    sent: Tensor | None  # ``(numel,)`` float32, the local parameters when sent, if the merge rule needs them


class FragmentRounds:
    """Sends the fragments of one replica and merges their averages. Each fragment has at most one round in flight.

    Args:
        model: The module. Its buffers travel with the last fragment.
        loop: The global parameters and outer state that the rounds update.
        transport: Submits the contributions of this replica.
        arguments: The arguments that all replicas share.
    """

    def __init__(self, model: nn.Module, loop: OuterLoop, transport: Transport, arguments: Arguments) -> None:
        codec, decay = arguments.codec, float(arguments.error_feedback)
        self._feedback = {f.index: ErrorFeedback(codec, f.numel, decay=decay) for f in loop.fragments if decay}
        self.shared = SharedState(loop)  # the global parameters and outer state that other replicas can fetch
        self.recovery = StateRecovery(self.shared, transport)  # replaces fragments that turn out to be out of date
        self.trained_steps = TrainedSteps(len(loop.fragments))  # inner steps that no mean contains yet
        self.committed = 0  # number of rounds by outcome
        self.void = 0
        self._model = model
        self._loop = loop
        self._transport = transport
        self._arguments = arguments
        self._mean = arguments.mean
        self._last_means: dict[int, Tensor] = {}  # fragment -> a sample of the last mean that was applied
        self._in_flight: dict[int, _InFlight] = {}
        self._agreed_buffers, _ = collect_buffers(model)  # the floating-point buffers that all replicas held last

    @property
    def in_flight(self) -> tuple[RoundId, ...]:
        """The rounds sent and not yet merged, in the order sent."""
        return tuple(entry.contribution.round for entry in self._in_flight.values())

    def change_transport(self, transport: Transport) -> None:
        """Continue over another transport."""
        self._transport = transport
        self.recovery.change_transport(transport)

    def send(self, round_id: RoundId, base_weight: float, *, step: int) -> RoundSent:
        """Submit this replica's contribution to the transport. Never blocks on other replicas.

        Args:
            round_id: The round. Its fragment must not be in flight.
            base_weight: The weight of a full window of this replica.
            step: The number of the inner step, for the event.

        Raises:
            NonFiniteError: if the pseudo-gradient contains NaN or infinity. The message names the parameters.
        """
        index = round_id.fragment
        window_steps = self._arguments.schedule.window_steps(index, round_id.outer_step)
        self.recovery.round_begins(index)
        delta, sent, largest = self._loop.pseudo_gradient(index, keep_local=self._arguments.merge.keeps_sent)
        buffers, integers = collect_buffers(self._model) if index == len(self._loop.fragments) - 1 else (None, None)
        contribution = self._contribution(
            round_id,
            payload=self._feedback.get(index, self._arguments.codec).encode(delta),
            weight=contribution_weight(base_weight, self.trained_steps.submit(index), window_steps),
            base_weight=base_weight,
            digest=self._loop.digest(index),
            buffers=buffers,
            integers=integers,
            withdrawn=self._why_withdrawn(buffers),
        )
        self._submit(contribution, sent)
        return RoundSent(
            step=step,
            replica=contribution.replica,
            fragment=index,
            outer_step=round_id.outer_step,
            payload_bytes=contribution.payload.numel(),
            saturated=largest > self._arguments.codec.saturation_limit,
            digest=contribution.digest,
            weight=contribution.weight,
        )

    def merge(self, index: int, *, step: int) -> RoundCommitted | RoundVoid:
        """Wait for the average of a fragment in flight and apply it.

        If the round is void, or its average excludes this replica's contribution, the replica's next contribution
        contains that work.
        """
        entry = self._in_flight[index]
        average, reason = None, ""
        measures: dict[str, float | None] = {}
        try:
            average = entry.pending.wait()
            if average.donor is not None:
                reason = self.recovery.round_missed(average, average.donor)
                average = None
        except DivergedError as error:
            reason = f"{error} {self.recovery.resync(index, error)}"
        except RoundVoidError as error:
            reason = str(error)
        round_id, me = entry.contribution.round, self._transport.replica
        averaged = average is not None and me in average.contributors
        if average is not None:
            measures = self._apply(average, entry.sent, averaged=averaged)
            self.committed += 1
        else:
            self.void += 1
            if index not in self.recovery.lacking:
                with self.shared.changing(index):
                    finished = self.shared.finished_rounds
                    finished[index] = max(finished[index], round_id.outer_step + 1)
        if averaged:
            self.trained_steps.commit(index)
        if feedback := self._feedback.get(index):
            if averaged:
                feedback.commit()
            else:  # the next pseudo-gradient contains all of this work again
                feedback.rollback()
        del self._in_flight[index]
        if average is None:
            return RoundVoid(step=step, replica=me, fragment=index, outer_step=round_id.outer_step, reason=reason)
        return RoundCommitted(
            step=step,
            replica=me,
            fragment=index,
            outer_step=round_id.outer_step,
            contributors=average.contributors,
            sent_bytes=average.sent_bytes,
            received_bytes=average.received_bytes,
            wait_s=average.wait_s,
            clipped=average.clipped,
            note=average.note,
            spread=average.spread,
            late_s=average.late_s,
            **measures,
        )

    def forget_residuals(self) -> None:
        """Drop all error-feedback residuals. No fragment may be in flight."""
        for feedback in self._feedback.values():
            feedback.load_state_dict({"residual": torch.zeros_like(feedback.residual)})

    def state_dict(self) -> dict[str, Any]:
        """Return the state that `DiLoCo.state_dict` contains, except the position in the schedule."""
        return {
            "rounds_committed": self.committed,
            "rounds_void": self.void,
            "fragments": [self._loop.fragment_state(fragment.index) for fragment in self._loop.fragments],
            "codecs": [
                self._feedback[p].state_dict() if self._feedback else None for p in range(len(self._loop.fragments))
            ],
            "in_flight": [
                {
                    "fragment": entry.contribution.round.fragment,
                    "outer_step": entry.contribution.round.outer_step,
                    **{name: getattr(entry.contribution, name) for name in _SAVED_FIELDS},
                    "sent": entry.sent,
                }
                for entry in self._in_flight.values()
            ],
            "finished_rounds": list(self.shared.finished_rounds),
            "lacking": list(self.recovery.lacking),
            "trained_steps": self.trained_steps.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> Sequence[str]:
        """Restore the state saved by `state_dict` and resubmit the rounds that were in flight.

        Returns:
            Sentences about what the saved state does not contain.

        Raises:
            CheckpointError: if the trained steps are missing or belong to another number of fragments. Nothing was
                loaded.
        """
        self.trained_steps.load_state_dict(state.get("trained_steps"))
        self.recovery.change_transport(self._transport)  # what was being fetched does not belong to the loaded state
        self.committed = int(state["rounds_committed"])
        self.void = int(state["rounds_void"])
        for fragment, saved in zip(self._loop.fragments, state["fragments"], strict=True):
            self._loop.load_fragment_state(fragment.index, saved)
        for index, feedback in self._feedback.items():
            feedback.load_state_dict(state["codecs"][index])
        self.shared.finished_rounds = [int(count) for count in state["finished_rounds"]]
        self._agreed_buffers, _ = collect_buffers(self._model)
        for entry in state["in_flight"]:
            device = self._loop.device
            contribution = self._contribution(
                RoundId(int(entry["fragment"]), int(entry["outer_step"])),
                payload=entry["payload"].to(device),
                weight=float(entry["weight"]),
                base_weight=float(entry.get("base_weight", 1.0)),  # missing in checkpoints of 0.5.0
                digest=str(entry["digest"]),
                buffers=entry["buffers"],
                integers=entry["integers"],
                withdrawn=str(entry.get("withdrawn", "")),  # missing in checkpoints of 0.5.0
            )
            self._submit(contribution, None if entry["sent"] is None else entry["sent"].to(device))
        notes = []
        if lacking := ", ".join(map(str, state.get("lacking", ()))):
            notes.append(f"The state of fragment {lacking} was being fetched when this was saved. It is fetched again.")
        return notes

    def _contribution(self, round_id: RoundId, **given: Any) -> Contribution:
        """Return a contribution of this replica to a round, with the fields ``given``."""
        fragment, arguments = self._loop.fragments[round_id.fragment], self._arguments
        return Contribution(
            round=round_id,
            replica=self._transport.replica,
            codec=arguments.codec,
            numel=fragment.numel,
            max_norm=arguments.max_norm,
            average_rule=arguments.average,
            tensors=fragment.sizes,
            telemetry=arguments.telemetry,
            mean=self._mean,
            **given,
        )

    def _why_withdrawn(self, buffers: Tensor | None) -> str:
        """Return which of the model's ``buffers``, ``(n,)`` float32, keep this replica out of the round, or ""."""
        bad = [] if buffers is None else not_finite(self._model, buffers, self._agreed_buffers)
        return f"its buffer {', '.join(map(repr, bad))} became NaN or infinite" if bad else ""

    def _submit(self, contribution: Contribution, sent: Tensor | None) -> None:
        index = contribution.round.fragment
        try:
            pending = self._transport.average(contribution)
        except BaseException:  # nothing of it was sent: the next contribution contains its work
            if feedback := self._feedback.get(index):
                feedback.rollback()
            raise
        self._in_flight[index] = _InFlight(contribution, pending, sent)

    def _apply(self, average: Average, sent: Tensor | None, *, averaged: bool) -> dict[str, float | None]:
        """Take the outer step and merge. If the average excludes this replica, its work stays in the local parameters.

        Returns:
            The measures of the outer step, by name.
        """
        index = average.round.fragment
        with self.shared.changing(index):
            self.shared.finished_rounds[index] = average.round.outer_step + 1
            if averaged:
                measures = self._outer_step(index, average.values)
                self._loop.merge(index, self._arguments.merge, sent)
            else:
                with self._loop.carrying_over(index):
                    measures = self._outer_step(index, average.values)
        if average.buffers is not None or average.integers is not None:
            restore_buffers_(self._model, average.buffers, average.integers)
            self._agreed_buffers = average.buffers
        return measures

    def _outer_step(self, index: int, mean: Tensor) -> dict[str, float | None]:
        if not self._arguments.telemetry:
            self._loop.outer_step(index, mean)
            return {}
        measures, self._last_means[index] = measured_outer_step(self._loop, index, mean, self._last_means.get(index))
        return dict(vars(measures))
