"""The rounds of one replica: a fragment's way from its pseudo-gradient to the merge.

Whatever belongs to work that no mean has taken yet goes with the outcome of its round: what the codec lost of it, and
how many steps it stands for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from diloco.algorithm.averaging import Contribution, RoundId
from diloco.algorithm.buffers import collect_buffers, restore_buffers_
from diloco.algorithm.clipping import Clipping
from diloco.algorithm.codec import Codec
from diloco.algorithm.error_feedback import ErrorFeedback
from diloco.algorithm.merge import MergeRule
from diloco.algorithm.weighting import TrainedSteps, contribution_weight
from diloco.errors import DivergedError, RoundVoidError
from diloco.events import RoundCommitted, RoundSent, RoundVoid
from diloco.outer.in_flight import InFlight, restore_contribution
from diloco.outer.shared_state import SharedState
from diloco.outer.taking_over import TakingOver
from diloco.transport.base import Average, Transport

__all__ = ["FragmentRounds"]


class FragmentRounds:
    """Sends fragments and merges their averages, when it is told to; of each fragment one round at a time.

    Args:
        model: its buffers travel with the last fragment.
        shared: the outer loop, which the rounds move, and what others see of it.
        taking_over: brings a fragment up to date that turns out to be an old one.
        transport: this replica's way to the others.
        merge_rule: how local parameters take up the global ones.
        codec: of the payloads.
        error_feedback: whether to keep what the codec loses for the next round.
        clipping: how large a contribution may be.

    Attributes:
        transport: may be changed with nothing in flight.
        codecs: by fragment.
        trained_steps: that no mean has taken yet.
        committed: how many rounds were.
        void: how many were that.
    """

    def __init__(
        self,
        model: nn.Module,
        shared: SharedState,
        taking_over: TakingOver,
        transport: Transport,
        *,
        merge_rule: MergeRule,
        codec: Codec,
        error_feedback: bool,
        clipping: Clipping,
    ) -> None:
        self.transport = transport
        self.codecs: tuple[Codec, ...] = tuple(
            ErrorFeedback(codec, fragment.numel) if error_feedback else codec
            for fragment in shared.outer_loop.fragments
        )
        self.trained_steps = TrainedSteps(len(self.codecs))
        self.committed = 0
        self.void = 0
        self._model = model
        self._shared = shared
        self._loop = shared.outer_loop
        self._taking_over = taking_over
        self._merge_rule = merge_rule
        self._clipping = clipping
        self._in_flight: dict[int, InFlight] = {}

    @property
    def in_flight(self) -> tuple[RoundId, ...]:
        """FragmentRounds sent and not yet merged, in the order sent."""
        return tuple(entry.contribution.round for entry in self._in_flight.values())

    def send(self, round_id: RoundId, *, step: int, base_weight: float, scheduled_steps: int) -> RoundSent:
        """Hand this replica's contribution to the transport. Never blocks on other replicas.

        Args:
            round_id: of a fragment that is not in flight.
            step: that the event is of.
            base_weight: what a full window of this replica weighs.
            scheduled_steps: inner steps from the fragment's last round to this one.

        Raises:
            NonFiniteError: if the pseudo-gradient holds NaN or infinity; it names the parameters.
        """
        index = round_id.fragment
        codec = self.codecs[index]
        self._taking_over.sending(index)
        delta, sent, largest = self._loop.pseudo_gradient(index, keep_local=self._merge_rule.keeps_sent)
        buffers, integers = collect_buffers(self._model) if index == len(self.codecs) - 1 else (None, None)
        contribution = Contribution(
            round=round_id,
            replica=self.transport.replica,
            codec=codec,
            numel=delta.numel(),
            payload=codec.encode(delta),
            weight=contribution_weight(base_weight, self.trained_steps.hand_in(index), scheduled_steps),
            digest=self._loop.digest(index),
            buffers=buffers,
            integers=integers,
            clipping=self._clipping,
        )
        self._submit(contribution, sent)
        return RoundSent(
            step=step,
            replica=self.transport.replica,
            fragment=index,
            outer_step=round_id.outer_step,
            payload_bytes=contribution.payload.numel(),
            saturated=largest > codec.saturation_limit,
            digest=contribution.digest,
            weight=contribution.weight,
        )

    def awaits(self, index: int) -> bool:
        """Whether a fragment is in flight."""
        return index in self._in_flight

    def merge(self, index: int, *, step: int) -> RoundCommitted | RoundVoid:
        """Wait for the average of a fragment in flight, and apply it.

        A replica whose work is not in the average, or whose round is void, has that work in its next contribution.

        Args:
            index: of the fragment.
            step: that the event is of.
        """
        entry = self._in_flight[index]
        event: RoundCommitted | RoundVoid
        try:
            average = entry.pending.wait()
            if average.donor is None:
                event = self._commit(average, entry.sent, step)
            else:
                event = self._give_up(entry, self._taking_over.missed(average, average.donor), step)
        except DivergedError as error:
            event = self._give_up(entry, f"{error} {self._taking_over.follow(index, error)}", step)
        except RoundVoidError as error:
            event = self._give_up(entry, str(error), step)
        if not self._taking_over.lacks(index):
            with self._shared.changing(index):
                self._shared.finished_rounds[index] = max(
                    self._shared.finished_rounds[index], entry.contribution.round.outer_step + 1
                )
        averaged = isinstance(event, RoundCommitted) and self.transport.replica in event.contributors
        codec = self.codecs[index]
        if averaged:
            self.trained_steps.commit(index)
        if isinstance(codec, ErrorFeedback):
            if averaged:
                codec.commit()
            else:  # what is sent next holds all of this work again
                codec.rollback()
        del self._in_flight[index]
        return event

    def forget_losses(self) -> None:
        """What the codec lost is of no use any more; with nothing in flight."""
        for codec in self.codecs:
            if isinstance(codec, ErrorFeedback):
                codec.load_state_dict({"residual": torch.zeros_like(codec.residual)})

    def state_dict(self) -> dict[str, Any]:
        """What the rounds made, and what they need to go on; tensors are not copied.

        Global parameters and outer state, fragments in flight (what was sent, so that the same average is made again),
        error-feedback residuals, steps trained that no mean has taken, counters.
        """
        return {
            "rounds_committed": self.committed,
            "rounds_void": self.void,
            "fragments": [self._loop.fragment_state(fragment.index) for fragment in self._loop.fragments],
            "codecs": [codec.state_dict() if isinstance(codec, ErrorFeedback) else None for codec in self.codecs],
            "in_flight": [entry.state_dict() for entry in self._in_flight.values()],
            "finished_rounds": list(self._shared.finished_rounds),
            "lacking": list(self._taking_over.lacking),
            "trained_steps": self.trained_steps.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; what was in flight is handed to the transport again.

        Raises:
            CheckpointError: if the steps trained are missing or of another number of fragments. Nothing was loaded.
        """
        self.trained_steps.load_state_dict(state.get("trained_steps"))
        self.committed = int(state["rounds_committed"])
        self.void = int(state["rounds_void"])
        for fragment, saved in zip(self._loop.fragments, state["fragments"], strict=True):
            self._loop.load_fragment_state(fragment.index, saved)
        for codec, saved in zip(self.codecs, state["codecs"], strict=True):
            if isinstance(codec, ErrorFeedback):
                codec.load_state_dict(saved)
        self._shared.finished_rounds = [int(count) for count in state["finished_rounds"]]
        self._in_flight.clear()
        device = self._loop.device
        for entry in state["in_flight"]:
            fragment = self._loop.fragments[int(entry["fragment"])]
            contribution = restore_contribution(
                entry,
                replica=self.transport.replica,
                codec=self.codecs[fragment.index],
                numel=fragment.numel,
                device=device,
                clipping=self._clipping,
            )
            self._submit(contribution, None if entry["sent"] is None else entry["sent"].to(device))

    def _submit(self, contribution: Contribution, sent: Tensor | None) -> None:
        pending = self.transport.average(contribution)
        self._in_flight[contribution.round.fragment] = InFlight(contribution, pending, sent)

    def _commit(self, average: Average, sent: Tensor | None, step: int) -> RoundCommitted:
        """Outer step and merge; a replica's own work that is not in the average stays to be sent."""
        index = average.round.fragment
        with self._shared.changing(index):
            self._shared.finished_rounds[index] = average.round.outer_step + 1
            if self.transport.replica in average.contributors:
                self._loop.outer_step(index, average.values)
                self._loop.merge(index, self._merge_rule, sent)
            else:
                with self._loop.carrying_over(index):
                    self._loop.outer_step(index, average.values)
        if average.buffers is not None or average.integers is not None:
            restore_buffers_(self._model, average.buffers, average.integers)
        self.committed += 1
        return RoundCommitted(
            step=step,
            replica=self.transport.replica,
            fragment=index,
            outer_step=average.round.outer_step,
            contributors=average.contributors,
            sent_bytes=average.sent_bytes,
            received_bytes=average.received_bytes,
            wait_s=average.wait_s,
            clipped=average.clipped,
            note=average.note,
        )

    def _give_up(self, entry: InFlight, reason: str, step: int) -> RoundVoid:
        self.void += 1
        round_id = entry.contribution.round
        return RoundVoid(
            step=step,
            replica=self.transport.replica,
            fragment=round_id.fragment,
            outer_step=round_id.outer_step,
            reason=reason,
        )
