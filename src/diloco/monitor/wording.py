"""The texts of console output about events, shared by the live and the plain console."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from diloco import events
from diloco.monitor.progress import RunProgress
from diloco.units import format_bytes, format_count, format_duration, format_perplexity, format_ratio, visible_lines

__all__ = [
    "Rows",
    "ending",
    "exit_code",
    "facts",
    "fragments_in_flight",
    "line",
    "nothing_committed",
    "summary",
    "table",
    "title",
]

Rows = Sequence[tuple[str, str]]  # (name, value) pairs in the order to print them


def table(rows: Rows, *, width: int = 80) -> str:
    """Format rows as two aligned columns within ``width`` characters. Long values wrap within their column.

    >>> print(table([("codec", "fp4"), ("schedule", "every fragment each 100 steps")], width=32))
      codec     fp4
      schedule  every fragment each
                100 steps
    >>> print(table([("others join by", "diloco train --data 'a  b' --run mine")], width=32))
      others join by  diloco train --data 'a  b' --run mine
    """
    names = max((len(name) for name, _ in rows), default=0)
    lines = []
    for name, value in rows:
        lead = f"  {name:<{names}}  "
        # paths and digests are not broken, so that they can be copied
        wrap = textwrap.TextWrapper(width, lead, " " * len(lead), break_long_words=False, break_on_hyphens=False)
        text = visible_lines(value)
        # nor is a command, which could not be pasted
        lines.append(lead + text if value.startswith("diloco ") else wrap.fill(text) or lead.rstrip())
    return "\n".join(lines)


def title(event: events.RunStarted) -> str:
    """Return the first line of a run's output.

    >>> title(events.RunStarted(step=300, total_steps=1000, algorithm="streaming", num_replicas=4,
    ...                         parameters=1_086_720, tokens_per_step=2048))
    'streaming, 4 replicas, 1.1M parameters, 1000 steps, resuming after step 300'
    """
    size = f"{format_count(event.parameters)} parameters, {event.total_steps} steps"
    text = f"{event.algorithm}, {_counted(event.num_replicas)}, {size}"
    return f"{text}, resuming after step {event.step}" if event.step else text


def facts(event: events.RunStarted) -> Rows:
    """Return the checkpoint that the run resumes from, if any, and the facts derived from its settings."""
    resumed = [("resumed from", event.resumed_from)] if event.resumed_from else []
    return [*resumed, *event.facts.items()]


def line(event: events.Event, progress: RunProgress) -> str:
    """Return the line for an event for which `RunProgress.take` returned True."""
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
            return f"now {_counted(len(event.members))}: {event.reason}"
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


def _counted(replicas: int) -> str:
    return "1 replica" if replicas == 1 else f"{replicas} replicas"


def ending(progress: RunProgress) -> str:
    """Return the line above the summary."""
    if progress.step >= progress.total_steps:
        return "finished"
    return f"stopped after step {progress.step} of {progress.total_steps}"


def fragments_in_flight(rounds: Sequence[tuple[int, int]]) -> str:
    """Format the rounds in flight, given as (fragment, outer step), in about 30 characters at most.

    >>> fragments_in_flight([]), fragments_in_flight([(2, 14)]), fragments_in_flight([(0, 15), (2, 14), (3, 14)])
    ('none', 'fragment 2 (outer step 14)', 'fragments 0, 2, 3')
    >>> fragments_in_flight([(fragment, 3) for fragment in range(12)])
    'fragments 0, 1, 2 and 9 more'
    """
    if not rounds:
        return "none"
    if len(rounds) == 1:
        return f"fragment {rounds[0][0]} (outer step {rounds[0][1]})"
    names = [str(fragment) for fragment, _ in rounds]
    more = f" and {len(names) - 3} more" if len(names) > 5 else ""
    return f"fragments {', '.join(names[:3] if more else names)}{more}"


def summary(values: Mapping[str, Any]) -> Rows:
    """Return the rows of a finished run's summary, skipping values that are missing or None.

    The bytes that one replica sent are compared with ``data_parallel_bytes_per_replica``, which it would have sent in
    data-parallel training.

    >>> for row in summary({"heldout_loss": 2.5, "perplexity": None, "sent_bytes_per_replica": 2_000_000,
    ...                     "data_parallel_bytes_per_replica": 824_000_000, "rounds_committed": 12, "rounds_void": 0}):
    ...     print(*row, sep=": ")
    held-out loss: 2.5000 nats per token
    sent: 2.0 MB per replica, 412x less than data-parallel (824 MB)
    rounds: 12 committed, 0 void
    """
    given = {name: value for name, value in values.items() if value is not None}
    rows: dict[str, str] = {}
    if "heldout_loss" in given:
        rows["held-out loss"] = f"{given['heldout_loss']:.4f} nats per token"
    if "perplexity" in given:
        rows["perplexity"] = format_perplexity(given["perplexity"])
    if "bits_per_byte" in given:
        rows["bits per byte"] = f"{given['bits_per_byte']:.4f}"
    if "steps" in given and "tokens" in given:
        rows["trained"] = f"{given['steps']} steps, {format_count(given['tokens'])} tokens"
        if "wall_s" in given:
            rows["trained"] += f", in {format_duration(given['wall_s'])}"
    if "tokens_per_s" in given:
        used = given.get("model_flops_utilization")
        rows["speed"] = f"{format_count(given['tokens_per_s'])} tokens/s"
        rows["speed"] += f", {100 * used:.1f} % of the device's peak (MFU)" if used is not None else ""
    sent, baseline = given.get("sent_bytes_per_replica"), given.get("data_parallel_bytes_per_replica", 0)
    if sent is not None:
        rows["sent"] = _against_data_parallel(sent, baseline)
        start, steps = given.get("shared_start_steps", 0), given.get("steps", 0)
        if 0 < start < steps:
            later = sent - given.get("shared_start_sent_bytes_per_replica", 0)
            rows["after start"] = _against_data_parallel(later, baseline * (steps - start) / steps)
    if "received_bytes_per_replica" in given:
        rows["received"] = f"{format_bytes(given['received_bytes_per_replica'])} per replica"
    if "compute_utilization" in given:
        rows["utilisation"] = f"{100 * given['compute_utilization']:.1f} % compute"
    if "rounds_committed" in given:
        rows["rounds"] = f"{given['rounds_committed']} committed, {given.get('rounds_void', 0)} void"
    if "global_params_digest" in given:
        rows["digest"] = str(given["global_params_digest"])
    if "out" in given:
        rows["run folder"] = str(given["out"])
    return list(rows.items())


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


def _against_data_parallel(sent: float, baseline: float) -> str:
    """Compare the bytes that one replica sent with those of data-parallel training, whichever are more.

    >>> _against_data_parallel(0, 1000), _against_data_parallel(1000, 0)
    ('nothing (data-parallel: 1.0 kB)', '1.0 kB per replica')
    >>> print(_against_data_parallel(1000, 1000), _against_data_parallel(2500, 1000), sep="; ")
    1.0 kB per replica, as much as data-parallel; 2.5 kB per replica, 2.5x as much as data-parallel (1.0 kB)
    """
    if baseline <= 0:
        return f"{format_bytes(sent)} per replica"
    if sent <= 0:
        return f"nothing (data-parallel: {format_bytes(baseline)})"
    text = f"{format_bytes(sent)} per replica"
    if max(sent, baseline) < 1.005 * min(sent, baseline):
        return f"{text}, as much as data-parallel"
    if sent > baseline:
        return f"{text}, {format_ratio(sent / baseline)} as much as data-parallel ({format_bytes(baseline)})"
    return f"{text}, {format_ratio(baseline / sent)} less than data-parallel ({format_bytes(baseline)})"
