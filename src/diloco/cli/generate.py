"""``diloco generate``: continue a text with a trained model, or chat with it."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from tyro.conf import FlagCreatePairsOff, arg

from diloco.cli.trained_model import AppliedOptions
from diloco.config import parse_options
from diloco.errors import ConfigurationError
from diloco.terminal import as_typed, plain

if TYPE_CHECKING:
    from diloco.data import ChatTokenizer, Tokenizer

DESCRIPTION = """Continue a text with a trained model, or chat with it (--chat).

Examples:
  diloco generate runs/streaming-tiny --prompt "import "
  diloco generate runs/streaming-tiny --prompt "def " --temperature 0
  diloco generate runs/streaming-llama --chat
  diloco generate runs/streaming-tiny --prompt "$(cat beginning.txt)" --json"""

_LARGEST_SEED = 2**63 - 1  # the largest seed that a torch generator accepts


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(AppliedOptions):
    """The options of `diloco generate`."""

    prompt: Annotated[str, arg(metavar="TEXT", help_behavior_hint="")] = ""
    """Text to continue. Default: none, so that the text is a new document."""
    chat: Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")] = False
    """Apply the chat template and print the answer. Without a prompt, chat: each line of input is a question."""
    system: Annotated[str, arg(metavar="TEXT", help_behavior_hint="")] = ""
    """--chat: system message at the beginning of the conversation."""
    tokens: int = 200
    """Maximum number of tokens; an end-of-document token ends the text early."""
    temperature: float = 0.8
    """Divides the logits: below 1 favours likely tokens, above 1 makes the text more random, 0 takes the likeliest."""
    top_k: Annotated[int | None, arg(metavar="INT")] = 50
    """Draw only from this many likeliest tokens. None: from all."""
    top_p: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """After --top-k: draw only from the fewest likeliest tokens with this total probability. Default: from all."""
    seed: int = 0
    """Random seed; the same seed gives the same text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens < 0:
            raise ConfigurationError(f"--tokens must be at least 0, got {self.tokens}.")
        if not 0 <= self.seed <= _LARGEST_SEED:
            raise ConfigurationError(f"--seed must be from 0 to {_LARGEST_SEED}, got {self.seed}.")
        if self.chat and self.json:
            raise ConfigurationError("--chat can't be combined with --json. Leave one of them out.")
        if self.system and not self.chat:
            raise ConfigurationError("--system needs --chat.")


def run(arguments: Sequence[str]) -> int:
    """Generate text and print it as it is generated."""
    options = parse_options(GenerateOptions, "generate", DESCRIPTION, arguments)
    options = replace(options, prompt=as_typed(options.prompt), system=as_typed(options.system))

    import torch

    from diloco.trained import Sampling, TextStream, generate

    sampling = Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    trained = options.load(options.device)
    device, window = next(trained.model.parameters()).device, trained.length(options.context, "--context")

    def pieces(tokenizer: Tokenizer, prompt: Sequence[int], *ends: int) -> Iterator[str]:
        """Yield the text of each token up to one of the tokens ``ends``, and then what is left of an incomplete one."""
        stream, generator = TextStream(tokenizer), torch.Generator(device).manual_seed(options.seed)
        how = {"max_new_tokens": options.tokens, "sampling": sampling, "stop_tokens": ends, "window": window}
        yield from map(stream.feed, generate(trained.model, prompt, generator, **how))
        yield stream.finish()

    if options.chat:
        return _chat(options, trained.chat_tokenizer(), pieces)
    tokenizer, prompt = trained.tokenizer, options.prompt
    text = pieces(tokenizer, tokenizer.encode(prompt) or [tokenizer.eos_id], tokenizer.eos_id)
    if options.json:
        *parts, rest = text
        ended_by = "length" if len(parts) == options.tokens else "end of document"
        about = {"prompt": prompt, "text": "".join([*parts, rest]), "tokens": len(parts), "ended_by": ended_by}
        print(json.dumps(about, indent=2))
    else:
        _show(itertools.chain([prompt], text))
    return 0


def _chat(options: GenerateOptions, tokenizer: ChatTokenizer, pieces: Callable[..., Iterator[str]]) -> int:
    """Answer the prompt, or every line of standard input."""
    prompt = options.prompt
    messages: list[dict[str, str]] = [{"role": "system", "content": options.system}] if options.system else []
    asks = not prompt and sys.stdin.isatty()
    questions = iter([prompt] if prompt else sys.stdin)
    while True:
        if asks:
            print("> ", end="", flush=True)
        if (question := next(questions, None)) is None:
            return 0
        messages.append({"role": "user", "content": question if prompt else question.rstrip("\n")})
        answer = _show(pieces(tokenizer, tokenizer.prompt(messages), tokenizer.answer_end, tokenizer.eos_id))
        messages.append({"role": "assistant", "content": answer})


def _show(pieces: Iterable[str]) -> str:
    """Print a text piece by piece as it comes, and return it. A file gets the exact text."""
    stream, text = sys.stdout if sys.stdout.isatty() else plain(sys.stdout), ""
    for piece in pieces:
        text += piece
        stream.write(piece)
        stream.flush()
    print(flush=True)
    return text
