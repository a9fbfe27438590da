"""Networks of simulated ranks, each with its machine, and what must hold for the ranks that continue.

The effects of a machine become messages and pending things to do: what another thread would do later is something that
the rank does next. A timer fires when the test's numbers say so.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from diloco.algorithm import Contribution, RoundId, Uplink, Verdict, make_codec, plan_round
from diloco.errors import DivergedError, RoundVoidError, TransportError, ViewChangedError
from diloco.membership import NextView, View
from diloco.protocol import (
    Announced,
    Answer,
    Begun,
    Commit,
    Computed,
    Connected,
    Disconnected,
    Effects,
    Entered,
    Entry,
    Event,
    Exchanged,
    GiveVerdict,
    Join,
    Left,
    Machine,
    Message,
    MessageError,
    RankLost,
    Received,
    Rules,
    Stepped,
    Submitted,
    Timer,
    TimerFired,
    Welcome,
    WireMessage,
    decode,
    encode,
    header_of,
)
from tests.protocol.network import Limits, Network, explore, settle, wander

CODEC = make_codec("float32")
NUMEL = 12  # enough to be divided among a few replicas
PAYLOAD = CODEC.encode(torch.ones(NUMEL))
LATE_S, TIMEOUT_S = 5.0, 10.0
RULES = Rules(
    round_timeout_s=TIMEOUT_S,
    late_s=LATE_S,
    silence_s=LATE_S / 2,
    heartbeat_s=LATE_S / 5,
    continue_without_lost=True,
    raise_on_loss=False,
)
TURN_TICKS = 12  # how often a view change looks at the clock in one turn
MOST_TICKS = 3 * 10 * TURN_TICKS  # of three view changes that take as long as they may


class Rank:
    """A rank that sends a fragment in each of its steps, and the next round of a fragment once the last is decided.

    It joins a run in progress (``joining``), founds a view (``founded``), or begins with the others: at once, or as the
    first thing that it does (not ``ready``). ``garbage`` are messages that it may receive from any rank.
    """

    STEPS = 5  # the number of its inner steps

    def __init__(
        self,
        network: Network,
        rank: int,
        replicas: int,
        size: int,
        rules: Rules,
        *,
        joining: bool = False,
        ready: bool = True,
        gradients: bool = False,
        garbage: Sequence[bytes] = (),
        founded: View | None = None,
        step: int = 0,
    ) -> None:
        self.network, self.rank, self.replica = network, rank, rank // size
        self.now_s = 0.0  # its clock, which advances only when a test moves it or a view change takes long
        self.digest = "d"  # of its state
        self.left = ""  # why it stopped by itself
        self.timers: list[tuple[float, Timer]] = []
        self.averages: dict[int, Commit] = {}  # by step
        self.weights: dict[int, Mapping[int, float]] = {}  # in its means, by step
        self.errors: dict[int, TransportError] = {}  # step -> why its round was void
        self.changes: list[NextView] = []
        # view, round and position in a replica -> the parts of the sum that its plan gives to each replica
        self.shards: dict[tuple[int, RoundId, int], tuple[tuple[int, int], ...]] = {}
        self.sent: list[Any] = []
        # maps a receiver and a message to what is sent instead; the identity unless a test breaks this rank
        self.instead: Callable[[int, Any], Iterable[WireMessage | bytes]] = lambda receiver, message: (message,)
        self.finds_unusable: int | None = None  # the replica whose values spoil every mean, as this rank finds
        self.gradients, self._garbage = gradients, garbage
        self._known: dict[int, int] = {}  # connections that the machine knows
        self.todo: deque[Callable[[], object]] = deque()  # what is pending and needs no other rank
        self._given: dict[int, Contribution] = {}
        self.exchanges: dict[tuple[int, RoundId], GiveVerdict | None] = {}  # that have not ended, by view and round
        self._answer: Answer | None = None  # to its request to join
        self.machine = Machine(replace(rules, rank=rank, ranks_per_replica=size))
        view = founded or View.of(replicas)
        self.step, self.first_step = step, step + 1
        self._joins = Entry(rank, f"simulated:{rank}") if joining else None
        self._asked = 1
        if self._joins is not None:
            reached = [other for other in network.ranks if network.connection(rank, other) is not None]
            nodes = [network.nodes.get(other) for other in reached]  # those that are members say so
            members = [node.rank for node in nodes if isinstance(node, Rank) and node.machine.views.is_member]
            asked = sorted({other // size for other in members or reached})
            view = View(-1, tuple(asked) or (self.replica,))
            self.todo.append(partial(self.handle, Announced(Join(self._joins))))
        begin = partial(self.handle, Begun(view, not joining))
        if ready:
            begin()
        else:
            self.todo.append(begin)

    @property
    def step(self) -> int:
        return self.machine.rounds.step

    @step.setter
    def step(self, step: int) -> None:
        self._call(Stepped(step))

    @property
    def view(self) -> View:
        return self.machine.views.view

    @property
    def failure(self) -> TransportError | None:
        return self.machine.views.failure

    @property
    def waits(self) -> str:
        """Why it, or all members that it has asked to join, wait in a view change for others to be back; "": no."""
        if self._joins is None:
            return self.machine.views.waiting
        asked = [self.network.nodes[rank] for rank in self.machine.roster.connections if rank in self.network.alive]
        why = [node.waits for node in asked if isinstance(node, Rank) and node._joins is None and not node.left]
        return why[0] if why and all(why) else ""

    @property
    def outcomes(self) -> dict[int, bool]:
        """Step -> whether its round was committed here."""
        for error in self.errors.values():
            assert isinstance(error, RoundVoidError | DivergedError), error
        return dict.fromkeys(self.errors, False) | dict.fromkeys(self.averages, True)

    def sent_of(self, kind: type[Any]) -> list[Any]:
        """Return the messages of one type that it sent."""
        return [message for message in self.sent if isinstance(message, kind)]

    # What the network calls.

    def act(self) -> bool:
        if self.todo:
            self.todo.popleft()()
        elif any([self.network.dial(self.rank, each) for each in self.machine.rules.ranks(self.machine.views.missing)]):
            pass
        elif self._joins is not None:
            return self._join(self._joins)
        elif ready := next((key for key, verdict in self.exchanges.items() if verdict is not None), None):
            self._finish(*ready)
        elif self.failure is None and (again := self._to_hand_in_again()):
            self._submit(again)
        elif self.step < self.STEPS and self.failure is None and self._may_step():
            self._step()
        else:
            return False
        return True

    def receive(self, sender: int, message: bytes) -> None:
        """Receive a message. One that is none, or that conforms to no protocol, ends its connection."""
        try:
            self.hear(sender, decode(message, Message))
        except MessageError:
            if self.network.connection(self.rank, sender) is not None:
                self.network.hang_up(self.rank, sender)
                self.lose(sender, gone=False)

    def look(self) -> None:
        """Notice connections that have been made since."""
        if not self.left:
            self.handle(Stepped(self.step))

    def lose(self, rank: int, *, gone: bool) -> None:
        self.handle(RankLost(rank, "simulated", "ended" if gone else "unreachable"))

    def may(self, what: str) -> bool:
        if what == "timers":
            return bool(self.timers)
        if what == "breaks":
            return bool(self.exchanges)
        return not self.left and self._joins is None  # leaves, garbage

    def suffer(self, what: str, number: int) -> None:
        """Fire a timer, break a payload connection, leave, or receive a message that no correct rank sends."""
        if what == "timers":
            delay_s, timer = self.timers.pop(number % len(self.timers))
            self.now_s += delay_s
            self.handle(TimerFired(timer))
        elif what == "breaks":
            view_id, round_id = list(self.exchanges)[number % len(self.exchanges)]
            del self.exchanges[view_id, round_id]
            self.handle(Exchanged(view_id, round_id, "a payload connection broke"))
        elif what == "leaves":
            self.handle(Left())
        else:
            others = [rank for rank in self.network.ranks if rank != self.rank]
            self.receive(others[number % len(others)], self._garbage[number // 8 % len(self._garbage)])

    def fire(self, *, of_round: bool) -> bool:
        """Let the first timer of a round, or of a view change, run out, if there is one."""
        places = [place for place, (_, timer) in enumerate(self.timers) if (timer is not None) == of_round]
        if places:
            self.suffer("timers", places[0])
        return bool(places)

    # The machine.

    def hear(self, sender: int, message: Message) -> Effects:
        return self.handle(Received(sender, message))

    def handle(self, event: Event) -> Effects:
        """Tell the machine, after all changes of connections, and carry out the effects."""
        for other in self.network.ranks:
            connection = self.network.connection(self.rank, other)
            if connection is None and self._known.pop(other, None) is not None:
                self._call(Disconnected(other))
            elif connection is not None and self._known.get(other) != connection:
                self._known[other] = connection
                process = self.network.process(other)
                self._call(Connected(other, connection, f"simulated:{other}", process))
        effects = self._call(event)
        if self.failure is not None:  # the process ends, and its connections with it
            self._leave(str(self.failure))
        return effects

    def _call(self, event: Event) -> Effects:
        effects = self.machine.handle(self.now_s, event)
        check_machine(self.machine)
        for rank, message in effects.messages:
            self.send(rank, message)
        for rank in effects.hang_ups:
            self._known.pop(rank, None)
            self.network.hang_up(self.rank, rank)
        for timer, delay_s in effects.timers.items():
            self.timers = [each for each in self.timers if each[1] != timer]
            if delay_s is not None:
                self.timers.append((delay_s, timer))
        for round_id, outcome in effects.outcomes:
            step = self._step_of(round_id)
            assert step not in self.averages.keys() | self.errors.keys(), "it has two outcomes"
            if isinstance(outcome, Commit):
                self.averages[step] = outcome
            else:
                self.errors[step] = outcome
        for following, _, _ in effects.adopted:
            self.changes.append(following)
            for rank in self.machine.rules.ranks(following.joined):
                self.send(rank, Welcome(following, f"from {self.rank}".encode()))
        for rank in effects.welcomed:
            self.send(rank, Welcome(self.changes[-1], f"from {self.rank}".encode()))
        for view, round_id in effects.exchanges:
            self.exchanges[view.id, round_id] = None
        for given in effects.verdicts:
            if (given.view_id, given.round) in self.exchanges:
                self.exchanges[given.view_id, given.round] = given
            if not given.verdict.void:
                plan = plan_round(self._given[self._step_of(given.round)], len(given.uplinks), given.uplinks)
                self.shards[given.view_id, given.round, self.machine.rules.position] = plan.shards
        for answer in effects.answers:
            self._answer = answer
        return effects

    def send(self, rank: int, message: WireMessage) -> None:
        self.sent.append(message)
        for told in self.instead(rank, message):
            data = told if isinstance(told, bytes) else encode(told)
            assert len(data) <= 1 << 20, "no connection carries it"
            self.network.send(self.rank, rank, data)

    def _finish(self, view_id: int, round_id: RoundId) -> None:
        """Finish an exchange with the mean over this view's contributions."""
        given = self.exchanges.pop((view_id, round_id))
        assert given is not None
        verdict: Verdict = given.verdict
        if self.finds_unusable in verdict.contributors:
            words = f"the mean is not finite; replica {self.finds_unusable} contributed most to it"
            self.handle(Exchanged(view_id, round_id, words, spoiler=self.finds_unusable))
            return
        if not verdict.void:
            self.weights[self._step_of(round_id)] = given.weights
            what = f"mean of {round_id} in view {view_id}, by {given.weights}"
            digest = hashlib.sha256(what.encode()).hexdigest()
            self.handle(Computed(view_id, round_id, digest))
        self.handle(Exchanged(view_id, round_id))

    # The training of the rank.

    def _join(self, entry: Entry) -> bool:
        """Do what `connected.join` does, without waiting."""
        answer, self._answer = None if self.left else self._answer, None
        if answer is None:
            if not self.left and not self.machine.roster.connections:
                self._leave("no rank answers")
            return False
        message, connections = answer
        if isinstance(message, Welcome):
            assert message.note.startswith(b"from "), "the member that sends the welcome adds a note"
            self._joins = None
            self.handle(Entered(message.following, connections))
            self.first_step = self.step + 1
        elif message.waits:
            pass  # it asks again after a while: `ask_again`
        elif message.for_good or self._asked == 20:
            self._leave(f"refused: {message.reason}")
        else:
            self._asked += 1
            self.handle(Announced(Join(entry)))
        return True

    def ask_again(self) -> None:
        """Ask to join once more, as a joiner does after a while that gets no answer, or whose members wait."""
        if self._joins is not None:
            self._asked = 1
            self.todo.append(partial(self.handle, Announced(Join(self._joins))))

    def _may_step(self) -> bool:
        return all(step in self.outcomes for step in self._given if step % 3 == (self.step + 1) % 3)

    def _to_hand_in_again(self) -> int | None:
        """Return a step to submit again, as data-parallel training does with gradients."""
        for step, error in self.errors.items():
            if self._given[step].round.fragment < 0 and isinstance(error, ViewChangedError):
                return step
        return None

    def _step(self) -> None:
        self.step += 1
        step = self.step
        self._given[step] = Contribution(
            round=RoundId(-1, step) if self.gradients and step % 3 == 0 else RoundId(step % 3, step // 3),
            replica=self.replica,
            codec=CODEC,
            numel=NUMEL,
            payload=PAYLOAD,
            digest=self.digest,
            weight=weight_of(self.replica, step),
        )
        self._submit(step)

    def _submit(self, step: int) -> None:
        self.errors.pop(step, None)
        uplink = Uplink(10 ** ((self.rank + step) % 3), full=True)
        submitted = Submitted(header_of(self._given[step], uplink), step, self.now_s)
        self.todo.append(partial(self.handle, submitted))

    def _step_of(self, round_id: RoundId) -> int:
        return next(step for step, given in self._given.items() if given.round == round_id)

    def _leave(self, why: str) -> None:
        self.left = self.left or why
        for other in self.network.ranks:
            self.network.hang_up(self.rank, other)


class Stranger:
    """A connected rank that is no member; the test sends its messages."""

    timers = ()
    left = "a stranger"
    act = receive = lose = look = may = suffer = lambda *arguments, **more: False  # it does nothing


def weight_of(replica: int, step: int) -> float:
    """Return the weight of a contribution; none may exceed eight full windows."""
    return 1 + step % 6 + replica / 256


def simulated(
    replicas: int,
    limits: Limits | None = None,
    rules: Rules = RULES,
    *,
    size: int = 1,
    strangers: int = 0,
    ready: bool = True,
    **kind: Any,
) -> Network:
    """Return a network of replicas that have done nothing yet; ``ready``: all begin before anything happens."""
    network = Network(range(replicas * size + strangers), limits or Limits())
    network.make = lambda rank: Rank(network, rank, replicas, size, rules, joining=True, **kind)
    for rank in network.ranks:
        member = rank < replicas * size
        network.nodes[rank] = Rank(network, rank, replicas, size, rules, ready=ready, **kind) if member else Stranger()
    return network


def simulate(limits: Limits, numbers: Sequence[int], *, replicas: int, **kind: Any) -> list[Rank]:
    """Return the ranks that have not ended once nothing more happens."""
    network = simulated(replicas, limits, **kind)
    wander(network, numbers)
    finish(network)
    return [node for rank, node in network.nodes.items() if rank in network.alive and isinstance(node, Rank)]


def finish(network: Network) -> None:
    """Let everything that is under way finish, also view changes that take time.

    Raises:
        AssertionError: It does not come to an end.
    """
    idle = 0
    for _ in range(MOST_TICKS):
        explore(network, [], 3000)
        nodes = [network.nodes[number] for number in sorted(network.alive)]
        there = [node for node in nodes if isinstance(node, Rank) and not node.left]
        is_moving = any([not node.waits for node in there if node.fire(of_round=False)])
        idle = 0 if is_moving else idle + 1
        if idle > TURN_TICKS or (idle and not any(node.waits for node in there)):
            return
    raise AssertionError("a view change takes longer than it may")


def check_machine(machine: Machine) -> None:
    """Check what holds between two events."""
    views, rounds, me = machine.views, machine.rounds, machine.rules.replica
    change, failed = views.change, views.failure is not None
    assert not views.is_member or me in views.view.members, "a member of a view that it is not in"
    assert change is None or change.view == views.view, "a change of another view"
    assert change is None or rounds.frozen, "rounds go on during a view change"
    if views.is_member and not failed:
        assert rounds.view == views.view, "rounds of another view"
        assert change is not None or not rounds.frozen, "rounds are frozen for ever"
    assert rounds.view is not None or not rounds._rounds, "rounds without a view"
    assert not rounds._void & rounds._commits.keys(), "a round is committed and void"
    assert not rounds._waiting or not failed, "a contribution waits for ever"
    assert not rounds._waiting or rounds.view is None or rounds.frozen, "contributions wait though a view is active"
    for each in rounds._rounds.values() if not failed else ():
        mine = each.votes.get(machine.rules.rank)
        assert not each.committed or (mine is not None and mine.ok), "committed without this rank's vote"
        assert each.committed is not None or not each.concluded, "an undecided round has an outcome"
        assert each.concluded or each.committed is None or each.begun is None, "a decided round has no outcome"
        assert each.verdict is None or each.was_begun, "a round is judged before it was begun"


def assert_nothing(effects: Effects) -> None:
    assert vars(effects) == vars(Effects())


def check_agreement(ranks: Sequence[Rank], *, whole: bool = False) -> None:
    """Check what must hold whatever happened; ``whole``: nothing made a round void.

    Invariant 2: each round is committed by all that continue, from the same contributions, or void for all.
    """
    going_on = [rank for rank in ranks if not rank.left and not rank.waits]
    assert len({rank.view for rank in going_on}) <= 1, "two histories"
    for rank in ranks:
        assert rank.waits or not rank.exchanges, "a thread waits for ever"
    planned: dict[object, object] = {}
    for rank in ranks:
        for what, shards in rank.shards.items():
            assert planned.setdefault(what, shards) == shards, "plans differ"
    adopted: dict[int, object] = {}
    for rank in going_on:
        for each in rank.changes:
            facts = (each.view, each.from_step, each.commits, each.joined)
            assert adopted.setdefault(each.previous.id, facts) == facts, "two histories"
        assert rank.step == rank.STEPS, "it never became a member"
        assert sorted(rank.outcomes) == list(range(rank.first_step, rank.STEPS + 1)), "a round was never decided"
        for step, committed in rank.outcomes.items():
            assert committed == going_on[0].outcomes.get(step, committed), "a round is applied by all or by none"
            assert committed or not whole, f"step {step}: {rank.errors[step]}"
        for step, average in rank.averages.items():
            others = going_on[0].averages.get(step, average)
            contributors = average.contributors
            assert (average.view, contributors) == (others.view, others.contributors)
            assert rank.weights[step] == {replica: weight_of(replica, step) for replica in contributors}
            assert not whole or contributors == average.view.members


def begin(network: Network, *numbers: int, deliver: bool = True) -> None:
    """Let these ranks send their first contribution, and deliver it; none exchanges payloads or votes yet."""
    for node in map(network.nodes.__getitem__, numbers):
        while node.step == 0 or node.todo:
            assert node.act()
    if deliver:
        settle(network)
