"""The processes of a fault: all replicas train in the same way, and the victim stops at a point of one round.

There it reports to the test, and waits for the fault that the test injects.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from diloco.algorithm import Codec, Nesterov, RoundId, SyncSchedule, make_codec, partition
from diloco.errors import TransportError
from diloco.events import Event, RoundCommitted, RoundVoid
from diloco.outer import DiLoCo
from diloco.protocol import Rules
from diloco.transport import Address, Place, Transport, connect, join
from tests.processes import PRELOADED, receive, report
from tests.replicas import quadratic

PRELOADED.extend(["torch._dynamo", __name__])  # the first optimizer of a process imports the former, which takes 3 s

SCHEDULE = SyncSchedule(inner_steps=4, num_fragments=2, overlap_steps=1)
TARGET = RoundId(1, 1)
SENT_AT, MERGED_AT = 10, 11  # the target, the only round in flight then
PAUSE = 16  # the step by which the survivors have committed rounds without the victim
LAST = 22
LIMIT_S = 60.0  # many times as long as anything that is waited for


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One case."""

    fault: Literal["kill", "freeze"]  # the victim's process ends, or stands still until the others have reacted
    # it has not contributed to the target; it sums the payloads, and has not voted; it has merged the average
    stage: Literal["before send", "in flight", "merge"]
    on_failure: Literal["continue", "stop"] = "continue"
    num_replicas: int = 3
    victim: int = 1
    codec: str = "fp4"  # fp4 uses an all-gather; float32 with three replicas uses a reduce-scatter
    raises: bool = True  # see `Rules.raise_on_loss`
    min_replicas: int = 1
    rejoins: bool = False  # whether the others train until a process that replaces the victim has joined

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(m for m in range(self.num_replicas) if m != self.victim)

    @property
    def goes_on(self) -> tuple[int, ...]:
        """The replicas that continue: a majority or the half with replica 0, or all that are left after a known end."""
        if self.on_failure == "stop" or len(self.others) < self.min_replicas:
            return ()
        if self.fault == "kill" or 2 * len(self.others) > self.num_replicas or 0 in self.others:
            return self.others
        return (self.victim,)

    @property
    def rules(self) -> Rules:
        return Rules(
            heartbeat_s=0.2,
            silence_s=2.0 if self.fault == "freeze" and not self.rejoins else LIMIT_S,
            round_timeout_s=LIMIT_S,
            rendezvous_timeout_s=LIMIT_S,
            piece_bytes=130,  # one fp4 block
            continue_without_lost=self.on_failure == "continue",
            raise_on_loss=self.raises,
            min_replicas=self.min_replicas,
        )


@dataclass
class Outcome:
    """The report of a replica at its end."""

    # step -> digests of global parameters and outer state after it, by fragment
    digests: dict[int, tuple[str, ...]] = field(default_factory=dict)
    last: tuple[str, ...] = ()  # the same at the end
    committed: dict[RoundId, tuple[int, ...]] = field(default_factory=dict)  # round -> contributors
    void: dict[RoundId, str] = field(default_factory=dict)  # round -> reason
    error: tuple[str, str] | None = None  # class and message of the error that ended the training
    lost: tuple[int, ...] = ()  # the replicas that the error names
    steps: int = 0  # inner steps done, or begun when the error was raised
    members: tuple[int, ...] = ()  # of the view at the end

    def note(self, event: Event) -> None:
        if isinstance(event, RoundCommitted):
            self.committed[RoundId(event.fragment, event.outer_step)] = event.contributors
        elif isinstance(event, RoundVoid):
            self.void[RoundId(event.fragment, event.outer_step)] = event.reason


class Stretches(nn.Module):
    """Two parameters of several fp4 blocks each, one for each fragment."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(1024, generator=generator))
        self.second = nn.Parameter(torch.randn(5, 205, generator=generator))


def make_replica(
    transport: Transport, codec: Codec, note: Callable[[Event], None]
) -> tuple[DiLoCo, Callable[[], None]]:
    """Return a replica and its training step, up to the call of `DiLoCo.step`."""
    model, gradient = Stretches(), quadratic()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    diloco = DiLoCo(
        model,
        inner,
        transport=transport,
        schedule=SCHEDULE,
        fragments=partition(model, num_fragments=2, strategy="balanced"),
        outer_optimizer=Nesterov(learning_rate=0.4),
        codec=codec,
        on_event=note,
    )

    def train() -> None:
        gradient(transport.replica, diloco.steps, model)
        inner.step()
        inner.zero_grad()

    return diloco, train


def digests(diloco: DiLoCo) -> tuple[str, ...]:
    return tuple(diloco.fragments[fragment.index].state.digest() for fragment in diloco.fragments)


def hold() -> None:
    """Report that the stage is reached, and wait for the fault."""
    report("held")
    receive(LIMIT_S)


def holding(codec: Codec) -> Callable[[], None]:
    """Return a function after which the next sum of payloads stops before its first addend."""
    accumulate, armed = codec.accumulate, [False]

    def stops(payload: Tensor, out: Tensor, weight: float = 1.0) -> None:
        if armed[0]:
            armed[0] = False
            hold()
        accumulate(payload, out, weight)

    codec.accumulate = stops  # type: ignore[method-assign]  # a fault
    return lambda: armed.__setitem__(0, True)


def replica(index: int, scenario: Scenario, address: Address) -> None:
    """The main function of a process: train, report ``continued``, wait at `PAUSE`, report the `Outcome`, wait to end.

    Processes beyond the first M replace the victim.
    """
    number = index if index < scenario.num_replicas else scenario.victim
    stage, codec, outcome = scenario.stage if index == scenario.victim else "", make_codec(scenario.codec), Outcome()
    arm, settled = holding(codec), False
    connected = connect(Place(replica=number, num_replicas=scenario.num_replicas, rendezvous=address), scenario.rules)
    transport = connected.transport
    if not connected.joining:
        report(transport.address)
    diloco, train = make_replica(transport, codec, outcome.note)
    assert connected.joining == (index >= scenario.num_replicas)
    if scenario.rejoins:
        signal.signal(signal.SIGTERM, lambda *_: transport.ask_to_stop())
    if connected.joining:
        diloco.take_over(transport.view.members)
        diloco.steps = join(connected, LIMIT_S)
        report("joined")
    try:
        while scenario.rejoins or number not in scenario.goes_on or diloco.steps < LAST:
            if connected.joining and not settled and _has_found_its_way(outcome, number):
                settled = True
                report("settled")
            stop = transport.stop_step()
            if stop is not None and diloco.steps >= stop:
                break
            train()
            if diloco.steps == SENT_AT - 1 and stage == "before send":
                hold()
            elif diloco.steps == SENT_AT - 1 and stage == "in flight":
                arm()
            diloco.step()
            if diloco.steps == MERGED_AT and stage == "merge":
                hold()
            outcome.digests[diloco.steps] = digests(diloco)
            if diloco.steps == PAUSE and number in scenario.goes_on and not connected.joining:
                report("continued")
                receive(LIMIT_S)
    except TransportError as error:
        outcome.error, outcome.lost = (type(error).__name__, str(error)), error.replicas
    if outcome.error is None and transport.failure is not None:
        outcome.error, outcome.lost = ("failure", str(transport.failure)), transport.failure.replicas
    outcome.last, outcome.steps, outcome.members = digests(diloco), diloco.steps, transport.view.members
    report(outcome)
    receive(LIMIT_S)
    transport.close()


def _has_found_its_way(outcome: Outcome, number: int) -> bool:
    """Return whether two averages of each fragment contain this replica's own work."""
    mine = [round_id.fragment for round_id, contributors in outcome.committed.items() if number in contributors]
    return all(mine.count(fragment) >= 2 for fragment in range(SCHEDULE.num_fragments))
