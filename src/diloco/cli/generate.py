"""``diloco generate``: continue a text with the global parameters that a run left."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, arg

from diloco.errors import ConfigurationError
from diloco.train.checks import check_device
from diloco.train.settings import TrainSettings

__all__ = ["run"]

DESCRIPTION = """Continue a text with a trained model.

Examples:
  diloco generate runs/streaming-tiny --prompt "import "
  diloco generate runs/streaming-tiny --prompt "def " --num-samples 3 --top-k 20
  diloco generate runs/streaming-tiny --prompt "def " --temperature 0"""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What follows `diloco generate`."""

    path: Annotated[Positional[Path], arg(metavar="RUN", help_behavior_hint="")]
    """Run folder (its latest checkpoint) or checkpoint."""
    prompt: Annotated[str, arg(metavar="TEXT", help_behavior_hint="")] = ""
    """What to continue. Default: nothing, the beginning of a document."""
    tokens: int = 200
    """Tokens to generate at most; the end of the document ends a sample."""
    temperature: float = 0.8
    """Divides the logits: below 1 likelier, above 1 wilder, 0 always the likeliest token."""
    top_k: Annotated[int | None, arg(metavar="INT")] = 50
    """Draw from this many likeliest tokens; None: from all."""
    top_p: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Draw from the likeliest tokens that together have this probability. Default: from all."""
    seed: int = 0
    """Of the draws; the same seed gives the same text."""
    num_samples: int = 1
    """How many texts."""
    device: Annotated[str, arg(metavar="TEXT")] = "auto"
    """cpu, cuda, cuda:N, or auto."""


def run(arguments: Sequence[str]) -> int:
    """Generate and print, sample by sample."""
    given = tyro.cli(Arguments, prog="diloco generate", description=DESCRIPTION, args=list(arguments))
    check_device("--device", given.device)
    if given.num_samples < 1:
        raise ConfigurationError(
            f"--num-samples {given.num_samples} was given; at least 1 would work. Nothing was started."
        )

    import torch

    from diloco.monitor.wording import visible
    from diloco.train.components import choose_device
    from diloco.train.generate import generate
    from diloco.train.trained import load_trained

    device = choose_device(TrainSettings(device=given.device))
    trained = load_trained(given.path, device)
    tokenizer = trained.tokenizer
    generator = torch.Generator(device).manual_seed(given.seed)
    for number in range(1, given.num_samples + 1):
        tokens = generate(
            trained.model,
            tokenizer.encode(given.prompt) or [tokenizer.eos_id],
            max_new_tokens=given.tokens,
            temperature=given.temperature,
            top_k=given.top_k,
            top_p=given.top_p,
            generator=generator,
            stop_token=tokenizer.eos_id,
            window=trained.sequence_length,
        )
        if given.num_samples > 1:
            print(f"--- sample {number} of {given.num_samples}")
        text = given.prompt + tokenizer.decode(tokens)
        print(visible(text) if sys.stdout.isatty() else text, flush=True)
    return 0
