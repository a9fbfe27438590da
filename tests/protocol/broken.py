"""Members that are broken, outdated or damaged: what they send in place of what they should."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from diloco.membership import Report
from diloco.protocol import Change, WireMessage
from tests.protocol.simulated import Rank

Instead = Callable[[int, Any], Iterable[Any]]
"""(receiver, message) -> the messages that a broken rank sends instead; see `Rank.instead`."""


def changed(kind: type[WireMessage], to: Sequence[int] = range(99), **fields: Any) -> Instead:
    """Change these fields in each message of a type to the ranks ``to``."""
    return lambda receiver, message: [
        msgspec.structs.replace(message, **fields) if isinstance(message, kind) and receiver in to else message
    ]


def without(kind: type[WireMessage], to: Sequence[int] = range(99)) -> Instead:
    """Send no messages of a type to the ranks ``to``."""
    return lambda receiver, message: [] if isinstance(message, kind) and receiver in to else [message]


def report(rank: int, **facts: Any) -> Change:
    """Return a report that begins a view change."""
    return Change(Report(rank, facts.pop("view_id", 0), **{"number": 1, **facts}), "it begins", "other")


def check_whole(ranks: Sequence[Rank]) -> None:
    """Check that none of these has ended, that all are in one view, and that they agree on every round."""
    assert {each.left for each in ranks} == {""}
    (view,) = {each.view for each in ranks}
    assert {each.replica for each in ranks} <= {*view.members}
    for each in ranks:
        assert each.step == each.STEPS
        for step, committed in each.outcomes.items():
            assert committed == ranks[0].outcomes.get(step, committed), "a round is applied by some"
        for step, average in each.averages.items():
            assert average.contributors == ranks[0].averages.get(step, average).contributors
