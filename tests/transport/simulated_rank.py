"""The real protocol of a rank, from `PeerTransport` to its votes, on the network of `tests.membership.network`.

Only threads, sockets, clocks and payloads are replaced: what another thread would do later is a thing that the rank
does next of its own accord, and a time is over when whoever holds the numbers says so.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch

from diloco.algorithm.averaging import Contribution, Mean, RoundId
from diloco.algorithm.codec import make_codec
from diloco.errors import RoundVoidError, TransportError, ViewChangedError
from diloco.membership.change import NextView
from diloco.membership.view import View
from diloco.protocol.failure_detector import Loss, Timing
from diloco.protocol.registry import Entry, Registry
from diloco.protocol.rules import Policies, Rules
from diloco.transport.base import Average
from diloco.transport.peers import transport
from diloco.transport.peers.streams import TcpStreams
from diloco.transport.peers.transport import PeerTransport
from diloco.transport.peers.views import ViewKeeper
from tests.membership.network import Network
from tests.transport.without_io import Board, Threads, no_link

__all__ = ["LATE_S", "TIMEOUT_S", "Rank", "weight_of"]

CODEC = make_codec("float32")
PAYLOAD = CODEC.encode(torch.ones(2))
LATE_S, TIMEOUT_S = 5.0, 10.0


class Rank:
    """One rank that sends a fragment in each of its steps, the next one of a fragment when the last is decided.

    Args:
        joining: whether it comes to a run that is going on.
        gradients: whether one of the three kinds of rounds is that of gradients.
        garbage: messages that it may hear from anybody.
        founded: the view of its own that it founds; None: it is one of ``replicas`` that begin, or joins.
        step: inner steps that it has begun before.

    Attributes:
        left: why it stopped by itself; "" where it did not.
        timers: how long each time that is not over was to be.
        first_step: the first one that it takes part in.
        outcomes: step -> whether its round was committed here.
        averages: step -> what its committed round brought.
        changes: the views that it adopted.
    """

    STEPS = 5

    def __init__(
        self,
        network: Network,
        rank: int,
        replicas: int,
        size: int,
        policies: Policies,
        *,
        joining: bool = False,
        gradients: bool = False,
        garbage: Sequence[Mapping[str, Any]] = (),
        founded: View | None = None,
        step: int = 0,
    ) -> None:
        self.network, self.rank = network, rank
        self.left = ""
        self.changes: list[NextView] = []
        self._gradients, self._garbage = gradients, garbage
        self._todo: deque[Callable[[], object]] = deque()
        self._given: dict[int, Contribution] = {}
        self._pending: dict[int, Any] = {}
        self._exchanges: list[tuple[Any, Any]] = []
        rules = Rules(rank, rank // size, size, None, TIMEOUT_S, 1 << 19, late_s=LATE_S)
        self._connections = Board(network, rank, self._todo)
        with mock.patch.object(transport, "ConnectionManager", return_value=self._connections):
            self.transport = PeerTransport(rules, policies, Timing(), TcpStreams())
        self.transport.on_change = self._changed
        entries = {other: Entry(other, f"simulated:{other}") for other in range(replicas * size)}
        registry = Registry(len(entries), size, list(entries.values()))
        view = founded or View.of(replicas)
        self.transport.step, self.first_step = step, step + 1
        self._joins: Entry | None = None
        self._asked = 1
        if joining:
            self._joins = entries[rank]
            reached = sorted({other // size for other in self.transport.connections.connected})
            view = View(-1, tuple(reached) or (rank // size,))
            self._todo.append(lambda: self.transport.joining.ask(entries[rank]))
        self._run(lambda: self.transport.begin(view, registry, no_link, member=not joining))

    @property
    def view(self) -> View:
        return self.transport.view

    @property
    def failure(self) -> TransportError | None:
        return self.transport.failure

    @property
    def keeper(self) -> ViewKeeper:
        assert self.transport._keeper is not None
        return self.transport._keeper

    @property
    def timers(self) -> list[float]:
        return [delay_s for delay_s, _ in self._connections.timers]

    @property
    def outcomes(self) -> dict[int, bool]:
        made = {step: pending.outcome for step, pending in self._pending.items() if pending.outcome is not None}
        for outcome in made.values():
            assert isinstance(outcome, (Average, RoundVoidError)), outcome
        return {step: isinstance(outcome, Average) for step, outcome in made.items()}

    @property
    def averages(self) -> dict[int, Average]:
        return {step: self._pending[step].outcome for step, committed in self.outcomes.items() if committed}

    @property
    def has_to_do(self) -> bool:
        """Whether its control thread has something to do that nobody else needs to begin."""
        return bool(self._todo)

    def act(self) -> bool:
        if self._todo:
            self._run(self._todo.popleft())
        elif self._joins is not None:
            return self._join(self._joins)
        elif ready := next((each for each in self._exchanges if each[1].judged.done()), None):
            self._exchanges.remove(ready)
            self._run(lambda: _finish(*ready))
        elif self.failure is None and (again := self._to_hand_in_again()):
            self._run(lambda: self._hand_in(again))
        elif self.transport.step < self.STEPS and self.failure is None and self._may_step():
            self._run(self._step)
        else:
            return False
        return True

    def heard(self, sender: int, message: str) -> None:
        self._run(lambda: self.transport._deliver(sender, json.loads(message), b""))

    def lose(self, rank: int, *, gone: bool) -> None:
        self._run(lambda: self.transport._lost(rank, Loss("gone" if gone else "silent", "simulated")))

    def may(self, what: str) -> bool:
        if what == "timers":
            return bool(self._connections.timers)
        if what == "breaks":
            return bool(self._exchanges)
        return not self.left and self._joins is None  # leaves, garbage

    def suffer(self, what: str, number: int) -> None:
        """A time is over, a payload connection breaks, it leaves, or it hears what nobody of its kind would say."""
        if what == "timers":
            self._run(self._connections.timers.pop(number % len(self._connections.timers))[1])
        elif what == "breaks":
            book, state = self._exchanges.pop(number % len(self._exchanges))
            self._run(
                lambda: (book._failed(state, TransportError("a payload connection broke")), book._exchanged(state))
            )
        elif what == "leaves":
            self._run(lambda: (self.keeper.leave(self.transport.step), self.keeper.part()))
        else:
            others = [rank for rank in self.network.ranks if rank != self.rank]
            sender, message = others[number % len(others)], self._garbage[number // 8 % len(self._garbage)]
            self._run(lambda: self.keeper.heard(sender, message))

    def _changed(self, following: NextView) -> Mapping[str, Any]:
        self.changes.append(following)
        assert self.keeper.book is not None
        assert following.view is None or self.keeper.book.view != following.view, "told of a view that is open already"
        return {"from": self.rank}

    def _join(self, entry: Entry) -> bool:
        """As `connect.join` does, without waiting."""
        answer = self.transport.joining.answer(0.0) if not self.left else None
        if answer is None:
            if not self.left and not self.transport.connections.connected:
                self._leave("nobody answers")
            return False
        if answer["kind"] == "welcome":
            assert answer["note"]["from"] in self.network.ranks, "whoever was told of the view adds a note"
            self._joins = None
            self._run(lambda: self.transport.enter(answer))
            self.first_step = self.transport.step + 1
        elif answer["for_good"] or self._asked == 20:
            self._leave(f"refused: {answer['reason']}")
        else:
            self._asked += 1
            self._run(lambda: self.transport.joining.ask(entry))
        return True

    def _may_step(self) -> bool:
        return all(
            pending.outcome is not None
            for step, pending in self._pending.items()
            if step % 3 == (self.transport.step + 1) % 3
        )

    def _to_hand_in_again(self) -> int | None:
        """As data-parallel training does with gradients."""
        for step, pending in self._pending.items():
            if pending.round.fragment < 0 and isinstance(pending.outcome, ViewChangedError):
                return step
        return None

    def _step(self) -> None:
        self.transport.tick()
        step = self.transport.step
        round_id = RoundId(-1, step) if self._gradients and step % 3 == 0 else RoundId(step % 3, step // 3)
        self._given[step] = Contribution(
            round=round_id,
            replica=self.transport.replica,
            codec=CODEC,
            numel=2,
            payload=PAYLOAD,
            digest="d",
            weight=weight_of(self.transport.replica, step),
        )
        self._hand_in(step)

    def _hand_in(self, step: int) -> None:
        self._pending[step] = self.transport.average(self._given[step])

    def _run(self, function: Callable[[], object]) -> None:
        function()
        while Threads.exchanging:
            self._exchanges.append(Threads.exchanging.popleft())
        if self.failure is not None:  # the process ends, and its connections with it
            self._leave(str(self.failure))

    def _leave(self, why: str) -> None:
        self.left = self.left or why
        for other in self.network.ranks:
            self.network.hang_up(self.rank, other)


def weight_of(replica: int, step: int) -> float:
    """Of a contribution: the sum over any replicas tells which they were."""
    return float(10**replica * (1 + step))


def _finish(book: Any, state: Any) -> None:
    """What the thread of an exchange comes to: the mean over this view's contributions."""
    verdict, size = state.judged.result(), book.rules.ranks_per_replica
    if not verdict.void:
        weight = sum(state.headers[member * size].weight for member in verdict.contributors)
        mean = Mean(values=torch.ones(2), contributors=verdict.contributors, weight=weight)
        book._computed(state, mean, f"mean of {state.id} by {verdict.contributors} in {book.view}")
    book._exchanged(state)
