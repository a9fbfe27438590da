"""The queue of this rank's contributions, before they enter the rounds of a view."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from diloco.errors import RoundVoidError, TransportError, ViewChangedError
from diloco.membership import Rounds, View
from diloco.protocol.actions import Void
from diloco.protocol.events import Outbox, Submitted
from diloco.protocol.round_state import Spoilers
from diloco.protocol.rounds import RoundTable
from diloco.protocol.rules import Policies, Rules
from diloco.protocol.voting import Voting

__all__ = ["Contributions"]

_LEAST_LEAD_STEPS, _LEAD_WINDOWS = 1000, 4
"""How far ahead other members can be: one window and a part of another, and some more for void rounds."""


class Contributions:
    """The queue of this rank's contributions, which are held while no view is active or a view change is in progress.

    Args:
        message_counts: rank -> number of messages received from it; the roster keeps it up to date.
    """

    def __init__(self, rules: Rules, policies: Policies, message_counts: Mapping[int, int], outbox: Outbox) -> None:
        self.rounds: RoundTable | None = None  # the rounds of the current view; None until this rank is a member
        self.failure: TransportError | None = None  # why this rank takes part in no more rounds, or None
        self.reason = ""  # the reason for the last view change, as this rank learned it
        self.step = 0  # the number of inner steps that this rank has begun to synchronise; set by its owner
        self.from_step = 0  # contributions sent before this inner step are too old for the current view
        self.joined = False  # whether this rank joined a run in progress, so that it has to adopt the run's state
        self.spoilers = Spoilers()  # the members whose contributions could not be used
        self._rules = rules
        self._policies = policies
        self._message_counts = message_counts
        self._outbox = outbox
        self._waiting: list[Submitted] = []
        self._has_state_of: set[int] = set()
        self._sent_at: dict[int, int] = {}  # fragment -> inner step of the last contribution to it
        self._longest_window_steps = 0

    @property
    def greatest_step(self) -> float:
        """The greatest inner step that another member can have begun, as it waits for this rank's contributions."""
        widest = self._longest_window_steps
        return self.step + max(_LEAST_LEAD_STEPS, _LEAD_WINDOWS * widest) if widest else math.inf

    def open(self, view: View, carried: Sequence[Submitted], void: Rounds) -> None:
        """Begin the rounds of ``view``, unless this rank no longer takes part, and release the held contributions.

        Args:
            view: the new view.
            carried: contributions to undecided rounds of the previous view.
            void: rounds of earlier views that others have decided void.
        """
        if self.failure is None:
            self.spoilers.begin_view(view.members)
            voting = Voting(
                view, self._rules, self._message_counts, self._outbox, void, self._has_state_of, self.spoilers
            )
            self.rounds = RoundTable(voting, self._rules, self._policies, self._outbox)
            for submitted in carried:
                self.rounds.begin(submitted, joined=self.joined)
        self._begin_waiting()

    def close(self, failure: TransportError) -> None:
        """Take part in no more rounds. Those in flight end with ``failure``, or with an earlier failure."""
        self.failure = self.failure or failure
        if self.rounds is not None:
            self.rounds.freeze()
            self.rounds.end(None, str(failure), self.failure)
        self._begin_waiting()

    def submit(self, submitted: Submitted) -> None:
        """Begin the round of a contribution, hold the contribution, or report its round as void."""
        round_id, rounds = submitted.contribution.round, self.rounds
        self._longest_window_steps = max(
            self._longest_window_steps, submitted.step - self._sent_at.get(round_id.fragment, 0)
        )
        self._sent_at[round_id.fragment] = submitted.step
        if self.failure is not None:
            void = RoundVoidError(f"{round_id} is void: {self.failure}", round=str(round_id))
            raises = self._policies.raises(round_id)
            self._outbox.actions.append(Void(round_id, self.failure if raises else void))
        elif rounds is None or rounds.frozen:
            self._waiting.append(submitted)
        elif submitted.step < self.from_step and round_id.fragment >= 0:
            why = f"{round_id} is void: the view changed before it was sent ({self.reason})."
            self._outbox.actions.append(Void(round_id, ViewChangedError(why, round=str(round_id))))
        else:
            rounds.begin(submitted, joined=self.joined)

    def _begin_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for submitted in waiting:
            self.submit(replace(submitted, paused_s=self._outbox.now_s - submitted.sent_s))
