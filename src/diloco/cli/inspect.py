"""``diloco inspect``: show what a checkpoint holds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import FlagCreatePairsOff, Positional, arg

from diloco.cli.tables import columns, facts_table
from diloco.config import parse_options
from diloco.errors import CheckpointError

if TYPE_CHECKING:
    from diloco.checkpoint import Checkpoint

__all__ = ["run"]

DESCRIPTION = """Show what a checkpoint holds. The command reads the manifest and loads no weights.

Examples:
  diloco inspect runs/streaming-tiny
  diloco inspect runs/streaming-tiny/checkpoints/step-00000300 --json"""


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """The options of `diloco inspect`."""

    path: Annotated[Positional[Path], arg(metavar="RUN", help_behavior_hint="")]
    """Run folder (its latest checkpoint) or checkpoint."""
    json: Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")] = False
    """Print the whole manifest as one JSON object."""


def run(arguments: Sequence[str]) -> int:
    """Print the contents of the manifest."""
    given = parse_options(InspectOptions, "inspect", DESCRIPTION, arguments)

    from diloco.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(given.path)
    try:
        print(json.dumps(_record(checkpoint), indent=2) if given.json else _text(checkpoint))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{checkpoint.path} describes itself in a way that is not valid: {error!r}. Add --json to see all of it."
        ) from error
    return 0


def _record(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "path": str(checkpoint.path),
        "step": checkpoint.step,
        "size_bytes": checkpoint.size_bytes,
        "versions": dict(checkpoint.versions),
        "about": dict(checkpoint.about),
        "parts": {
            part: {name: dataclasses.asdict(facts) for name, facts in files.items()}
            for part, files in checkpoint.parts.items()
        },
    }


def _text(checkpoint: Checkpoint) -> str:
    from diloco.units import format_bytes

    about = dict(checkpoint.about)
    fragments: list[dict[str, Any]] = about.pop("fragments", [])
    definition: dict[str, Any] = about.pop("definition", None) or {}
    in_flight: list[str] = about.pop("rounds_in_flight", [])
    facts = {
        "checkpoint": str(checkpoint.path),
        "step": f"{checkpoint.step:,}",
        "size": format_bytes(checkpoint.size_bytes),
        "versions": ", ".join(f"{name} {version}" for name, version in checkpoint.versions.items()),
        "in flight": ", ".join(in_flight) or "none",
        **({"architecture": f"{definition['architecture']}, its configuration in --json"} if definition else {}),
        **{name.replace("_", " "): _value(value) for name, value in about.items()},
    }
    blocks = [facts_table(facts, indent="")]
    if fragments:
        rows = [
            [str(f["index"]), f"{f['numel']:,}", str(len(f["parameters"])), str(f["outer_step"])] for f in fragments
        ]
        blocks.append(columns(["fragment", "parameters", "tensors", "outer steps"], rows))
    files = [
        [name, part, f"{entry.size_bytes:,}"]
        for part, entries in checkpoint.parts.items()
        for name, entry in entries.items()
    ]
    blocks.append(columns(["file", "part", "bytes"], files))
    return "\n\n".join(blocks)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_value(entry)}" for name, entry in value.items() if entry is not None)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
