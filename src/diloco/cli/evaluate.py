"""``diloco evaluate``: measure how well a trained model predicts text."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import FlagCreatePairsOff, Positional, arg

from diloco.config import CONFIG_FILE, Configuration, build, parse_options, read_toml
from diloco.data import DataSettings
from diloco.devices import check_device
from diloco.errors import ConfigurationError
from diloco.waiting import waiting_for

if TYPE_CHECKING:
    import numpy as np

    from diloco.data import Tokenizer
    from diloco.trained import Evaluation, Trained

__all__ = ["run"]

DESCRIPTION = """Measure the loss, perplexity and bits per byte of a trained model.

Without --data, the text is what the run held out, and the figures are those that
the run reported at its end. The text is packed and cut into sequences, and a token
is predicted from the earlier tokens of its own sequence. With --stride N the
sequences overlap, so that after the first sequence every token has a context of at
least the sequence length minus N. With --by-document each document is evaluated on
its own, as in lm-eval's rolling perplexity. For a run on conversations (diloco
finetune) only the answers count. With --questions the model also answers each
question, and the answers that match exactly are counted.

Examples:
  diloco evaluate runs/streaming-tiny
  diloco evaluate runs/streaming-tiny/checkpoints/step-00000300 --json
  diloco evaluate runs/streaming-tiny --data notes/ --sequences 0
  diloco evaluate runs/streaming-llama --questions test.jsonl
  diloco evaluate exported --data test.jsonl --text-field body --stride 64"""


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """The options of `diloco evaluate`."""

    path: Annotated[Positional[Path], arg(metavar="RUN", help_behavior_hint="")]
    """Run folder (its latest checkpoint), checkpoint, or transformers folder (Llama, Qwen3, Arcee, Apertus)."""
    model: Annotated[str | None, arg(metavar="MODULE:FUNCTION", help_behavior_hint="")] = None
    """For a run with a model of your own: the function that builds it, as in training."""
    checkpoint: Annotated[int | None, arg(metavar="STEP", help_behavior_hint="")] = None
    """Inner step of the checkpoint to load. Default: the latest."""
    replica: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Evaluate the local parameters of this replica. Default: the global parameters."""
    data: Annotated[tuple[Path, ...], arg(metavar="PATH...", help_behavior_hint="")] = ()
    """Files or folders whose whole text is evaluated. Default: the text that the run held out."""
    questions: Annotated[tuple[Path, ...], arg(metavar="PATH...", help_behavior_hint="")] = ()
    """Conversations: report the loss on all answers, and how many of the last ones the model gives exactly."""
    answer_tokens: int = 256
    """Maximum number of tokens in an answer."""
    text_field: Annotated[str | None, arg(metavar="TEXT", help_behavior_hint="")] = None
    """Field of records that holds the text. Default: as in the run."""
    document_separator: Annotated[str | None, arg(metavar="TEXT", help_behavior_hint="")] = None
    r"""Text at which files are split into documents; it may have escapes such as \n. Default: as in the run."""
    sequences: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Number of sequences to evaluate, spread evenly over the text; 0: all. Default: as in the run."""
    sequence_length: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Maximum context of the model in tokens. Default: as in training."""
    stride: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Tokens from one sequence to the next; every token counts, once. Default: the sequence length."""
    by_document: Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")] = False
    """Evaluate each document on its own, without its end-of-document token; all tokens count."""
    batch_size: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Sequences per batch. Default: eight times the batch size of the run."""
    device: Annotated[str, arg(metavar="TEXT")] = "auto"
    """cpu, cuda, cuda:N, mps, or auto."""
    json: Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")] = False
    """Print one JSON object."""

    def __post_init__(self) -> None:
        check_device("--device", self.device)
        for flag, value, least in (
            ("--sequences", self.sequences, 0),
            ("--sequence-length", self.sequence_length, 1),
            ("--stride", self.stride, 1),
            ("--batch-size", self.batch_size, 1),
            ("--answer-tokens", self.answer_tokens, 1),
        ):
            if value is not None and value < least:
                raise ConfigurationError(f"{flag} must be at least {least}, got {value}.")
        for flag, given in (("--text-field", self.text_field), ("--document-separator", self.document_separator)):
            if given is not None and not self.data:
                raise ConfigurationError(
                    f"{flag} {given!r} needs --data PATH: held-out text is always read with the settings of the run."
                )
        if self.questions and (self.data or self.stride is not None or self.by_document):
            raise ConfigurationError(
                "--questions cannot be combined with --data, --stride or --by-document: each question is evaluated on "
                "its own."
            )
        if self.sequences and (self.stride is not None or self.by_document):
            raise ConfigurationError(
                f"--sequences {self.sequences} cannot be combined with "
                f"{'--by-document' if self.by_document else '--stride'}, which evaluates all tokens."
            )


def run(arguments: Sequence[str]) -> int:
    """Evaluate and print."""
    given = parse_options(EvaluateOptions, "evaluate", DESCRIPTION, arguments)

    from diloco.trained import load_trained

    trained = load_trained(given.path, given.device, step=given.checkpoint, replica=given.replica, source=given.model)
    settings = _settings_of(trained, given)
    length = trained.length(given.sequence_length, "--sequence-length")
    if given.questions or settings.data.chat:
        return _evaluate_answers(trained, settings, given, length)
    tokens = _tokens(settings.data, given, trained.tokenizer)
    evaluation = _evaluate(trained, settings, given, tokens, length)
    record = {
        "heldout_loss": evaluation.loss,
        "perplexity": evaluation.perplexity,
        "bits_per_token": evaluation.bits_per_token,
        "bits_per_byte": evaluation.bits_per_byte,
        "tokens": evaluation.tokens,
        "bytes": evaluation.num_bytes,
        "documents": int((tokens == trained.tokenizer.eos_id).sum()),
        "sequence_length": length,
        "stride": given.stride or length,
        "by_document": given.by_document,
        "step": trained.step,
        "weights": trained.weights,
        "checkpoint": str(trained.path),
    }
    print(json.dumps(record, indent=2) if given.json else _text(trained, evaluation))
    return 0


def _settings_of(trained: Trained, given: EvaluateOptions) -> Configuration:
    """Return the settings of the run, or the defaults for a ``transformers`` folder, which has none."""
    if trained.step is not None:
        return build(Configuration, read_toml(trained.run / CONFIG_FILE, Configuration))
    if not given.data and not given.questions:
        raise ConfigurationError(f"{given.path} is not a run, so it has no held-out text: give --data PATH.")
    return Configuration()


def _evaluate_answers(trained: Trained, settings: Configuration, given: EvaluateOptions, length: int) -> int:
    """Evaluate on conversations and print."""
    from diloco.data import heldout_rows, read_questions
    from diloco.trained import answer_questions, evaluate

    if given.stride is not None or given.by_document:
        raise ConfigurationError(
            f"{trained.path} was trained on conversations, which are evaluated one by one: leave out --stride and "
            "--by-document."
        )
    tokenizer = trained.chat_tokenizer()
    batch_size, sequences = _amounts(settings, given)
    with _reported_progress() as progress:
        evaluation = evaluate(
            trained.model,
            tokenizer,
            heldout_rows(settings.data, tokenizer, length, given.questions or given.data),
            sequence_length=length,
            batch_size=batch_size,
            sequences=sequences,
            progress=progress,
        )
    record: dict[str, Any] = {
        "heldout_loss": evaluation.loss,
        "perplexity": evaluation.perplexity,
        "tokens": evaluation.tokens,
        "step": trained.step,
        "weights": trained.weights,
        "checkpoint": str(trained.path),
    }
    shown = _text(trained, evaluation)
    if given.questions:
        answered = answer_questions(
            trained.model,
            tokenizer,
            list(read_questions(given.questions)),
            max_new_tokens=given.answer_tokens,
            window=length,
        )
        right = sum(each.right for each in answered)
        record |= {"questions": len(answered), "right": right, "accuracy": right / len(answered)}
        shown += f"\nright answers   {right} of {len(answered)}, {right / len(answered):.1%}"
    print(json.dumps(record, indent=2) if given.json else shown)
    return 0


def _evaluate(
    trained: Trained, settings: Configuration, given: EvaluateOptions, tokens: np.ndarray, length: int
) -> Evaluation:
    from diloco.trained import document_streams, evaluate, evaluate_windows

    model, tokenizer = trained.model, trained.tokenizer
    batch_size, sequences = _amounts(settings, given)
    masks = settings.data.document_masks
    with _reported_progress() as progress:
        if given.stride is None and not given.by_document:
            return evaluate(
                model,
                tokenizer,
                tokens,
                sequence_length=length,
                batch_size=batch_size,
                sequences=sequences,
                document_masks=masks,
                progress=progress,
            )
        return evaluate_windows(
            model,
            tokenizer,
            document_streams(tokens, tokenizer.eos_id) if given.by_document else [tokens],
            sequence_length=length,
            stride=given.stride or length,
            batch_size=batch_size,
            document_masks=masks,
            progress=progress,
        )


def _amounts(settings: Configuration, given: EvaluateOptions) -> tuple[int, int]:
    """Return the sequences per batch and in total (0: all).

    The defaults are those of evaluations during training, so that the results are equal bit for bit.
    """
    sequences = settings.evaluation.sequences if given.sequences is None else given.sequences
    return given.batch_size or settings.train.batch_size * 8, 0 if given.questions else sequences


@contextmanager
def _reported_progress() -> Iterator[Callable[[int], None]]:
    """Report the progress of an evaluation that takes seconds. Yield the callback for the tokens predicted so far."""
    done = 0

    def progress(tokens: int) -> None:
        nonlocal done
        done = tokens

    with waiting_for(lambda: f"the evaluation, with {done:,} tokens predicted,"):
        yield progress


def _tokens(data: DataSettings, given: EvaluateOptions, tokenizer: Tokenizer) -> np.ndarray:
    """Return the tokens to evaluate: all documents packed, each followed by the end-of-document token."""
    from diloco.data import heldout_tokens, read_texts

    changes: dict[str, Any] = {
        name: value for name in ("text_field", "document_separator") if (value := getattr(given, name)) is not None
    }
    source = dataclasses.replace(data, **changes)
    if given.data:
        return tokenizer.encode_documents(list(read_texts(source, given.data)))
    tokens = heldout_tokens(source, tokenizer)
    return tokens[0 : len(tokens)]


def _text(trained: Trained, evaluation: Evaluation) -> str:
    where = f"{trained.path}" if trained.step is None else f"{trained.path}, step {trained.step}, {trained.weights}"
    return "\n".join(
        [
            where,
            f"held-out loss   {evaluation.loss:.4f} nats per token",
            f"perplexity      {evaluation.perplexity:.4g}",
            f"bits per token  {evaluation.bits_per_token:.4f}",
            f"bits per byte   {evaluation.bits_per_byte:.4f}",
            f"tokens          {evaluation.tokens:,}",
            f"bytes           {evaluation.num_bytes:,}",
        ]
    )
