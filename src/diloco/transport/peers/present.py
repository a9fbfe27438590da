"""The present view of a rank, as all that deal with it see it."""

from __future__ import annotations

from dataclasses import dataclass

from diloco.errors import TransportError
from diloco.membership.view import View
from diloco.transport.peers.rounds import RoundBook

__all__ = ["Present"]


@dataclass(eq=False)
class Present:
    """What holds now; the keeper of views changes it, and nobody else.

    Attributes:
        view: the present one; for a joiner, without itself.
        book: its rounds; None: this rank is no member yet.
        failure: why no round takes place any more, or None.
        agreed: the last view that this rank was ready for, which others may have adopted; None: there was none.
        reason: why the view followed the one before, with what happened as this rank heard it.
    """

    view: View
    book: RoundBook | None = None
    failure: TransportError | None = None
    agreed: View | None = None
    reason: str = ""
