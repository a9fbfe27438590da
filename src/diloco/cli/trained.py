"""``diloco evaluate``, ``diloco generate`` and ``diloco export``: what can be done with a trained model."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta
from tyro.conf import Positional, arg

from diloco.config import CONFIG_FILE, Configuration, parse_options, read_record
from diloco.data import template_file
from diloco.devices import Precision, check_device
from diloco.errors import ConfigurationError
from diloco.events import to_json
from diloco.terminal import as_typed, plain
from diloco.traits import Trait
from diloco.units import facts_table, format_bytes, format_count
from diloco.waiting import waiting_for

if TYPE_CHECKING:
    from diloco.data import Tokenizer
    from diloco.trained import Trained


@dataclass(frozen=True, kw_only=True)
class TrainedOptions:
    """Which trained model to load."""

    path: Annotated[Positional[Path], arg(metavar="RUN")]
    """Run folder (its latest checkpoint), checkpoint, or folder of a causal language model of transformers."""
    model: Annotated[str | None, arg(metavar="MODULE:FUNCTION|hf:FOLDER")] = None
    """For a run with a model of your own: the function that builds it, as in training. For adapters whose base has
    moved: hf:FOLDER."""
    checkpoint: Annotated[int | None, arg(metavar="STEP")] = None
    """Inner step of the checkpoint to load. Default: the latest."""
    average_last: Annotated[int, Meta(ge=1)] = 1
    """Average the weights of so many checkpoints: that one and the latest before it. For runs whose learning rate does
    not decay."""

    def load(self, device: str = "cpu", *, dequantize: bool = False) -> Trained:
        """Load it, as `diloco.trained.load_trained` does."""
        from diloco.trained import load_trained

        return load_trained(
            self.path,
            device,
            step=self.checkpoint,
            source=self.model,
            dequantize=dequantize,
            average_last=self.average_last,
        )


@dataclass(frozen=True, kw_only=True)
class AppliedOptions(TrainedOptions):
    """Which trained model to load, and how to apply it to text."""

    context: int | None = None
    """Maximum context of the model in tokens. Default: as in training."""
    device: str = "auto"
    """cpu, cuda, cuda:N, mps, or auto."""
    json: bool = False
    """Print one JSON object at the end."""

    def __post_init__(self) -> None:
        check_device("--device", self.device)


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(AppliedOptions):
    """Measure the loss, perplexity and bits per byte of a trained model.

    Without --data, the text is what the run held out, and the figures are those that
    the run reported at its end. The text is packed and cut into sequences, and a token
    is predicted from the earlier tokens of its own sequence. For a run on conversations
    (diloco finetune) only the answers count.

    Examples:
      diloco evaluate runs/streaming-tiny
      diloco evaluate runs/streaming-tiny/checkpoints/step-00000300 --json
      diloco evaluate runs/streaming-tiny --data notes/ --sequences 0
    """

    data: tuple[str, ...] = ()
    """Files, folders or URLs whose whole text is evaluated. Default: the text that the run held out."""
    text_field: str | None = None
    """Field of records that holds the text. Default: as in the run."""
    sequences: Annotated[int | None, Meta(ge=0)] = None
    """Number of sequences to evaluate, spread evenly over the text; 0: all. Default: as in the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text_field is not None and not self.data:
            raise ConfigurationError(
                f"--text-field {self.text_field!r} needs --data PATH: held-out text is always read as in the run."
            )


def run_evaluate(arguments: Sequence[str]) -> int:
    """Evaluate on the text of --data or of the run, and print. The batches are those of training, for equal bits."""
    options: EvaluateOptions = parse_options(EvaluateOptions, "evaluate", arguments)

    from diloco.data import heldout_data
    from diloco.trained import evaluate

    trained = options.load(options.device)
    length = trained.length(options.context, "--context")
    if trained.step is None and not options.data:
        raise ConfigurationError(f"{options.path} is not a run, so it has no held-out text: give --data PATH.")
    settings = Configuration() if trained.step is None else read_record(trained.run / CONFIG_FILE)
    data = replace(settings.data, text_field=options.text_field or settings.data.text_field)
    tokenizer = trained.chat_tokenizer() if data.chat else trained.tokenizer
    tokens = heldout_data(data, tokenizer, length, options.data)
    done = [0]
    with waiting_for(lambda: f"the evaluation, with {done[-1]:,} tokens predicted,"):
        result = evaluate(
            trained.model,
            tokenizer,
            tokens,
            sequence_length=length,
            batch_size=settings.train.batch_size * 8,
            sequences=settings.evaluation.sequences if options.sequences is None else options.sequences,
            document_masks=data.document_masks,
            precision=settings.train.precision,
            progress=done.append,
        )
    figures = {"heldout_loss": result.loss, "perplexity": result.perplexity, "bits_per_token": result.bits_per_token}
    figures |= {"bits_per_byte": result.bits_per_byte, "tokens": result.tokens, "bytes": result.num_bytes}
    if options.json:
        about = {"step": trained.step, "weights": trained.weights, "checkpoint": str(trained.path)}
        print(to_json(figures | about, indent=2))
        return 0
    print(trained.path if trained.step is None else f"{trained.path}, step {trained.step}, {trained.weights}")
    forms = {"heldout_loss": "{:.4f} nats per token", "perplexity": "{:.4g}", "tokens": "{:,}", "bytes": "{:,}"}
    facts = {name: forms.get(name, "{:.4f}").format(value) for name, value in figures.items()}
    print(facts_table({name.replace("heldout", "held-out").replace("_", " "): fact for name, fact in facts.items()}))
    return 0


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(AppliedOptions):
    """Continue a text with a trained model, or chat with it (--chat).

    Examples:
      diloco generate runs/streaming-tiny --prompt "import "
      diloco generate runs/streaming-tiny --prompt "def " --temperature 0
      diloco generate runs/streaming-llama --chat
      diloco generate runs/streaming-tiny --prompt "$(cat beginning.txt)" --json
    """

    prompt: Annotated[str, Trait.MAY_BE_EMPTY] = ""
    """Text to continue. Default: none, so that the text is a new document."""
    chat: bool = False
    """Apply the chat template and print the answer. Without a prompt, chat: each line of input is a question."""
    format: Annotated[str, arg(aliases=["--data.format"], metavar="{chat,chatml,plain,FILE.jinja}")] = "chat"
    """--chat: the chat template, as in training. Default: the model's own."""
    system: Annotated[str, Trait.MAY_BE_EMPTY] = ""
    """--chat: system message at the beginning of the conversation."""
    tokens: Annotated[int, Meta(ge=0)] = 200
    """Maximum number of tokens; an end-of-document token ends the text early."""
    temperature: float = 0.8
    """Divides the logits: below 1 favours likely tokens, above 1 makes the text more random, 0 takes the likeliest."""
    top_k: int | None = 50
    """Draw only from this many likeliest tokens. none: from all."""
    top_p: float | None = None
    """After --top-k: draw only from the fewest likeliest tokens with this total probability. Default: from all."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0  # what a torch generator accepts
    """Random seed; the same seed gives the same text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chat and self.json:
            raise ConfigurationError("--chat can't be combined with --json. Leave one of them out.")
        if self.system and not self.chat:
            raise ConfigurationError("--system needs --chat.")
        if self.format != "chat" and not self.chat:
            raise ConfigurationError(f"--format {self.format} needs --chat.")
        template_file(self.format)


def run_generate(arguments: Sequence[str]) -> int:
    """Generate text and print it as it is generated."""
    options = parse_options(GenerateOptions, "generate", arguments)
    options = replace(options, prompt=as_typed(options.prompt), system=as_typed(options.system))

    import torch

    from diloco.trained import Sampling, generate, text_of

    sampling = Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    trained = options.load(options.device)
    device, window = next(trained.model.parameters()).device, trained.length(options.context, "--context")

    def pieces(tokenizer: Tokenizer, prompt: Sequence[int], *ends: int) -> Iterator[str]:
        """Return the text of each token up to one of the tokens ``ends``, and then the rest of an incomplete one."""
        generator = torch.Generator(device).manual_seed(options.seed)
        how = {"max_new_tokens": options.tokens, "sampling": sampling, "stop_tokens": ends, "window": window}
        return text_of(generate(trained.model, prompt, generator, **how), tokenizer, prompt)

    if options.chat:
        return _chat(options, trained, pieces)
    tokenizer, prompt = trained.tokenizer, options.prompt
    text = pieces(tokenizer, tokenizer.encode_prompt(prompt), tokenizer.eos_id)
    if options.json:
        *parts, rest = text
        ended_by = "length" if len(parts) == options.tokens else "end of document"
        about = {"prompt": prompt, "text": "".join([*parts, rest]), "tokens": len(parts), "ended_by": ended_by}
        print(to_json(about, indent=2))
    else:
        _show(itertools.chain([prompt], text))
    return 0


def _chat(options: GenerateOptions, trained: Trained, pieces: Callable[..., Iterator[str]]) -> int:
    from diloco.trained import without_end

    tokenizer = trained.chat_tokenizer(options.format)
    ends = trained.stop_tokens(tokenizer)
    system = [{"role": "system", "content": options.system}] if options.system else []
    messages = [*system]
    asks = not options.prompt and sys.stdin.isatty()
    questions = iter([options.prompt]) if options.prompt else (line.rstrip("\n") for line in sys.stdin)
    while True:
        print("> " if asks else "", end="", flush=True)
        if (question := next(questions, None)) is None:
            return 0
        asked = {"role": "user", "content": question}
        if (token := tokenizer.control_token([*system, asked])) is not None:
            problem = (
                f"The question or --system writes {token!r}, which begins or ends a message for the model, and which "
                "no conversation in training may hold. Leave it out."
            )
            if not asks:
                raise ConfigurationError(problem)
            print(problem)
            continue
        messages.append(asked)
        answer = pieces(tokenizer, tokenizer.prompt(messages), *ends)
        messages.append({"role": "assistant", "content": _show(without_end(answer, tokenizer.closing))})


def _show(pieces: Iterable[str]) -> str:
    """Print a text piece by piece as it comes, and return it. A file gets the exact text."""
    stream, text = sys.stdout if sys.stdout.isatty() else plain(sys.stdout), ""
    for piece in pieces:
        text += piece
        stream.write(piece)
        stream.flush()
    print(flush=True)
    return text


@dataclass(frozen=True, kw_only=True)
class ExportOptions(TrainedOptions):
    """Write a trained model for other programs.

    --to hf writes a folder for transformers and for --init-from, --to adapter the adapter of a
    fine-tuning run, for peft. --merge merges that adapter into its base model, and writes the whole model.
    README.md, a card for the hub, says how the model was trained.

    Examples:
      diloco export runs/streaming-tiny --out exported
      diloco export runs/streaming-tiny --out exported --dtype bfloat16 --overwrite
      diloco export runs/streaming-tiny --out earlier --checkpoint 300
      diloco export runs/streaming-llama --out merged --merge
      diloco export runs/streaming-tiny --out exported --push USER/NAME --private
    """

    out: Path
    """Folder to write."""
    to: Literal["hf", "adapter"] = "hf"
    """hf: a transformers folder; adapter: an adapter for peft."""
    merge: bool = False
    """hf: merge the adapters of the run into the base model and write a whole model."""
    dtype: Precision = "float32"
    """Data type of the weights."""
    overwrite: bool = False
    """Replace an earlier export."""
    push: Annotated[str | None, arg(metavar="USER/NAME")] = None
    """hf, adapter: push the folder to this repository of the Hugging Face hub."""
    private: bool = False
    """--push: create the repository as a private one."""
    dry_run: bool = False
    """--push: print the card (README.md) and the names of the files instead."""

    def __post_init__(self) -> None:
        if self.push is None and (self.private or self.dry_run):
            raise ConfigurationError("--private and --dry-run need --push USER/NAME.")
        if self.push is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.push):
            raise ConfigurationError(f"--push {self.push} must be USER/NAME.")


def run_export(arguments: Sequence[str]) -> int:
    """Load the model, write it, and print what was written."""
    from diloco.cli.hub import model_card
    from diloco.trained import export_adapter, export_huggingface

    options: ExportOptions = parse_options(ExportOptions, "export", arguments)
    out, dtype, overwrite = options.out, options.dtype, options.overwrite
    with waiting_for(lambda: f"{options.path} to be loaded and written to {out}"):
        trained = options.load(dequantize=options.merge)
        adapts = bool(trained.model.source_has)
        if adapts and options.to == "hf" and not options.merge:
            raise ConfigurationError(
                f"{options.path} has adapters on top of a base model. Use --merge for a whole model, or --to adapter."
            )
        if not adapts and (options.merge or options.to == "adapter"):
            flag = "--merge" if options.merge else "--to adapter"
            raise ConfigurationError(f"{options.path} has no adapters, so {flag} has no effect. Leave it out.")
        if options.merge and options.to != "hf":
            raise ConfigurationError(f"--merge needs --to hf, not --to {options.to}.")
        card = ""
        if trained.step is not None:
            card = model_card(trained, options.push or out.name, adapter=options.to == "adapter")
        elif options.push is not None:
            raise ConfigurationError(
                f"--push needs a run, which says how the model was trained, but {trained.path} is not a run."
            )
        if options.to == "adapter":
            export_adapter(trained, out, overwrite=overwrite, card=card)
            print(f"{out}: adapter for peft, {format_count(trained.model.num_trained())} parameters")
            return _push(options)
        model = export_huggingface(trained, out, dtype=dtype, overwrite=overwrite, card=card)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    size = format_bytes(sum(file.stat().st_size for file in out.iterdir()))
    print(f"{out}: {type(model).__name__}, {format_count(parameters)} parameters, {dtype}, {size}")
    step = "" if trained.step is None else f", step {trained.step}"
    print(f"from {trained.path}{step}, {trained.weights}")
    return _push(options)


def _push(options: ExportOptions) -> int:
    if options.push is not None:
        from diloco.cli.hub import push

        print(push(options.out, options.push, private=options.private, dry_run=options.dry_run))
    return 0
