"""How much of the others' state has come."""

from __future__ import annotations

from collections.abc import Mapping

from diloco.events import StateFetched
from diloco.transport.base import Transport
from diloco.units import format_bytes

__all__ = ["FetchProgress"]


class FetchProgress:
    """Of fragments that are fetched one after the other.

    Args:
        transport: whose count of bytes tells what is on its way; other fetches over it would be counted, too.
        expected: fragment -> bytes of its state.
        step: inner steps done, for the events.
    """

    def __init__(self, transport: Transport, expected: Mapping[int, int], step: int) -> None:
        self._transport = transport
        self._expected = expected
        self._step = step
        self._fragment = next(iter(expected))
        self._here: set[int] = set()
        self._before = transport.fetched_bytes

    def begin(self, fragment: int) -> None:
        """From now on this fragment is fetched."""
        self._fragment, self._before = fragment, self._transport.fetched_bytes

    def end(self) -> StateFetched:
        """The fragment is here."""
        self._here.add(self._fragment)
        return self.now()

    def now(self) -> StateFetched:
        """What has come by now; bytes that came twice count once."""
        here, of_fragment = self._fragment in self._here, self._expected[self._fragment]
        came = of_fragment if here else min(of_fragment, self._transport.fetched_bytes - self._before)
        return StateFetched(
            step=self._step,
            fragment=self._fragment,
            fragment_received_bytes=came,
            fragment_expected_bytes=of_fragment,
            received_bytes=came + sum(self._expected[each] for each in self._here - {self._fragment}),
            expected_bytes=sum(self._expected.values()),
            here=here,
        )

    def __str__(self) -> str:
        now = self.now()
        came, expected = format_bytes(now.received_bytes), format_bytes(now.expected_bytes)
        of_fragment = _percent(now.fragment_received_bytes, now.fragment_expected_bytes)
        return (
            f"{_percent(now.received_bytes, now.expected_bytes)}, {came} of {expected}; fragment {now.fragment}: "
            f"{of_fragment}"
        )


def _percent(part: int, whole: int) -> str:
    """Rounded down: 100 % are all."""
    return f"{100 * part // max(1, whole)} %"
