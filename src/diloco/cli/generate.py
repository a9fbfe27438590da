"""``diloco generate``: continue a text with a trained model."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, arg

from diloco.config.flags import parse_options
from diloco.devices import check_device
from diloco.errors import ConfigurationError, DataError
from diloco.trained.sampling import Sampling
from diloco.units import visible_lines

if TYPE_CHECKING:
    from diloco.trained.generate import TextStream
    from diloco.trained.load import Trained

__all__ = ["run"]

DESCRIPTION = """Continue a text with a trained model, or with --chat talk to it.

Examples:
  diloco generate runs/streaming-tiny --prompt "import "
  diloco generate runs/streaming-tiny --prompt "def " --num-samples 3 --top-k 20
  diloco generate runs/streaming-tiny --prompt "def " --temperature 0
  diloco generate exported --prompt-file beginning.txt --stop "\\n\\n"
  diloco generate runs/streaming-llama --chat
  cat beginning.txt | diloco generate runs/streaming-tiny --prompt-file - --json"""

_LARGEST_SEED = 2**63 - 1  # the largest that a torch generator takes


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
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
    chat: Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")] = False
    """Put the prompt to the model by its chat template, and show its answer; without a prompt: read questions line by
    line, and remember the conversation."""
    system: Annotated[str, arg(metavar="TEXT", help_behavior_hint="")] = ""
    """--chat: what the model is told before the conversation."""
    tokens: int = 200
    """Tokens to generate at most; the end of the document ends a sample."""
    stop: Annotated[tuple[str, ...], arg(metavar="TEXT...", help_behavior_hint="")] = ()
    r"""End a sample before any of these texts; \n, \t and \\ are understood."""
    seed: int = 0
    """Of the draws: the same seed gives the same text. Sample 2 is what the next seed gives, and so on."""
    num_samples: int = 1
    """How many texts."""
    batch_size: int = 8
    """Samples drawn together at most; fewer need less memory."""
    context: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Tokens that the model sees at most. Default: as it was trained."""
    device: Annotated[str, arg(metavar="TEXT")] = "auto"
    """cpu, cuda, cuda:N, mps, or auto."""
    json: Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")] = False
    """Print one JSON list of all samples, when they are done."""
    sampling: OmitArgPrefixes[Sampling] = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        check_device("--device", self.device)
        for flag, value, least in (
            ("--num-samples", self.num_samples, 1),
            ("--batch-size", self.batch_size, 1),
            ("--tokens", self.tokens, 0),
            ("--seed", self.seed, 0),
        ):
            if value < least:
                raise ConfigurationError(f"{flag} {value} must be at least {least}.")
        if self.seed + self.num_samples > _LARGEST_SEED:
            raise ConfigurationError(f"--seed {self.seed} must be at most {_LARGEST_SEED - self.num_samples}.")
        if self.chat and (self.json or self.stop or self.num_samples != 1):
            raise ConfigurationError(
                "--chat cannot be combined with --json, --stop or --num-samples: it gives one answer at a time, which "
                "ends where the model ends it."
            )
        if self.system and not self.chat:
            raise ConfigurationError("--system needs --chat.")
        if self.prompt and self.prompt_file is not None:
            raise ConfigurationError(f"--prompt cannot be given together with --prompt-file {self.prompt_file}.")


def run(arguments: Sequence[str]) -> int:
    """Generate and print, as it comes."""
    given = parse_options(GenerateOptions, "generate", DESCRIPTION, arguments)
    prompt = given.prompt if given.prompt_file is None else _read(given.prompt_file)

    import torch

    from diloco.trained.generate import TextStream, generate_together
    from diloco.trained.load import load_trained

    trained = load_trained(given.path, given.device, step=given.checkpoint, replica=given.replica)
    if given.chat:
        return _chat(trained, given, prompt)
    tokenizer, context = trained.tokenizer, trained.length(given.context, "--context")
    device = next(trained.model.parameters()).device
    stops = [text.replace("\\n", "\n").replace("\\t", "\t").replace("\\\\", "\\") for text in given.stop]
    samples = []
    for number in range(1, given.num_samples + 1):
        heading = f"--- sample {number} of {given.num_samples}\n" if given.num_samples > 1 else ""
        samples.append(_Sample(TextStream(tokenizer, stops), given.tokens, heading + prompt))
    shown = () if given.json else samples
    _show(shown)
    for first in range(0, given.num_samples, given.batch_size):
        together = samples[first : first + given.batch_size]
        tokens = generate_together(
            trained.model,
            tokenizer.encode(prompt) or [tokenizer.eos_id],
            [torch.Generator(device).manual_seed(given.seed + first + offset) for offset in range(len(together))],
            max_new_tokens=given.tokens,
            sampling=given.sampling,
            stop_token=tokenizer.eos_id,
            window=context,
        )
        for drawn in tokens:
            for sample, token in zip(together, drawn, strict=True):
                sample.take(token)
            _show(shown)
            if all(sample.ended_by for sample in together):
                break
        for sample in together:
            sample.end()
        _show(shown)
    if given.json:
        records = [
            {"prompt": prompt, "text": sample.text, "tokens": sample.tokens, "ended_by": sample.ended_by}
            for sample in samples
        ]
        print(json.dumps(records, indent=2))
    return 0


def _chat(trained: Trained, given: GenerateOptions, prompt: str) -> int:
    """Answer the prompt, or every line of standard input."""
    from diloco.trained.generate import TextStream, answer

    tokenizer, window = trained.chat_tokenizer(), trained.length(given.context, "--context")
    messages: list[dict[str, str]] = [{"role": "system", "content": given.system}] if given.system else []
    asks = not prompt and sys.stdin.isatty()
    questions = iter([prompt] if prompt else sys.stdin)
    while True:
        if asks:
            print("> ", end="", flush=True)
        if (question := next(questions, None)) is None:
            return 0
        messages.append({"role": "user", "content": question if prompt else question.rstrip("\n")})
        stream, text = TextStream(tokenizer), ""
        tokens = answer(
            trained.model,
            tokenizer,
            tokenizer.prompt(messages),
            max_new_tokens=given.tokens,
            window=window,
            sampling=given.sampling,
            seed=given.seed,
        )
        for token in tokens:
            text += _shown(stream.feed(token))
        text += _shown(stream.finish())
        print(flush=True)
        messages.append({"role": "assistant", "content": text})


def _shown(text: str) -> str:
    """The same text, printed at once."""
    sys.stdout.write(visible_lines(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
    return text


class _Sample:
    """One text as it comes, and the part of it that is still to be shown."""

    def __init__(self, stream: TextStream, most_tokens: int, heading: str) -> None:
        self.text = ""  # so far, as much as is certain
        self.tokens = 0  # how many it has
        self.ended_by = ""  # what ended it; empty while it goes on
        self._stream = stream
        self._most_tokens = most_tokens
        self._unshown = heading

    def take(self, token: int | None) -> None:
        """Take the next token; None: there are no more."""
        if token is None:
            self.end()
        elif not self.ended_by:
            self.tokens += 1
            self._add(self._stream.feed(token))
            if self._stream.stopped or self.tokens == self._most_tokens:
                self.end()

    def end(self) -> None:
        """End the text: no more tokens come."""
        if not self.ended_by:
            self._add(self._stream.finish())
            self._unshown += "\n"
            whole = self.tokens == self._most_tokens
            self.ended_by = "stop" if self._stream.stopped else "length" if whole else "end of document"

    def unshown(self) -> str:
        """What has come since the last call."""
        text, self._unshown = self._unshown, ""
        return text

    def _add(self, text: str) -> None:
        self.text += text
        self._unshown += text


def _show(samples: Sequence[_Sample]) -> None:
    """Print the samples one after the other: those that have ended, and what there is of the next."""
    for sample in samples:
        _shown(sample.unshown())
        if not sample.ended_by:
            break


def _read(path: Path) -> str:
    """The prompt in a file, or on standard input."""
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            f"--prompt-file {path} cannot be read: {reason}. Give a text file in UTF-8, or - for standard input."
        ) from error
