"""The texts of console output about events, shared by the live and the plain console."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diloco import events
from diloco.membership import names_of
from diloco.monitor.progress import RunProgress
from diloco.units import format_bytes, format_count, format_duration, format_perplexity, format_ratio

__all__ = ["Rows", "ending", "exit_code", "facts", "line", "nothing_committed", "summary", "table", "title"]

Rows = Sequence[tuple[str, str]]  # (name, value) pairs in the order to print them


def table(rows: Rows, *, width: int = 80) -> str:
    """Format rows as two aligned columns within ``width`` characters. Long values wrap within their column.

    >>> print(table([("codec", "fp4"), ("schedule", "every fragment each 100 steps")], width=32))
      codec     fp4
      schedule  every fragment each
                100 steps
    """
    names = max((len(name) for name, _ in rows), default=0)
    lines = []
    for name, value in rows:
        lead = f"  {name:<{names}}  "
        # paths, digests and commands are not broken, so that they can be copied
        wrap = textwrap.TextWrapper(width, lead, " " * len(lead), break_long_words=False, break_on_hyphens=False)
        lines.append(lead + value if value.startswith("diloco ") else wrap.fill(value) or lead.rstrip())
    return "\n".join(lines)


def title(event: events.RunStarted) -> str:
    """Return the first line of a run's output.

    >>> title(events.RunStarted(step=300, total_steps=1000, algorithm="streaming", num_replicas=4,
    ...                         parameters=1_086_720, tokens_per_step=2048))
    'streaming, 4 replicas, 1.1M parameters, 1000 steps of 2,048 tokens, resuming after step 300'
    """
    size = f"{format_count(event.parameters)} parameters, {event.total_steps} steps of {event.tokens_per_step:,} tokens"
    text = f"{event.algorithm}, {_counted(event.num_replicas)}, {size}"
    return f"{text}, resuming after step {event.step}" if event.step else text


def facts(event: events.RunStarted, *, verbose: bool = False) -> Rows:
    """Return the facts about the run to print at its start; ``verbose``: all of them."""
    more = {"resumed from": event.resumed_from} if event.resumed_from else {}
    return [*event.facts.items(), *((more | dict(event.details)).items() if verbose else ())]


def line(event: events.Event, progress: RunProgress) -> str:
    """Return the text for an event for which `RunProgress.take` returned True, with the names of replicas."""
    return _named(_line(event, progress), progress.names)


def _line(event: events.Event, progress: RunProgress) -> str:
    match event:
        case events.Evaluated():
            text = (
                f"held-out loss {event.heldout_loss:.4f}  perplexity {format_perplexity(event.perplexity)}  "
                f"{event.bits_per_byte:.4f} bits per byte"
            )
            return f"{text}  (final)" if event.final else f"{text}{'  (best)' * (progress.best_step == event.step)}"
        case events.CheckpointSaved():
            return f"checkpoint {event.path} ({format_bytes(event.size_bytes)} in {format_duration(event.save_s)})"
        case events.RoundVoid():
            name = f"fragment {event.fragment}, outer step {event.outer_step}"
            return f"round void: {event.reason if name in event.reason else f'{name}: {event.reason}'}"
        case events.RoundCommitted():
            return f"fragment {event.fragment}, outer step {event.outer_step}, committed: {event.note}"
        case events.ViewChanged():
            return f"{_change(event)}\n{event.reason}" if progress.verbose else _change(event)
        case events.RoundSent():
            return (
                f"fragment {event.fragment}: values outside the codec's range were clamped (reported once per fragment)"
            )
        case events.StepFinished():
            return f"the gradient scaler skipped the inner step of {_counted(event.skipped_replicas)}"
        case events.Interrupted():
            return f"{event.signal}: the state has been saved and the run stops"
        case events.Note():
            return event.text
        case _:
            return type(event).__name__


def _change(event: events.ViewChanged) -> str:
    """Say in one sentence who came and went.

    >>> print(_change(events.ViewChanged(step=9, replica=0, view=3, members=(0, 1), joined=(), left=(2,), lost=(2,),
    ...     reason="replica 2 is lost: the connection to 10.0.0.3:29400 ended (0 bytes read) and can't be reopened "
    ...            "(10.0.0.3 can't be reached (no route)); replica 2 is lost; replicas 0, 1 continue")))
    replica 2 is gone (the connection ended and can't be reopened); 2 replicas continue
    """
    parts, left = [], tuple(each for each in event.left if each not in event.lost)
    if event.lost:
        parts.append(f"{names_of(event.lost)} {_be(event.lost, 'is', 'are')} gone ({_brief(event.reason)})")
    if left:
        parts.append(f"{names_of(left)} {_be(left, 'has', 'have')} left")
    if event.joined:
        parts.append(f"{names_of(event.joined)} joined")
    if not parts:
        parts.append(f"the replicas connect again ({_brief(event.reason)})")
    rest = f" {_be(event.members, 'continues', 'continue')}" if event.left else ""
    return f"{'; '.join(parts)}; {_counted(len(event.members))}{rest}"


def _be(replicas: Sequence[int], one: str, several: str) -> str:
    return one if len(replicas) == 1 else several


def _brief(reason: str) -> str:
    """Return the first clause of a reason, without what is in parentheses and without addresses."""
    before = ""
    while reason != before:  # parentheses in parentheses
        before, reason = reason, re.sub(r" ?\([^()]*\)", "", reason)
    clause = re.sub(r"^replicas? [\d, ]+ (is|are) lost: ", "", reason.partition("; ")[0])
    return re.sub(r" (at|from|to) ((Qm|12D3)\w+|\S+:\d+)", "", clause)


def _named(text: str, names: Mapping[str, str]) -> str:
    """Put the names of replicas in place of their numbers.

    >>> _named("replica 7 is late; replicas 5, 7 continue", {"7": "anna-pc"})
    'anna-pc is late; replica 5, anna-pc continue'
    """

    def name(numbers: re.Match[str]) -> str:
        if names.keys().isdisjoint(numbers[1].split(", ")):
            return numbers[0]
        return ", ".join(names.get(number, f"replica {number}") for number in numbers[1].split(", "))

    return re.sub(r"\breplicas? (\d+(?:, \d+)*)", name, text)


def _counted(replicas: int) -> str:
    return "1 replica" if replicas == 1 else f"{replicas} replicas"


def ending(progress: RunProgress) -> str:
    """Return the line above the summary."""
    done, total = progress.step, progress.total_steps
    return "finished" if done >= total else f"stopped after step {done} of {total}"


def summary(values: Mapping[str, Any], *, hint: bool = False) -> Rows:
    """Return the rows of a finished run's summary, skipping values that are missing or None.

    The bytes that one replica sent are compared with ``data_parallel_bytes_per_replica``, which it would have sent in
    data-parallel training. With ``hint``, two rows say how to see the curves of the run.

    >>> for row in summary({"heldout_loss": 2.5, "perplexity": None, "sent_bytes_per_replica": 2_000_000,
    ...                     "data_parallel_bytes_per_replica": 824_000_000, "rounds_committed": 12, "rounds_void": 0}):
    ...     print(*row, sep=": ")
    held-out loss: 2.5000 nats per token
    sent: 2.0 MB per replica; data-parallel: 824 MB, 412x as much
    rounds: 12 committed, 0 void
    """

    def part(name: str, text: str, of: Callable[[Any], Any] = lambda value: value) -> str:
        value = values.get(name)
        return "" if value is None else text.format(of(value))

    sent, baseline = values.get("sent_bytes_per_replica"), values.get("data_parallel_bytes_per_replica") or 0
    start, steps = values.get("shared_start_steps", 0), values.get("steps", 0)
    later = (sent or 0) - values.get("shared_start_sent_bytes_per_replica", 0)
    rows = {
        "held-out loss": [
            part("heldout_loss", "{:.4f} nats per token"),
            part("perplexity", "perplexity {}", format_perplexity),
            part("bits_per_byte", "{:.4f} bits per byte"),
        ],
        "trained": [
            part("steps", "{} steps"),
            part("tokens", "{} tokens", format_count),
            part("wall_s", "in {}", format_duration),
            part("tokens_per_s", "{} tokens/s", format_count),
            part("model_flops_utilization", "MFU {:.1%}"),
        ],
        "sent": [] if sent is None else [_sent(sent, baseline)],
        "after start": [_sent(later, baseline * (steps - start) / steps)] if 0 < start < steps else [],
        "utilisation": [part("compute_utilization", "{:.1%} compute")],
        "rounds": [part("rounds_committed", "{} committed"), part("rounds_void", "{} void")],
        "digest": [part("global_params_digest", "{}")],
        "run folder": [part("out", "{}")],
        "curves": [part("out", "diloco watch {}", shlex.quote)] if hint else [],
        "TensorBoard": ["--sinks tensorboard (pip install 'diloco[monitor]')"] if hint else [],
    }
    return [(name, ", ".join(filter(None, parts))) for name, parts in rows.items() if any(parts)]


def _sent(sent: float, baseline: float) -> str:
    text = f"{format_bytes(sent)} per replica" + (f"; data-parallel: {format_bytes(baseline)}" if baseline else "")
    return f"{text}, {format_ratio(baseline / sent)} as much" if sent and baseline else text


def exit_code(summary: Mapping[str, Any]) -> int:
    """Return the exit code of a run that ended with this summary: 130 if it was stopped, 1 if all rounds were void.

    >>> exit_code({"rounds_void": 2, "rounds_committed": 0}), exit_code({"rounds_void": 0, "rounds_committed": 0})
    (1, 0)
    """
    if summary.get("interrupted"):
        return 130
    return 1 if nothing_committed(summary) else 0


def nothing_committed(summary: Mapping[str, Any]) -> bool:
    """Return whether there were rounds and all of them were void."""
    return bool(summary.get("rounds_void")) and not summary.get("rounds_committed")
