"""``diloco evaluate``: held-out loss of the global parameters that a run left."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, arg

from diloco.config.configuration import Configuration
from diloco.config.keys import build
from diloco.config.run_plan import CONFIG_FILE
from diloco.config.toml import read_toml
from diloco.data.settings import DataSettings
from diloco.errors import ConfigurationError
from diloco.train.checks import check_device
from diloco.train.settings import TrainSettings

__all__ = ["run"]

DESCRIPTION = """Held-out loss, perplexity and bits per byte of the global parameters.

Without --data: on what the run held out, with the same numbers as at its end.

Examples:
  diloco evaluate runs/streaming-tiny
  diloco evaluate runs/streaming-tiny/checkpoints/step-00000300 --json
  diloco evaluate runs/streaming-tiny --data notes/ --sequences 0"""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What follows `diloco evaluate`."""

    path: Annotated[Positional[Path], arg(metavar="RUN", help_behavior_hint="")]
    """Run folder (its latest checkpoint) or checkpoint."""
    data: Annotated[tuple[Path, ...], arg(metavar="PATH...", help_behavior_hint="")] = ()
    """Files or folders to evaluate on, all of their text. Default: what the run held out."""
    sequences: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Sequences to evaluate on, spread evenly; 0: all. Default: as the run."""
    device: Annotated[str, arg(metavar="TEXT")] = "auto"
    """cpu, cuda, cuda:N, or auto."""
    json: Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")] = False
    """Print one JSON object."""


def run(arguments: Sequence[str]) -> int:
    """Evaluate and print."""
    given = tyro.cli(Arguments, prog="diloco evaluate", description=DESCRIPTION, args=list(arguments))
    check_device("--device", given.device)
    if given.sequences is not None and given.sequences < 0:
        raise ConfigurationError(f"--sequences {given.sequences} was given; 0 or more would work. Nothing was started.")

    from diloco.train.components import choose_device
    from diloco.train.evaluate import evaluate
    from diloco.train.trained import load_trained

    trained = load_trained(given.path, choose_device(TrainSettings(device=given.device)))
    config_file = trained.path.parent.parent / CONFIG_FILE
    settings = build(Configuration, read_toml(config_file, Configuration))
    documents = _documents(settings.data, given.data)
    evaluation = evaluate(
        trained.model,
        trained.tokenizer,
        trained.tokenizer.encode_documents(list(documents)),
        sequence_length=trained.sequence_length,
        batch_size=settings.train.batch_size * 8,  # as during training, for the same bits
        sequences=settings.evaluation.sequences if given.sequences is None else given.sequences,
    )
    result = {
        "heldout_loss": evaluation.loss,
        "perplexity": evaluation.perplexity,
        "bits_per_byte": evaluation.bits_per_byte,
        "tokens": evaluation.tokens,
        "step": trained.step,
        "checkpoint": str(trained.path),
    }
    if given.json:
        print(json.dumps(result, indent=2))
        return 0
    whose = "replica 0 (independent replicas)" if settings.algorithm == "none" else "global parameters"
    print(f"{trained.path}, step {trained.step}, {whose}")
    print(f"held-out loss  {evaluation.loss:.4f} nats per token")
    print(f"perplexity     {evaluation.perplexity:.4g}")
    print(f"bits per byte  {evaluation.bits_per_byte:.4f}")
    print(f"tokens         {evaluation.tokens:,}")
    return 0


def _documents(data: DataSettings, paths: tuple[Path, ...]) -> Iterable[str]:
    from diloco.data.corpus import split_documents
    from diloco.data.text import read_documents

    source = dataclasses.replace(data, paths=paths) if paths else data
    texts = read_documents(source.paths, text_field=source.text_field, document_separator=source.document_separator)
    return texts if paths else split_documents(texts, data.heldout_fraction, data.max_documents)[1]
