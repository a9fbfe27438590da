"""``diloco evaluate``: held-out loss of the global parameters that a run left."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from diloco.data.packed import Tokens
    from diloco.data.tokenizer import Tokenizer

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
    evaluation = evaluate(
        trained.model,
        trained.tokenizer,
        _tokens(settings.data, given.data, trained.tokenizer),
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


def _tokens(data: DataSettings, paths: tuple[Path, ...], tokenizer: Tokenizer) -> Tokens:
    from diloco.data.heldout import heldout_tokens, read_texts

    return tokenizer.encode_documents(list(read_texts(data, paths))) if paths else heldout_tokens(data, tokenizer)
