"""Attacks on protocol state machines over a simulated network, whose clock advances to their next timer."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.hostile.attack import Outcome
from diloco.membership import Policy
from diloco.protocol import Policies, Timer
from tests.membership.network import Limits, Network
from tests.protocol.simulated_rank import Rank

__all__ = ["Forgery", "NonMember", "Swarm", "attacked_by_member", "attacked_by_non_member"]

Message = Mapping[str, Any]
Forgery = Callable[[int, Message], Iterable[Message]]
"""(receiver, message that an honest member would send) -> the messages that the attacker sends instead."""

STEPS = 18
"""Six rounds of each of the three fragments."""

_MOST_TURNS = 400
_POLICIES = Policies(Policy(), continue_without_lost=True, raise_on_loss=False, streams=1, connect_timeout_s=1.0)


class NonMember:
    """A connected peer that is not a member. In each of its turns it sends one message to all ranks."""

    def __init__(self, network: Network, rank: int, messages: Iterator[Message]) -> None:
        self._network, self._rank, self._messages = network, rank, messages

    def act(self) -> bool:
        message = next(self._messages, None)
        if message is not None:
            for other in self._network.ranks:
                if other != self._rank:
                    self._network.send(self._rank, other, json.dumps(message))
        return message is not None

    def receive(self, sender: int, message: Any) -> None: ...

    def lose(self, rank: int, *, gone: bool) -> None: ...

    def may(self, what: str) -> bool:
        return False

    def suffer(self, what: str, number: int) -> None: ...


class Member(Rank):
    """A member that drops the sender of a malformed message, as the connections of a process do.

    A malicious member is of the same class, with a forgery.
    """

    @property
    def outcomes(self) -> dict[int, bool]:
        """Step -> whether its round was committed here, including rounds in which it was found to have diverged."""
        return dict.fromkeys(self.errors, False) | dict.fromkeys(self.averages, True)

    def receive(self, sender: int, message: str) -> None:
        self.hear_garbage(sender, json.loads(message))


class Swarm:
    """Honest members, and one more rank that is the attacker.

    Attributes:
        honest: the members 0, 1, ...
        attacker: the rank of the attacker.
        clock_s: the simulated time.
    """

    def __init__(self, honest: int, *, members: int) -> None:
        self.network = Network(range(honest + 1), Limits())
        self.honest = [Member(self.network, rank, members, 1, _POLICIES) for rank in range(honest)]
        for each in self.honest:
            each.STEPS = STEPS
            self.network.nodes[each.rank] = each
        self.attacker = honest
        self.clock_s = 0.0
        self._due_s: dict[tuple[int, Timer], float] = {}

    def run(self) -> Outcome:
        """Run until all honest ranks have decided all of their rounds, or none makes progress."""
        tracemalloc.start()
        before_bytes, progress_s, stall_s, out_after = tracemalloc.get_traced_memory()[0], 0.0, 0.0, None
        decided = 0
        for _ in range(_MOST_TURNS):
            began_s = time.process_time()
            moved = self._turn()
            took_s = time.process_time() - began_s  # of all ranks, with the attacker
            now = sum(len(each.outcomes) for each in self.honest if not each.left)
            self.clock_s += took_s if took_s > 0.5 else 0.0
            if now > decided:
                decided, progress_s = now, self.clock_s
            stall_s = max(stall_s, self.clock_s - progress_s)
            if out_after is None and all(
                self.attacker not in each.view.members for each in self.honest if not each.left
            ):
                out_after = max((len(each.outcomes) for each in self.honest), default=0)
            if all(each.left or len(each.outcomes) == STEPS for each in self.honest):
                break
            if not moved and not self._next_timer():
                break
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        there = [each for each in self.honest if not each.left]
        return Outcome(
            ended=len(self.honest) - len(there),
            stall_s=stall_s,
            memory_bytes=(peak_bytes - before_bytes) // max(1, len(self.honest)),
            void=max((len(each.errors) for each in self.honest), default=0),
            rounds=max((len(each.outcomes) for each in self.honest), default=0),
            digests_equal=all(_agree(one, other) for one in self.honest for other in self.honest),
            escapes=sum(not text.isprintable() for each in self.honest for text in _texts(each)),
            out_after=out_after,
        )

    def _turn(self) -> bool:
        """Deliver all messages in transit and let each rank act once; return whether anything happened."""
        moved = False
        for what, a, b in self.network.choices():
            if self.network.can(what, a, b):
                self.network.happen(what, a, b, 0)
                moved = True
        for rank in sorted(self.network.alive):
            moved = self.network.nodes[rank].act() or moved
        return moved

    def _beat(self) -> None:
        """Send and deliver a heartbeat from each rank to each other."""
        for rank in sorted(self.network.alive):
            for other in self.network.ranks:
                if other != rank:
                    self.network.send(rank, other, json.dumps({"kind": "beat"}))
        for what, a, b in self.network.choices():
            if what == "deliver" and self.network.can(what, a, b):
                self.network.happen(what, a, b, 0)

    def _next_timer(self) -> bool:
        """Advance the clock to the next timer and fire it; return False if there is none."""
        waiting = [(each, number, delay_s, timer) for each in self.honest if not each.left
                   for number, (delay_s, timer) in enumerate(each.timers)]  # fmt: skip
        if not waiting:
            return False
        due_s = [
            self._due_s.setdefault((each.rank, timer), self.clock_s + delay_s) for each, _, delay_s, timer in waiting
        ]
        first = min(range(len(waiting)), key=lambda index: due_s[index])
        each, number, _, timer = waiting[first]
        self.clock_s = max(self.clock_s, due_s[first])
        self._beat()
        del self._due_s[each.rank, timer]
        for every in self.honest:
            every.now_s = self.clock_s
        each.suffer("timers", number)
        return True


def attacked_by_member(
    forgery: Forgery, *, honest: int = 3, extra: Sequence[Message] = (), unusable: bool = False
) -> Outcome:
    """Run a swarm with one malicious member.

    Args:
        forgery: the messages that it sends instead of honest ones.
        honest: the number of honest members.
        extra: messages that it also sends, once to each of them.
        unusable: whether each of them finds that its values make the mean unusable.
    """
    swarm = Swarm(honest, members=honest + 1)
    for each in swarm.honest if unusable else ():
        each.finds_unusable = swarm.attacker
    attacker = Member(swarm.network, swarm.attacker, honest + 1, 1, _POLICIES)
    attacker.STEPS = STEPS
    unsent = list(extra)

    def forging(receiver: int, message: Message) -> Iterable[Message]:
        yield from forgery(receiver, message)
        if receiver == 0:
            for each in unsent:
                for rank in range(honest):
                    swarm.network.send(attacker.rank, rank, json.dumps(each))
            unsent.clear()

    attacker.lie = forging
    swarm.network.nodes[swarm.attacker] = attacker
    return swarm.run()


def attacked_by_non_member(messages: Iterable[Message], *, honest: int = 2) -> Outcome:
    """Run a swarm with a connected peer that never becomes a member."""
    swarm = Swarm(honest, members=honest)
    swarm.network.nodes[swarm.attacker] = NonMember(swarm.network, swarm.attacker, iter(messages))
    return swarm.run()


def _agree(one: Member, other: Member) -> bool:
    """Return whether both decided the same for each round that both decided (invariant 2)."""
    both = one.outcomes.keys() & other.outcomes.keys()
    return all(one.outcomes[step] == other.outcomes[step] for step in both) and all(
        one.averages[step].contributors == other.averages[step].contributors
        for step in one.averages.keys() & other.averages.keys()
    )


def _texts(rank: Rank) -> Iterator[str]:
    """Return the texts that a user would see."""
    yield rank.left
    yield from map(str, rank.errors.values())
    yield from (change.reason for change in rank.changes)
    yield from (commit.note for commit in rank.averages.values())
