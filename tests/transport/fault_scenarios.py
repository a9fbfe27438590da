"""The faults of one of a few replicas in processes of their own, as data, and the table of cases."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import Literal

from diloco.algorithm import RoundId, SyncSchedule
from diloco.events import Event, RoundCommitted, RoundVoid
from diloco.transport import TcpWire

__all__ = [
    "BEFORE",
    "CASES",
    "LAST",
    "LIMIT_S",
    "MERGED_AT",
    "NEVER_S",
    "PAUSE",
    "SCHEDULE",
    "SENT_AT",
    "TARGET",
    "VOID_PER_JOIN",
    "Outcome",
    "Scenario",
    "name",
]

SCHEDULE = SyncSchedule(inner_steps=4, num_fragments=3, overlap_steps=2)
TARGET, BEFORE = RoundId(1, 1), RoundId(0, 1)
SENT_AT, MERGED_AT = 9, 11  # the target, under this schedule
PAUSE = 20  # the step by which the survivors have committed a round of each fragment without the victim
LAST = 28
LIMIT_S = 60.0  # many times as long as anything that is waited for
NEVER_S = 600.0  # longer than any case lasts
VOID_PER_JOIN = SCHEDULE.overlap_steps + 1  # one fragment is sent per step, so no more rounds are undecided


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One case.

    Attributes:
        fault: ``kill``: the victim's process ends; ``freeze``: it freezes, and resumes when the others have reacted;
            ``cut``: no data reaches or leaves it; ``links``: only its payload connections end.
        stage: ``before send``: it has not contributed to the target; ``in flight``: it has sent one piece of its
            payload; ``vote``: all others have voted, and one of them has its vote (of two replicas, none);
            ``commit``: it has received all votes and has not merged; ``merge``: it has merged.
        on_failure: the setting ``on_failure``.
        num_replicas: number of replicas M.
        victim: number of the victim.
        codec: fp4 uses an all-gather; float32 with three replicas uses a reduce-scatter.
        heals: when a cut heals: ``late``: after the others have reacted and before the victim has; ``early``: after
            the victim has reacted and before the others have.
        raises: see `Policies.raise_on_loss`.
        min_replicas: the setting ``min_replicas``.
        silence_s: how long a replica may be silent before it is dropped; by default the test decides that.
        rejoins: whether the others train until a process that replaces the victim has joined.
    """

    fault: Literal["kill", "freeze", "cut", "links"]
    stage: Literal["before send", "in flight", "vote", "commit", "merge"] = "before send"
    on_failure: Literal["continue", "stop"] = "continue"
    num_replicas: int = 3
    victim: int = 1
    codec: str = "fp4"
    heals: Literal["", "late", "early"] = ""
    raises: bool = True
    min_replicas: int = 1
    silence_s: float = NEVER_S
    rejoins: bool = False

    def __post_init__(self) -> None:
        assert not self.heals or self.fault == "cut"

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(m for m in range(self.num_replicas) if m != self.victim)

    @property
    def goes_on(self) -> tuple[int, ...]:
        """The replicas that continue: a majority or the half with replica 0, or all that are left after a known end."""
        if self.fault == "links":
            return tuple(range(self.num_replicas))
        if self.on_failure == "stop" or len(self.others) < self.min_replicas:
            return ()
        if self.fault == "kill" or 2 * len(self.others) > self.num_replicas or 0 in self.others:
            return self.others
        return (self.victim,)

    @property
    def wire(self) -> TcpWire:
        return TcpWire(
            heartbeat_s=0.2,
            silence_s=self.silence_s,
            round_timeout_s=LIMIT_S,
            rendezvous_timeout_s=LIMIT_S,
            piece_bytes=130,  # one fp4 block
            continue_without_lost=self.on_failure == "continue",
            raise_on_loss=self.raises,
            min_replicas=self.min_replicas,
        )


@dataclass
class Outcome:
    """The report of a replica at its end.

    Attributes:
        digests: step -> digests of global parameters and outer state after it, by fragment.
        last: the same digests at the end.
        committed: round -> contributors.
        void: round -> reason.
        error: class and message of the error that ended the training, or None.
        lost: the replicas that the error names.
        steps: inner steps done, or begun when the error was raised.
        members: members of the view at the end.
    """

    digests: dict[int, tuple[str, ...]] = field(default_factory=dict)
    last: tuple[str, ...] = ()
    committed: dict[RoundId, tuple[int, ...]] = field(default_factory=dict)
    void: dict[RoundId, str] = field(default_factory=dict)
    error: tuple[str, str] | None = None
    lost: tuple[int, ...] = ()
    steps: int = 0
    members: tuple[int, ...] = ()

    def note(self, event: Event) -> None:
        if isinstance(event, RoundCommitted):
            self.committed[RoundId(event.fragment, event.outer_step)] = event.contributors
        elif isinstance(event, RoundVoid):
            self.void[RoundId(event.fragment, event.outer_step)] = event.reason


def name(scenario: Scenario) -> str:
    """Return the fields of a scenario that differ from the defaults."""
    words = [scenario.fault, scenario.stage, scenario.on_failure]
    for each in dataclasses.fields(Scenario)[3:]:
        if (value := getattr(scenario, each.name)) != each.default:
            words.append(f"{each.name}={value}")
    return ", ".join(words)


FAULTS = ("kill", "freeze", "cut")
CASES = [
    Scenario(fault=fault, stage=stage, on_failure=on_failure)
    for fault, stage, on_failure in itertools.product(
        FAULTS, ("before send", "in flight", "vote", "commit"), ("continue", "stop")
    )
]
CASES += [
    # just merged
    Scenario(fault="kill", stage="merge"),
    Scenario(fault="freeze", stage="merge", on_failure="stop"),
    # the first and the last replica
    Scenario(fault="kill", stage="vote", victim=0),
    Scenario(fault="kill", stage="in flight", victim=2, on_failure="stop"),
    Scenario(fault="freeze", stage="in flight", victim=0),
    Scenario(fault="freeze", stage="vote", victim=2),
    Scenario(fault="cut", stage="vote", victim=0, on_failure="stop"),
    Scenario(fault="cut", stage="commit", victim=2),
    # two replicas: if they only lose contact, the side with replica 0 counts as the larger one
    Scenario(fault="kill", stage="in flight", victim=0, num_replicas=2),
    Scenario(fault="kill", stage="vote", victim=1, num_replicas=2),
    Scenario(fault="freeze", stage="vote", victim=0, num_replicas=2),
    Scenario(fault="freeze", stage="before send", victim=1, num_replicas=2),
    Scenario(fault="freeze", stage="commit", victim=0, num_replicas=2, on_failure="stop"),
    Scenario(fault="cut", stage="in flight", victim=0, num_replicas=2),
    Scenario(fault="cut", stage="vote", victim=1, num_replicas=2),
    # two are too few to continue
    Scenario(fault="kill", stage="commit", min_replicas=3),
    Scenario(fault="freeze", stage="vote", min_replicas=3, raises=False),
    # payloads by reduce-scatter
    Scenario(fault="kill", stage="in flight", codec="float32"),
    Scenario(fault="kill", stage="vote", codec="float32", on_failure="stop"),
    Scenario(fault="freeze", stage="in flight", codec="float32"),
    Scenario(fault="cut", stage="vote", codec="float32"),
    # the owner checks `failure` and `stop_step` instead of an exception
    Scenario(fault="kill", stage="in flight", on_failure="stop", raises=False),
    Scenario(fault="freeze", stage="vote", on_failure="stop", raises=False),
    Scenario(fault="freeze", stage="before send", raises=False),
    Scenario(fault="cut", stage="commit", raises=False),
    # every replica stays
    Scenario(fault="links", stage="before send"),
    Scenario(fault="links", stage="in flight", on_failure="stop"),
    Scenario(fault="links", stage="vote", codec="float32"),
    Scenario(fault="links", stage="commit", num_replicas=2),
    # the clock decides, not the test
    Scenario(fault="freeze", stage="before send", silence_s=4.0),
    Scenario(fault="cut", stage="in flight", on_failure="stop", silence_s=4.0),
    # the cut heals
    Scenario(fault="cut", stage="before send", heals="late"),
    Scenario(fault="cut", stage="in flight", heals="late", on_failure="stop"),
    Scenario(fault="cut", stage="vote", heals="late", raises=False),
    Scenario(fault="cut", stage="in flight", heals="early"),
    Scenario(fault="cut", stage="vote", heals="early", on_failure="stop"),
    Scenario(fault="cut", stage="commit", heals="late", victim=1, num_replicas=2),
]
