"""My contributions on their way into the rounds of a view: they wait while there is none that does not end."""

from __future__ import annotations

from collections.abc import Sequence

from diloco.algorithm.averaging import Contribution, RoundId
from diloco.errors import RoundVoidError, TransportError, ViewChangedError
from diloco.transport.peers.pending import PeerPending
from diloco.transport.peers.present import Present
from diloco.transport.peers.round_state import Begun
from diloco.transport.peers.rounds import RoundBook
from diloco.transport.peers.view_end import ViewEnd

__all__ = ["Intake"]


class Intake:
    """Contributions that were handed in. In the control thread.

    Args:
        present: the view.
        ending: of the view.
        raise_on_loss: see `Policies`.

    Attributes:
        from_step: rounds sent at this inner step or later take place in the view.
        joined: whether this rank came to a run that was going on; it then has to take over its state.
    """

    def __init__(self, present: Present, ending: ViewEnd, *, raise_on_loss: bool) -> None:
        self.from_step = 0
        self.joined = False
        self._present = present
        self._ending = ending
        self._raise_on_loss = raise_on_loss
        self._waiting: list[tuple[Begun, int]] = []
        self._has_state_of: set[int] = set()

    def begin(self, contribution: Contribution, pending: PeerPending, step: int) -> None:
        """A contribution sent at inner step ``step``: to be begun, or waiting, or void."""
        begun, book = Begun(contribution, pending), self._present.book
        if self._present.failure is not None:
            void = RoundVoidError(f"{pending.round} is void: {self._present.failure}", round=str(pending.round))
            pending.resolve(self.failure_of(pending.round) or void)
        elif self._ending.change is not None or book is None:
            self._waiting.append((begun, step))
        elif step < self.from_step and contribution.round.fragment >= 0:
            why = f"{pending.round} is void: the view changed before it was sent ({self._present.reason})."
            pending.resolve(ViewChangedError(why, round=str(pending.round)))
        else:
            self._begin(begun, book)

    def go_on(self, book: RoundBook, kept: Sequence[Begun]) -> None:
        """Begin anew, in the rounds of the next view, what was begun in the view before."""
        for begun in kept:
            self._begin(begun, book)

    def begin_waiting(self) -> None:
        """What waits waits no longer."""
        waiting, self._waiting = self._waiting, []
        for begun, step in waiting:
            self.begin(begun.contribution, begun.pending, step)

    def confirmed(self, fragment: int) -> None:
        """This rank's state of ``fragment`` is the majority's."""
        self._has_state_of.add(fragment)

    def failure_of(self, round_id: RoundId) -> TransportError | None:
        """What a round that can't take place raises; without gradients no step can be finished, so theirs always do."""
        return self._present.failure if self._raise_on_loss or round_id.fragment < 0 else None

    def _begin(self, begun: Begun, book: RoundBook) -> None:
        fragment = begun.contribution.round.fragment
        book.begin(begun, taking_over=self.joined and fragment >= 0 and fragment not in self._has_state_of)
