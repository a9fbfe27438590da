"""This rank's contributions, as the training thread hands them in: one a round, each from the host's memory."""

from __future__ import annotations

from collections.abc import Callable

from diloco.algorithm.averaging import Contribution, RoundId
from diloco.errors import TransportError
from diloco.transport.base import Average
from diloco.transport.peers.host_copies import HostCopies
from diloco.transport.peers.pending import PeerPending

__all__ = ["RoundDesk"]


class RoundDesk:
    """Contributions to rounds.

    Args:
        replica: mine.
        missing: says which replicas were not heard of in a round.
        taken: called with what was waited for and its outcome, when that is taken.

    Attributes:
        digests: by fragment, of the state that was contributed from last.
    """

    def __init__(
        self,
        replica: int,
        missing: Callable[[RoundId], tuple[int, ...]],
        taken: Callable[[PeerPending, Average | TransportError], None],
    ) -> None:
        self.digests: dict[int, str] = {}
        self._replica = replica
        self._missing = missing
        self._taken = taken
        self._sent: dict[int, PeerPending] = {}
        self._copies = HostCopies()

    def hand_in(
        self, contribution: Contribution, guard_s: float, begin: Callable[[Contribution, PeerPending], None]
    ) -> PeerPending:
        """Take in a contribution.

        Args:
            contribution: to a round that this replica has not contributed to, or that became void.
            guard_s: longer than any round can take to be decided.
            begin: called with it, its payload in the host's memory, and with what is returned: at once, or, for a
                payload that has to be copied, in another thread.

        Raises:
            TransportError: it is another replica's, or a second one.
        """
        replica, round_id = contribution.replica, contribution.round
        if replica != self._replica:
            raise TransportError(
                f"replica {self._replica} handed in a contribution in the name of replica {replica}; each replica "
                "contributes for itself. It was not taken."
            )
        before = self._sent.get(round_id.fragment)
        if before is not None and before.round == round_id and not before.void:
            raise TransportError(
                f"replica {replica} has contributed to {round_id} already; one contribution a round is taken. "
                "The first one stands.",
                round=str(round_id),
                replicas=[replica],
            )
        pending = PeerPending(round_id, contribution.payload.numel(), guard_s, self._missing, self._taken)
        self._sent[round_id.fragment] = pending
        self.digests[round_id.fragment] = contribution.digest
        if contribution.payload.is_cuda:
            host, copied = self._copies.start(contribution)
            self._copies.after(copied, lambda: begin(host, pending))
        else:
            begin(contribution, pending)
        return pending

    def decided_rounds(self, fragment: int) -> int:
        """Rounds of ``fragment`` before the next one that this rank waits for: who has finished fewer is behind it."""
        sent = self._sent.get(fragment)
        return 0 if sent is None else sent.round.outer_step + (1 if sent.decided else 0)

    def close(self) -> None:
        """Wait for the copies."""
        self._copies.close()
