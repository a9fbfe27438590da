"""The rounds of one replica: a fragment's way from its pseudo-gradient to the merge.

What belongs to work that no mean has taken yet waits for the outcome of its round: what the codec lost of that work,
and the number of steps it stands for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diloco.algorithm.averaging import Contribution, RoundId
from diloco.algorithm.buffers import collect_buffers, restore_buffers_
from diloco.algorithm.codec import Codec
from diloco.algorithm.error_feedback import ErrorFeedback
from diloco.algorithm.mean_encoding import Residual
from diloco.algorithm.outer_loop import OuterLoop
from diloco.algorithm.telemetry import measured_outer_step
from diloco.algorithm.weighting import TrainedSteps, contribution_weight
from diloco.errors import DivergedError, RoundVoidError
from diloco.events import RoundCommitted, RoundSent, RoundVoid
from diloco.outer.arguments import Arguments
from diloco.outer.taking_over import SharedState, TakingOver
from diloco.protocol.actions import Average
from diloco.transport.base import Pending, Transport

__all__ = ["FragmentRounds"]

_OF_THE_MOMENT = ("payload", "weight", "base_weight", "digest", "buffers", "integers")  # of a contribution


@dataclass(frozen=True, eq=False)
class _InFlight:
    """One fragment between sending and merging."""

    contribution: Contribution  # given to the transport again after a checkpoint, it makes the same average
    pending: Pending  # the average on its way
    sent: Tensor | None  # ``(numel,)`` float32, the local parameters at sending, where the merge rule needs them


class FragmentRounds:
    """Sends fragments and merges their averages when told to; each fragment has one round at a time.

    Args:
        model: its buffers travel with the last fragment.
        loop: global parameters and outer state, which the rounds move.
    """

    def __init__(self, model: nn.Module, loop: OuterLoop, transport: Transport, arguments: Arguments) -> None:
        codec, decay = arguments.codec, float(arguments.error_feedback)
        self._feedback = {f.index: ErrorFeedback(codec, f.numel, decay=decay) for f in loop.fragments if decay}
        self.codecs: tuple[Codec, ...] = tuple(self._feedback.get(f.index, codec) for f in loop.fragments)
        self.shared = SharedState(loop)  # what others can fetch of the global parameters and outer state
        self.taking_over = TakingOver(self.shared, transport)  # replaces fragments that turn out to be out of date
        self.trained_steps = TrainedSteps(len(self.codecs))  # inner steps that no mean has taken yet
        self.committed = 0  # rounds so far, by outcome
        self.void = 0
        self._model = model
        self._loop = loop
        self._transport = transport
        self._arguments = arguments
        self._mean = arguments.mean
        self._last_means: dict[int, Tensor] = {}  # fragment -> a sample of the last mean that was applied
        self._residuals: dict[int, Residual] = {}  # fragment -> what this replica has not sent yet of means it owned
        self._in_flight: dict[int, _InFlight] = {}

    @property
    def in_flight(self) -> tuple[RoundId, ...]:
        """Rounds sent and not yet merged, in the order sent."""
        return tuple(entry.contribution.round for entry in self._in_flight.values())

    def change_transport(self, transport: Transport) -> None:
        """Go on over another transport, with nothing in flight."""
        self._transport = transport
        self.taking_over.change_transport(transport)

    def send(self, round_id: RoundId, base_weight: float, *, step: int) -> RoundSent:
        """Hand this replica's contribution to the transport. Never blocks on other replicas.

        Args:
            round_id: of a fragment that is not in flight.
            base_weight: weight of a full window of this replica.

        Raises:
            NonFiniteError: if the pseudo-gradient holds NaN or infinity; it names the parameters.
        """
        index = round_id.fragment
        codec, window_steps = self.codecs[index], self._arguments.schedule.window_steps(index, round_id.outer_step)
        self.taking_over.sending(index)
        delta, sent, largest = self._loop.pseudo_gradient(index, keep_local=self._arguments.merge.keeps_sent)
        buffers, integers = collect_buffers(self._model) if index == len(self.codecs) - 1 else (None, None)
        contribution = self._contribution(
            round_id,
            payload=codec.encode(delta),
            weight=contribution_weight(base_weight, self.trained_steps.hand_in(index), window_steps),
            base_weight=base_weight,
            digest=self._loop.digest(index),
            buffers=buffers,
            integers=integers,
        )
        self._submit(contribution, sent)
        return RoundSent(
            step=step,
            replica=contribution.replica,
            fragment=index,
            outer_step=round_id.outer_step,
            payload_bytes=contribution.payload.numel(),
            saturated=largest > codec.saturation_limit,
            digest=contribution.digest,
            weight=contribution.weight,
        )

    def merge(self, index: int, *, step: int) -> RoundCommitted | RoundVoid:
        """Wait for the average of a fragment in flight, and apply it.

        A replica whose work is not in the average, or whose round is void, has that work in its next contribution.
        """
        entry = self._in_flight[index]
        average, reason = None, ""
        measures: dict[str, float | None] = {}
        try:
            average = entry.pending.wait()
            if average.residual is not None:
                self._residuals[index] = average.residual
            if average.donor is not None:
                reason = self.taking_over.missed(average, average.donor)
                average = None
        except DivergedError as error:
            reason = f"{error} {self.taking_over.follow(index, error)}"
            if self._residuals.pop(index, None) is not None:  # it may have missed a commit, and sent this already
                reason += " What it had kept of earlier means is dropped."
        except RoundVoidError as error:
            reason = str(error)
        round_id, me = entry.contribution.round, self._transport.replica
        averaged = average is not None and me in average.contributors
        if average is not None:
            measures = self._apply(average, entry.sent, averaged=averaged)
            self.committed += 1
        else:
            self.void += 1
            if index not in self.taking_over.lacking:
                with self.shared.changing(index):
                    finished = self.shared.finished_rounds
                    finished[index] = max(finished[index], round_id.outer_step + 1)
        if averaged:
            self.trained_steps.commit(index)
        if feedback := self._feedback.get(index):
            if averaged:
                feedback.commit()
            else:  # the next pseudo-gradient holds all of this work again
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

    def forget_losses(self) -> None:
        """Drop what codecs lost so far; with nothing in flight."""
        self.forget_means()
        for feedback in self._feedback.values():
            feedback.load_state_dict({"residual": torch.zeros_like(feedback.residual)})

    def forget_means(self) -> None:
        """Drop what this replica has not sent yet of means that it owned, as it may not know which were committed."""
        self._residuals.clear()

    def state_dict(self) -> dict[str, Any]:
        """What `DiLoCo.state_dict` holds, but for the place in the schedule."""
        return {
            "rounds_committed": self.committed,
            "rounds_void": self.void,
            "fragments": [self._loop.fragment_state(fragment.index) for fragment in self._loop.fragments],
            "codecs": [self._feedback[p].state_dict() if self._feedback else None for p in range(len(self.codecs))],
            "mean_residuals": [
                {"start": held.start, "values": held.values} if (held := self._residuals.get(p)) else None
                for p in range(len(self.codecs))
            ],
            "in_flight": [_in_flight_state(entry) for entry in self._in_flight.values()],
            "finished_rounds": list(self.shared.finished_rounds),
            "lacking": list(self.taking_over.lacking),
            "trained_steps": self.trained_steps.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> Sequence[str]:
        """Go on where `state_dict` was taken; the transport is given again what was in flight.

        Returns:
            What the state does not hold, in words.

        Raises:
            CheckpointError: if the steps trained are missing or of another number of fragments. Nothing was loaded.
        """
        self.trained_steps.load_state_dict(state.get("trained_steps"))
        self.committed = int(state["rounds_committed"])
        self.void = int(state["rounds_void"])
        for fragment, saved in zip(self._loop.fragments, state["fragments"], strict=True):
            self._loop.load_fragment_state(fragment.index, saved)
        for index, feedback in self._feedback.items():
            feedback.load_state_dict(state["codecs"][index])
        residuals = enumerate(state.get("mean_residuals") or ())
        self._residuals = {p: Residual(int(e["start"]), e["values"].clone()) for p, e in residuals if e is not None}
        self.shared.finished_rounds = [int(count) for count in state["finished_rounds"]]
        self._in_flight.clear()
        for entry in state["in_flight"]:
            device = self._loop.device
            contribution = self._contribution(
                RoundId(int(entry["fragment"]), int(entry["outer_step"])),
                payload=entry["payload"].to(device),
                weight=float(entry["weight"]),
                base_weight=float(entry.get("base_weight", 1.0)),  # checkpoints of 0.5.0 have none
                digest=str(entry["digest"]),
                buffers=entry["buffers"],
                integers=entry["integers"],
            )
            self._submit(contribution, None if entry["sent"] is None else entry["sent"].to(device))
        unheld = []
        if self._mean.keeps_residual and state.get("mean_residuals") is None:
            words = "This was saved without what the encoding of earlier means lost, so that its error feedback begins "
            unheld.append(f"{words}anew.")
        if lacking := ", ".join(map(str, state.get("lacking", ()))):
            words = f"This was saved while the state of fragment {lacking} was being fetched. It will be fetched again."
            unheld.append(words)
        return unheld

    def _contribution(self, round_id: RoundId, **given: Any) -> Contribution:
        """A contribution of this replica, but for what is ``given``."""
        fragment, arguments = self._loop.fragments[round_id.fragment], self._arguments
        return Contribution(
            round=round_id,
            replica=self._transport.replica,
            codec=self.codecs[fragment.index],
            numel=fragment.numel,
            clipping=arguments.clipping,
            average_rule=arguments.average,
            tensors=fragment.sizes,
            telemetry=arguments.telemetry,
            mean=self._mean,
            residual=self._residuals.get(fragment.index),
            **given,
        )

    def _submit(self, contribution: Contribution, sent: Tensor | None) -> None:
        pending = self._transport.average(contribution)
        self._in_flight[contribution.round.fragment] = _InFlight(contribution, pending, sent)

    def _apply(self, average: Average, sent: Tensor | None, *, averaged: bool) -> dict[str, float | None]:
        """Outer step and merge. Own work that is not in the average stays in the local parameters, to be sent.

        Returns:
            What was measured, by name.
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
        return measures

    def _outer_step(self, index: int, mean: Tensor) -> dict[str, float | None]:
        if not self._arguments.telemetry:
            self._loop.outer_step(index, mean)
            return {}
        measures, self._last_means[index] = measured_outer_step(self._loop, index, mean, self._last_means.get(index))
        return dict(vars(measures))


def _in_flight_state(entry: _InFlight) -> dict[str, Any]:
    contribution = entry.contribution
    return {
        "fragment": contribution.round.fragment,
        "outer_step": contribution.round.outer_step,
        **{name: getattr(contribution, name) for name in _OF_THE_MOMENT},
        "sent": entry.sent,
    }
