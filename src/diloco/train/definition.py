"""What a checkpoint noted of a model whose source may be gone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from diloco.errors import CheckpointError
from diloco.train.settings import RunSettings

__all__ = ["stored_definition"]


def stored_definition(settings: RunSettings) -> Mapping[str, Any] | None:
    """What the run that goes on, or that this one begins from, noted of its model; None: nothing, or no such run.

    It counts for a model from the same source only.
    """
    if settings.model.source is None:
        return None
    from diloco.train.checkpoint import open_checkpoint

    for path in _places(settings):
        try:
            about = open_checkpoint(path).about
        except CheckpointError:
            continue  # whoever needs the checkpoint itself says what is wrong with it
        if about.get("definition") and about.get("model", {}).get("source") == settings.model.source:
            definition: Mapping[str, Any] = about["definition"]
            return definition
    return None


def _places(settings: RunSettings) -> Iterator[Path]:
    """Where checkpoints may be; on a machine with only some of a run's replicas, in their own folders."""
    resume, init_from = settings.checkpoint.resume, settings.train.init_from
    if resume is not None:
        yield resume
        yield from sorted(resume.glob("replica-*"))
    if init_from is not None and init_from.suffix != ".safetensors":
        yield init_from
