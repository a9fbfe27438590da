"""What ranks agree on beside their rounds: the arguments they train with, barriers, and where all of them stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from diloco.errors import ConfigurationError, RendezvousError
from diloco.protocol import events
from diloco.protocol.messages import facts_message
from diloco.protocol.registry import Entry
from diloco.transport.peers.runner import ProtocolRunner
from diloco.waiting import waiting_for

__all__ = ["Meetings"]


class Meetings(ProtocolRunner):
    """A rank that tells the others something and waits for what they tell. All methods are for the training thread."""

    def agree(self, facts: Mapping[str, str]) -> None:
        """As `Transport.agree`."""
        entry = Entry(self.rules.rank, str(self.connections.address), dict(facts))
        timeout_s = self.rules.round_timeout_s
        agreement, present = self._machine.agreement, self._machine.present

        def unready() -> list[int]:
            return sorted({self.rules.replica_of(rank) for rank in agreement.awaited(present())})

        self._post(events.Say(facts_message(entry)))
        with waiting_for(lambda: f"{_named(unready())} to make its DiLoCo", timeout_s), self._changed:
            self._wait_for(
                lambda: agreement.mine == entry and (agreement.refusal(present()) or not unready()), timeout_s
            )
            refusal, missing = agreement.refusal(present()), unready()
        if refusal:
            raise ConfigurationError(f"{refusal}. All replicas need the same arguments of DiLoCo.")
        if missing:
            raise RendezvousError(
                f"replica {self.rules.replica} has waited {timeout_s:g} s for {_named(missing)}, which "
                f"{'are' if len(missing) > 1 else 'is'} connected and not ready to train: no DiLoCo was made there.",
                replicas=missing,
            )

    def ask_to_stop(self) -> None:
        """Let `stop_step` of every rank agree on a step soon."""
        self._post(events.Say({"kind": "meet", "name": "stop"}))
        self._wait_for(lambda: self._machine.barriers.stopping, self.timing.silence_s)

    def stop_step(self) -> int | None:
        """The inner step after which all ranks stop; None if no rank has asked to stop."""
        if not self._machine.barriers.stopping:
            return None
        return max(self._met("stop").values()) + 1

    def meet(self, name: str, value: int) -> dict[int, int]:
        """Tell ``value`` at the barrier ``name``, and wait until all connected ranks have; each name is used once."""
        self._post(events.Say({"kind": "meet", "name": name, "value": value}))
        return self._met(name)

    def _met(self, name: str, *, unless: Callable[[], bool] = lambda: False) -> dict[int, int]:
        """The values told at a barrier, once all connected ranks have told theirs or ``unless`` holds."""
        barriers, present = self._machine.barriers, self._machine.present
        self._wait_for(lambda: unless() or not barriers.awaited(name, present()), self._guard_s())
        return barriers.said(name)

    def _guard_s(self) -> float:
        """Longer than any round takes, unless something unforeseen is wrong."""
        return 3 * self.rules.round_timeout_s + 3 * self.timing.silence_s


def _named(replicas: Sequence[int]) -> str:
    return f"replica{'s' if len(replicas) > 1 else ''} {', '.join(map(str, replicas))}"
