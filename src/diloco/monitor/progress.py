"""The current state of a run, gathered from its events, and the line that an event deserves. Nothing here does I/O."""

import math
import re
import statistics
from collections import deque
from collections.abc import Mapping
from itertools import islice

from diloco import events
from diloco.membership import names_of
from diloco.metrics import metrics_of
from diloco.units import columns, format_bytes, format_count, format_duration, format_perplexity

_WINDOW = 100  # steps over which the speed is measured
_RECENT = 20  # steps over which the loss is averaged
_MAX_SITES = 16  # of the table of held-out losses


class RunProgress:
    """The state of the run, as a display shows it.

    A round counts once, however many replicas report it: as committed as soon as one replica reports that it applied
    the round, and as void as soon as one reports that the round was void.
    """

    def __init__(self) -> None:
        self.names: Mapping[str, str] = {}  # the names of replicas that have one, by number
        self.step = self.total_steps = 0  # inner steps finished, and to train
        self.shared_start_steps = 0  # the first ones, which average gradients
        self.last: events.StepFinished | None = None  # the last finished step
        self.heldout_loss: float | None = None  # the last held-out loss
        self.best_heldout_loss: float | None = None  # the lowest held-out loss of the run
        self.peak_known = False  # whether the peak rate of the device is known
        self.committed = self.void = 0  # rounds of the run
        self._window: deque[tuple[float, events.StepFinished]] = deque(maxlen=_WINDOW)  # (when it was received, step)
        # (outcome, fragment) -> the outer step of the last round with it, and the replicas that reported it
        self._reported: dict[tuple[type[events.Event], int], tuple[int, set[int]]] = {}
        self._void_reason = self._round_note = ""
        self._told: set[int | str] = set()  # fragments whose values were clamped, and choices of an exchange
        self._skipped = False

    def take(self, event: events.Event, now_s: float) -> str:
        """Process ``event``, received at ``now_s``, and return the line that it deserves, with names of replicas.

        A round deserves none if nothing disturbed it, or the same as before, or if another replica has reported it.
        """
        line = self._take(event, now_s)

        def names(numbers: re.Match[str]) -> str:
            if self.names.keys().isdisjoint(numbers[1].split(", ")):
                return numbers[0]
            return ", ".join(self.names.get(number, f"replica {number}") for number in numbers[1].split(", "))

        return re.sub(r"\breplicas? (\d+(?:, \d+)*)", names, line)

    def _take(self, event: events.Event, now_s: float) -> str:
        self.step = max(self.step, event.step)
        match event:
            case events.RunStarted():
                self.total_steps, self.names = event.total_steps, event.names
                self.shared_start_steps = event.shared_start_steps
                self.best_heldout_loss = event.best_heldout_loss
                self.committed, self.void = event.rounds_committed, event.rounds_void
                self.peak_known = event.peak_flops_per_s is not None
            case events.StepFinished():
                self.last = event
                self._window.append((now_s, event))
                before, self._skipped = self._skipped, event.skipped_replicas > 0
                if self._skipped and not before:
                    return f"the gradient scaler skipped the inner step of {counted(event.skipped_replicas)}"
            case events.RoundSent() if event.saturated and event.fragment not in self._told:
                self._told.add(event.fragment)
                what = "values outside the codec's range were clamped (reported once per fragment)"
                return f"fragment {event.fragment}: {what}"
            case events.RoundCommitted():
                self.committed += self._is_new(event)
                if event.note and event.note != self._round_note:
                    self._round_note = event.note
                    return f"fragment {event.fragment}, outer step {event.outer_step}, committed: {event.note}"
                if event.choice and event.choice not in self._told:
                    self._told.add(event.choice)
                    return event.choice
            case events.RoundVoid():
                is_new = self._is_new(event)
                self.void += is_new
                # a change of the members has a line of its own
                if is_new and event.reason != self._void_reason and not event.view_changed:
                    self._void_reason = event.reason
                    return f"round void: fragment {event.fragment}, outer step {event.outer_step}: {event.reason}"
            case events.ViewChanged():
                self.names = event.names
                return _change(event)
            case events.Lost():
                return f"{event.reason} It is searching for the other replicas."
            case events.Note():
                return event.text
            case events.CheckpointSaved():
                return f"checkpoint {event.path} ({format_bytes(event.size_bytes)} in {format_duration(event.save_s)})"
            case events.Interrupted():
                return f"{event.signal}: the state has been saved and the run stops"
            case events.Evaluated():
                best, self.heldout_loss = self.best_heldout_loss, event.heldout_loss
                is_best = math.isfinite(event.heldout_loss) and (best is None or event.heldout_loss < best)
                if is_best:
                    self.best_heldout_loss = event.heldout_loss
                figures = f"perplexity {format_perplexity(event.perplexity)}  {event.bits_per_byte:.4f} bits per byte"
                mark = "  (best)" if is_best else ""
                if event.final:
                    mark = "  (final)"
                return f"held-out loss {event.heldout_loss:.4f}  {figures}{mark}{_beside(event, self.names)}"
        return ""

    @property
    def loss(self) -> float | None:
        """The mean training loss of the last steps in nats per token; not finite if the last is not; None before."""
        losses = [step.loss for _, step in self._window][-_RECENT:]
        if not losses:
            return None
        if not math.isfinite(losses[-1]):
            return losses[-1]
        return statistics.fmean(filter(math.isfinite, losses))

    def recent(self, field: str) -> float | None:
        """Return a metric of `StepFinished` as a display shows it; None if it is unknown.

        The loss is `loss`. Of a rate it is the mean over the last steps by their time, without the first of the run,
        which includes compilation and cold caches; of others the last value.
        """
        if field == "loss":
            return self.loss
        if metrics_of(events.StepFinished)[field].kind != "rate":
            return getattr(self.last, field, None)
        total, spent_s = 0.0, 0.0
        for _, step in islice(self._window, 1, None):
            if (value := getattr(step, field)) is not None:
                total, spent_s = total + value * step.step_s, spent_s + step.step_s
        return total / spent_s if spent_s else None

    @property
    def left_s(self) -> float | None:
        """The seconds until the run ends at the pace of the last steps, pauses included; None before the second.

        Steps after the shared start take as long as those in it without the exchange, until their own pace is known.
        """
        if len(self._window) < 2:
            return None
        now_s, last = self._window[-1]
        left, shared = max(0, self.total_steps - last.step), max(0, self.shared_start_steps - last.step)
        alone = [(at_s, step) for at_s, step in self._window if step.step >= self.shared_start_steps]
        began_s, first = alone[0] if len(alone) > 1 else self._window[0]
        pace_s = (now_s - began_s) / max(1, last.step - first.step)
        if len(alone) > 1 or not self.shared_start_steps:
            return pace_s * left
        return pace_s * (shared + (left - min(shared, left)) * last.compute_utilization)

    def _is_new(self, event: events.RoundCommitted | events.RoundVoid) -> bool:
        """Return whether no other replica has reported this outcome of the round."""
        outcome = (type(event), event.fragment)
        outer_step, replicas = self._reported.get(outcome, (-1, set()))
        # a second report from the same replica is a new round: a void round is repeated under its outer step
        if outer_step == event.outer_step and event.replica not in replicas:
            replicas.add(event.replica)
            return False
        self._reported[outcome] = (event.outer_step, {event.replica})
        return True


def counted(replicas: int) -> str:
    """Return a number of replicas with its noun."""
    return "1 replica" if replicas == 1 else f"{replicas} replicas"


def _beside(event: events.Evaluated, names: Mapping[str, str]) -> str:
    """Return what stands below a held-out loss where each replica has its own data: lines, or ""."""
    lines = []
    if event.local_loss is not None:
        lines.append(f"with the local parameters of this replica: {event.local_loss:.4f}")
    if len(event.sites) > 1:
        rows = []
        for number, site in [*event.sites.items()][:_MAX_SITES]:
            rows.append(_site_row(names.get(number, f"replica {number}"), site))
        if more := len(event.sites) - len(rows):
            rows.append([f"{more} more", "", "", "", ""])
        mean = "-" if event.sites_loss is None else f"{event.sites_loss:.4f}"
        rows.append(["mean by tokens", mean, "", "", ""])
        lines.append(columns(["own data of", "loss", "tokens", "passes", "at step"], rows))
    return "".join(f"\n{line}" for line in lines)


def _site_row(name: str, site: events.Site) -> list[str]:
    loss = "-" if site.loss is None else f"{site.loss:.4f}"
    return [name, loss, format_count(site.tokens), f"{site.passes:.1f}", str(site.step)]


_CAUSES = {
    "silent": "nothing was received in time",
    "ended": "the process has ended",
    "unreachable": "the connection ended and can't be reopened",
    "late": "late",
    "fault": "its rounds or messages are at fault",
    "ejected": "ejected",
    "restarted": "started again",
    "interrupted": "a connection was interrupted",
}
"""`ViewChanged.cause` -> what a line says of it; the others say nothing about a loss."""


def _change(event: events.ViewChanged) -> str:
    left = tuple(replica for replica in event.left if replica not in event.lost)
    why = f" ({_CAUSES[event.cause]})" if event.cause in _CAUSES else ""
    parts = []
    if event.lost:
        parts.append(f"{names_of(event.lost)} {'is' if len(event.lost) == 1 else 'are'} gone{why}")
    if left:
        parts.append(f"{names_of(left)} {'has' if len(left) == 1 else 'have'} left")
    if event.joined:
        parts.append(f"{names_of(event.joined)} joined")
    rest = counted(len(event.members))
    if event.left:
        rest += " continues" if len(event.members) == 1 else " continue"
    return "; ".join([*(parts or [f"the replicas connect again{why}"]), rest])
