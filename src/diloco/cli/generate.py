"""``diloco generate``: continue a text with the global parameters that a run left."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, arg

from diloco.errors import ConfigurationError, DataError
from diloco.train.checks import check_device
from diloco.train.settings import TrainSettings

__all__ = ["run"]

DESCRIPTION = """Continue a text with a trained model.

Examples:
  diloco generate runs/streaming-tiny --prompt "import "
  diloco generate runs/streaming-tiny --prompt "def " --num-samples 3 --top-k 20
  diloco generate runs/streaming-tiny --prompt "def " --temperature 0
  diloco generate exported --prompt-file beginning.txt --stop "\\n\\n"
  cat beginning.txt | diloco generate runs/streaming-tiny --prompt-file - --json"""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What follows `diloco generate`."""

    path: Annotated[Positional[Path], arg(metavar="RUN", help_behavior_hint="")]
    """Run folder (its latest checkpoint), checkpoint, or folder of transformers (Llama, Qwen3, Arcee, Apertus)."""
    checkpoint: Annotated[int | None, arg(metavar="STEP", help_behavior_hint="")] = None
    """Inner steps of the checkpoint to take. Default: the latest."""
    replica: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Use this replica's own parameters. Default: the global ones."""
    prompt: Annotated[str, arg(metavar="TEXT", help_behavior_hint="")] = ""
    """What to continue. Default: nothing, the beginning of a document."""
    prompt_file: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """A file with what to continue, UTF-8, to its last character; -: standard input."""
    tokens: int = 200
    """Tokens to generate at most; the end of the document ends a sample."""
    stop: Annotated[tuple[str, ...], arg(metavar="TEXT...", help_behavior_hint="")] = ()
    r"""End a sample before any of these texts; \n, \t and \\ are understood."""
    temperature: float = 0.8
    """Divides the logits: below 1 likelier, above 1 wilder, 0 always the likeliest token."""
    top_k: Annotated[int | None, arg(metavar="INT")] = 50
    """Draw from this many likeliest tokens; None: from all."""
    top_p: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Draw from the likeliest tokens that together have this probability. Default: from all."""
    min_p: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Leave out tokens less likely than this share of the likeliest one's probability. Default: none."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that have occurred are less likely."""
    seed: int = 0
    """Of the draws; the same seed gives the same text."""
    num_samples: int = 1
    """How many texts."""
    context: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Tokens that the model sees at most. Default: as it was trained."""
    device: Annotated[str, arg(metavar="TEXT")] = "auto"
    """cpu, cuda, cuda:N, or auto."""
    json: Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")] = False
    """Print one JSON list of all samples, when they are done."""

    def __post_init__(self) -> None:
        check_device("--device", self.device)
        if self.num_samples < 1:
            raise ConfigurationError(
                f"--num-samples {self.num_samples} was given; at least 1 would work. Nothing was started."
            )
        if self.prompt and self.prompt_file is not None:
            raise ConfigurationError(
                f"--prompt was given together with --prompt-file {self.prompt_file}; one of the two would work. "
                "Nothing was started."
            )


def run(arguments: Sequence[str]) -> int:
    """Generate and print, as it comes."""
    given = tyro.cli(Arguments, prog="diloco generate", description=DESCRIPTION, args=list(arguments))
    prompt = given.prompt if given.prompt_file is None else _read(given.prompt_file)

    import torch

    from diloco.monitor.wording import visible
    from diloco.train.components import choose_device
    from diloco.train.generate import stream
    from diloco.train.text_stream import TextStream
    from diloco.train.trained import checkpoint_at, load_trained

    device = choose_device(TrainSettings(device=given.device))
    trained = load_trained(checkpoint_at(given.path, given.checkpoint), device, replica=given.replica)
    tokenizer = trained.tokenizer
    prompt_tokens = tokenizer.encode(prompt) or [tokenizer.eos_id]
    stops = [text.replace("\\n", "\n").replace("\\t", "\t").replace("\\\\", "\\") for text in given.stop]
    generator = torch.Generator(device).manual_seed(given.seed)
    samples: list[dict[str, Any]] = []

    def show(piece: str) -> None:
        if piece and not given.json:
            sys.stdout.write(visible(piece) if sys.stdout.isatty() else piece)
            sys.stdout.flush()

    for number in range(1, given.num_samples + 1):
        if given.num_samples > 1:
            show(f"--- sample {number} of {given.num_samples}\n")
        text, pieces, count = TextStream(tokenizer, stops), [prompt], 0
        show(prompt)
        new_tokens = stream(
            trained.model,
            prompt_tokens,
            max_new_tokens=given.tokens,
            temperature=given.temperature,
            top_k=given.top_k,
            top_p=given.top_p,
            min_p=given.min_p,
            repetition_penalty=given.repetition_penalty,
            generator=generator,
            stop_token=tokenizer.eos_id,
            window=trained.sequence_length if given.context is None else given.context,
        )
        for token in new_tokens:
            count += 1
            pieces.append(text.feed(token))
            show(pieces[-1])
            if text.stopped:
                break
        pieces.append(text.finish())
        show(pieces[-1] + "\n")
        ended = "stop" if text.stopped else "length" if count == given.tokens else "end of document"
        samples.append({"prompt": prompt, "text": "".join(pieces[1:]), "tokens": count, "ended_by": ended})
    if given.json:
        print(json.dumps(samples, indent=2))
    return 0


def _read(path: Path) -> str:
    """The prompt in a file, or on standard input."""
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"The prompt in {path} cannot be read: {error}. Nothing was generated.") from error
