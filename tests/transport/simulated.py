"""The real protocol of a rank, from `PeerTransport` to its votes, on the network of `tests.membership.network`.

Only threads, sockets and payloads are replaced: what another thread would do later is a thing that the rank does next
of its own accord, and every average is the same.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn
from unittest import mock

import torch

from diloco.algorithm.averaging import Contribution, Mean, RoundId
from diloco.algorithm.codec import make_codec
from diloco.errors import RoundVoidError, TransportError
from diloco.membership.quorum import Policy
from diloco.membership.view import View
from diloco.transport.address import Address
from diloco.transport.base import Average
from diloco.transport.peers import rounds, transport, views
from diloco.transport.peers.data_link import LinkRequest
from diloco.transport.peers.registry import Entry, Registry
from diloco.transport.peers.rounds import Rules
from diloco.transport.peers.switchboard import Loss, Timing
from diloco.transport.peers.transport import PeerTransport
from diloco.transport.peers.views import Policies
from diloco.transport.torch_distributed.tcp_streams import TcpStreams
from tests.membership.network import Limits, Network, explore

__all__ = ["Rank", "simulate", "without_threads"]

CODEC = make_codec("float32")
PAYLOAD = CODEC.encode(torch.ones(2))


class _Board:
    """A switchboard whose connections are the network's."""

    def __init__(self, network: Network, rank: int, todo: deque[Callable[[], object]]) -> None:
        self.address = Address("simulated", rank)
        self.services: dict[str, Any] = {}
        self.loop = SimpleNamespace(call_later=lambda *_: None)  # no time passes here
        self._network, self._rank, self._todo = network, rank, todo

    @property
    def connected(self) -> frozenset[int]:
        return frozenset(rank for rank in self._network.ranks if self.connection(rank) is not None)

    def connection(self, rank: int) -> object | None:
        return self._network.connection(self._rank, rank)

    def send(self, rank: int, message: Mapping[str, Any], blob: bytes = b"") -> None:
        self._network.send(self._rank, rank, json.dumps(message))

    def hang_up(self, rank: int) -> None:
        self._network.hang_up(self._rank, rank)

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        self._todo.append(lambda: function(*arguments))

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        try:
            coroutine.send(None)
        except StopIteration:
            return
        raise AssertionError("something waits in the control thread")


def _no_link(request: LinkRequest) -> NoReturn:
    raise AssertionError("links are the network's")


class _Thread:
    """A thread that connects payload links, which works where control connections stand, or that exchanges payloads."""

    exchanging: ClassVar[deque[Any]] = deque()

    def __init__(self, target: Any, args: tuple[Any, ...], **_: Any) -> None:
        self._owner, self._arguments = target.__self__, args

    def start(self) -> None:
        if isinstance(self._owner, views.ViewKeeper):
            view, peers, links, book = self._arguments
            ranks, board = self._owner._ranks, self._owner._board
            failed = {peer: "no connection" for peer in peers if not board.connected.issuperset(ranks((peer,)))}
            board.post(self._owner._connected, view, {}, failed, links, book)
        else:
            self.exchanging.append((self._owner, *self._arguments))


class Rank:
    """One rank that sends a fragment in each of its steps.

    Args:
        joining: whether it comes to a run that is going on.

    Attributes:
        left: why it stopped by itself; "" where it did not.
        first_step: the first one that it takes part in.
        outcomes: step -> whether its round was committed here.
    """

    STEPS = 4

    def __init__(
        self, network: Network, rank: int, replicas: int, size: int, policies: Policies, *, joining: bool = False
    ) -> None:
        self.network, self.rank = network, rank
        self.left = ""
        self.first_step = 1
        self._todo: deque[Callable[[], object]] = deque()
        self._pending: dict[int, Any] = {}
        self._exchanges: list[tuple[Any, Any]] = []
        rules = Rules(rank, rank // size, size, None, 10.0, 1 << 19)
        with mock.patch.object(transport, "Switchboard", return_value=_Board(network, rank, self._todo)):
            self.transport = PeerTransport(rules, policies, Timing(), TcpStreams())
        entries = {other: Entry(other, f"simulated:{other}") for other in range(replicas * size)}
        registry = Registry(len(entries), size, list(entries.values()))
        view = View.of(replicas)
        self._joins: Entry | None = None
        self._asked = 1
        if joining:
            self._joins = entries[rank]
            reached = sorted({other // size for other in self.transport.board.connected})
            view = View(-1, tuple(reached) or (rank // size,))
            self._todo.append(lambda: self.transport.ask_to_join(entries[rank]))
        self._run(lambda: self.transport.begin(view, registry, _no_link, member=not joining))

    @property
    def view(self) -> View:
        return self.transport.view

    @property
    def failure(self) -> TransportError | None:
        return self.transport.failure

    @property
    def outcomes(self) -> dict[int, bool]:
        made = {step: pending.outcome for step, pending in self._pending.items() if pending.outcome is not None}
        for outcome in made.values():
            assert isinstance(outcome, (Average, RoundVoidError)), outcome
        return {step: isinstance(outcome, Average) for step, outcome in made.items()}

    def act(self) -> bool:
        if self._todo:
            self._run(self._todo.popleft())
        elif self._joins is not None:
            return self._join(self._joins)
        elif ready := next((each for each in self._exchanges if each[1].judged.done()), None):
            self._exchanges.remove(ready)
            self._run(lambda: _finish(*ready))
        elif self.transport.step < self.STEPS and self.failure is None:
            self._run(self._step)
        else:
            return False
        return True

    def heard(self, sender: int, message: str) -> None:
        self._run(lambda: self.transport._deliver(sender, json.loads(message), b""))

    def lose(self, rank: int, *, gone: bool) -> None:
        self._run(lambda: self.transport._lost(rank, Loss("gone" if gone else "silent", "simulated")))

    def _join(self, entry: Entry) -> bool:
        """As `connect.join` does, without waiting."""
        answer = self.transport.welcome(0.0) if not self.left else None
        if answer is None:
            if not self.left and not self.transport.board.connected:
                self._leave("nobody answers")
            return False
        if answer["kind"] == "welcome":
            self._joins = None
            self._run(lambda: self.transport.enter(answer))
            self.first_step = self.transport.step + 1
        elif answer["for_good"] or self._asked == 20:
            self._leave(f"refused: {answer['reason']}")
        else:
            self._asked += 1
            self._run(lambda: self.transport.ask_to_join(entry))
        return True

    def _step(self) -> None:
        self.transport.tick()
        step = self.transport.step
        round_id = RoundId(step % 3, step)
        given = Contribution(
            round=round_id, replica=self.transport.replica, codec=CODEC, numel=2, payload=PAYLOAD, digest="d"
        )
        self._pending[step] = self.transport.average(given)

    def _run(self, function: Callable[[], object]) -> None:
        function()
        while _Thread.exchanging:
            self._exchanges.append(_Thread.exchanging.popleft())
        if self.failure is not None:  # the process ends, and its connections with it
            self._leave(str(self.failure))

    def _leave(self, why: str) -> None:
        self.left = self.left or why
        for other in self.network.ranks:
            self.network.hang_up(self.rank, other)


def _finish(book: Any, state: Any) -> None:
    verdict = state.judged.result()
    if not verdict.void:
        mean = Mean(values=torch.ones(2), contributors=verdict.contributors, weight=float(len(verdict.contributors)))
        book._computed(state, mean, f"mean of {state.id}")
    book._exchanged(state)


@contextmanager
def without_threads() -> Iterator[None]:
    with (
        mock.patch.object(views, "threading", SimpleNamespace(Thread=_Thread)),
        mock.patch.object(rounds, "threading", SimpleNamespace(Thread=_Thread)),
        mock.patch.object(transport, "Postman"),
    ):
        yield


def simulate(
    limits: Limits, numbers: Sequence[int], *, replicas: int, size: int = 1, go_on: bool = True, least: int = 1
) -> list[Rank]:
    """The ranks that have not ended, when all has come to rest."""
    policies = Policies(Policy(least), go_on=go_on, raise_on_loss=False, streams=1, connect_timeout_s=1.0)
    network = Network(range(replicas * size), limits)
    with without_threads():
        network.make = lambda rank: Rank(network, rank, replicas, size, policies, joining=True)
        for rank in range(replicas * size):
            network.nodes[rank] = Rank(network, rank, replicas, size, policies)
        explore(network, numbers)
    return [node for rank, node in network.nodes.items() if rank in network.alive and isinstance(node, Rank)]
