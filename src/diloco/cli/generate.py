"""``diloco generate``: continue a text with a trained model, or chat with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, arg

from diloco.config import parse_options
from diloco.devices import check_device
from diloco.errors import ConfigurationError, DataError
from diloco.terminal import as_typed, plain
from diloco.trained import Sampling

if TYPE_CHECKING:
    from diloco.trained import TextStream, Trained

__all__ = ["run"]

DESCRIPTION = """Continue a text with a trained model, or chat with it (--chat).

Examples:
  diloco generate runs/streaming-tiny --prompt "import "
  diloco generate runs/streaming-tiny --prompt "def " --num-samples 3 --top-k 20
  diloco generate runs/streaming-tiny --prompt "def " --temperature 0
  diloco generate exported --prompt-file beginning.txt --stop "\\n\\n"
  diloco generate runs/streaming-llama --chat
  cat beginning.txt | diloco generate runs/streaming-tiny --prompt-file - --json"""

_LARGEST_SEED = 2**63 - 1  # the largest seed that a torch generator accepts


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """The options of `diloco generate`."""

    path: Annotated[Positional[Path], arg(metavar="RUN", help_behavior_hint="")]
    """Run folder (its latest checkpoint), checkpoint, or transformers folder (Llama, Qwen3, Arcee, Apertus)."""
    model: Annotated[str | None, arg(metavar="MODULE:FUNCTION", help_behavior_hint="")] = None
    """For a run with a model of your own: the function that builds it, as in training."""
    checkpoint: Annotated[int | None, arg(metavar="STEP", help_behavior_hint="")] = None
    """Inner step of the checkpoint to load. Default: the latest."""
    replica: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Use the local parameters of this replica. Default: the global parameters."""
    prompt: Annotated[str, arg(metavar="TEXT", help_behavior_hint="")] = ""
    """Text to continue. Default: none, so that a sample is a new document."""
    prompt_file: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """UTF-8 file with the text to continue, used in full; -: standard input."""
    chat: Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")] = False
    """Apply the chat template and print the answer. Without a prompt, chat: each line of input is a question."""
    system: Annotated[str, arg(metavar="TEXT", help_behavior_hint="")] = ""
    """--chat: system message at the beginning of the conversation."""
    tokens: int = 200
    """Maximum number of tokens per sample; an end-of-document token ends a sample early."""
    stop: Annotated[tuple[str, ...], arg(metavar="TEXT...", help_behavior_hint="")] = ()
    r"""End a sample before any of these texts; \n, \r, \t, \xXX, \uXXXX and \\ are escapes."""
    seed: int = 0
    """Random seed; the same seed gives the same text. Each further sample uses the next seed."""
    num_samples: int = 1
    """Number of samples."""
    batch_size: int = 8
    """Maximum number of samples that are generated together; fewer need less memory."""
    context: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Maximum context of the model in tokens. Default: as in training."""
    device: Annotated[str, arg(metavar="TEXT")] = "auto"
    """cpu, cuda, cuda:N, mps, or auto."""
    json: Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")] = False
    """Print all samples as one JSON list at the end."""
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
                raise ConfigurationError(f"{flag} must be at least {least}, got {value}.")
        if self.seed + self.num_samples > _LARGEST_SEED:
            raise ConfigurationError(f"--seed must be at most {_LARGEST_SEED - self.num_samples}, got {self.seed}.")
        if self.chat and (self.json or self.stop or self.num_samples != 1):
            raise ConfigurationError(
                "--chat cannot be combined with --json, --stop or --num-samples: it gives one answer at a time, and "
                "the model itself ends it."
            )
        if self.system and not self.chat:
            raise ConfigurationError("--system needs --chat.")
        if self.prompt and self.prompt_file is not None:
            raise ConfigurationError(f"--prompt cannot be given together with --prompt-file {self.prompt_file}.")


def run(arguments: Sequence[str]) -> int:
    """Generate text and print it as it is generated."""
    given = parse_options(GenerateOptions, "generate", DESCRIPTION, arguments)
    stop = tuple(map(as_typed, given.stop))
    given = replace(given, prompt=as_typed(given.prompt), system=as_typed(given.system), stop=stop)
    prompt = given.prompt if given.prompt_file is None else _read(given.prompt_file)

    import torch

    from diloco.trained import TextStream, generate_together, load_trained

    trained = load_trained(given.path, given.device, step=given.checkpoint, replica=given.replica, source=given.model)
    if given.chat:
        return _chat(trained, given, prompt)
    tokenizer, context = trained.tokenizer, trained.length(given.context, "--context")
    device = next(trained.model.parameters()).device
    samples = []
    for number in range(1, given.num_samples + 1):
        heading = f"--- sample {number} of {given.num_samples}\n" if given.num_samples > 1 else ""
        samples.append(_Sample(TextStream(tokenizer, given.stop), given.tokens, heading + prompt))
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
    from diloco.trained import TextStream, answer

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
    """Print a piece of text immediately, and return it."""
    stream = sys.stdout if sys.stdout.isatty() else plain(sys.stdout)  # a file gets the exact text
    stream.write(text)
    stream.flush()
    return text


class _Sample:
    """A text that is being generated, and the part of it that has not been printed yet."""

    def __init__(self, stream: TextStream, most_tokens: int, heading: str) -> None:
        self.text = ""  # the text so far, without characters that the next token may still change
        self.tokens = 0  # number of tokens so far
        self.ended_by = ""  # what ended the text; empty until it has ended
        self._stream = stream
        self._most_tokens = most_tokens
        self._unshown = heading

    def take(self, token: int | None) -> None:
        """Append the next token, or end the text if there is none."""
        if token is None:
            self.end()
        elif not self.ended_by:
            self.tokens += 1
            self._add(self._stream.feed(token))
            if self._stream.stopped or self.tokens == self._most_tokens:
                self.end()

    def end(self) -> None:
        """End the text."""
        if not self.ended_by:
            self._add(self._stream.finish())
            self._unshown += "\n"
            whole = self.tokens == self._most_tokens
            self.ended_by = "stop" if self._stream.stopped else "length" if whole else "end of document"

    def unshown(self) -> str:
        """Return the text since the last call."""
        text, self._unshown = self._unshown, ""
        return text

    def _add(self, text: str) -> None:
        self.text += text
        self._unshown += text


def _show(samples: Sequence[_Sample]) -> None:
    """Print all samples that have ended, in order, and the available part of the next one."""
    for sample in samples:
        _shown(sample.unshown())
        if not sample.ended_by:
            break


def _read(path: Path) -> str:
    """Read the prompt from a file or from standard input."""
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            f"--prompt-file {path} cannot be read: {reason}. Give a text file in UTF-8, or - for standard input."
        ) from error
