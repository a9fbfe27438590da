"""``diloco evaluate``: measure how well a trained model predicts text."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import FlagCreatePairsOff, arg

from diloco.cli.trained_model import TrainedOptions
from diloco.config import CONFIG_FILE, Configuration, parse_options, read_record
from diloco.devices import check_device
from diloco.errors import ConfigurationError
from diloco.waiting import waiting_for

if TYPE_CHECKING:
    from diloco.data import Tokenizer
    from diloco.trained import Evaluation, Trained

__all__ = ["run"]

DESCRIPTION = """Measure the loss, perplexity and bits per byte of a trained model.

Without --data, the text is what the run held out, and the figures are those that
the run reported at its end. The text is packed and cut into sequences, and a token
is predicted from the earlier tokens of its own sequence. For a run on conversations
(diloco finetune) only the answers count.

Examples:
  diloco evaluate runs/streaming-tiny
  diloco evaluate runs/streaming-tiny/checkpoints/step-00000300 --json
  diloco evaluate runs/streaming-tiny --data notes/ --sequences 0"""


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(TrainedOptions):
    """The options of `diloco evaluate`."""

    data: Annotated[tuple[Path, ...], arg(metavar="PATH...", help_behavior_hint="")] = ()
    """Files or folders whose whole text is evaluated. Default: the text that the run held out."""
    text_field: Annotated[str | None, arg(metavar="TEXT", help_behavior_hint="")] = None
    """Field of records that holds the text. Default: as in the run."""
    sequences: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Number of sequences to evaluate, spread evenly over the text; 0: all. Default: as in the run."""
    context: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Maximum context of the model in tokens. Default: as in training."""
    device: Annotated[str, arg(metavar="TEXT")] = "auto"
    """cpu, cuda, cuda:N, mps, or auto."""
    json: Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")] = False
    """Print one JSON object."""

    def __post_init__(self) -> None:
        check_device("--device", self.device)
        for flag, value, least in (("--sequences", self.sequences, 0), ("--context", self.context, 1)):
            if value is not None and value < least:
                raise ConfigurationError(f"{flag} must be at least {least}, got {value}.")
        if self.text_field is not None and not self.data:
            raise ConfigurationError(
                f"--text-field {self.text_field!r} needs --data PATH: held-out text is always read as in the run."
            )


def run(arguments: Sequence[str]) -> int:
    """Evaluate and print."""
    given = parse_options(EvaluateOptions, "evaluate", DESCRIPTION, arguments)
    trained = given.load(given.device)
    evaluation = _evaluate(trained, given, trained.length(given.context, "--context"))
    record = {
        "heldout_loss": evaluation.loss,
        "perplexity": evaluation.perplexity,
        "bits_per_token": evaluation.bits_per_token,
        "bits_per_byte": evaluation.bits_per_byte,
        "tokens": evaluation.tokens,
        "bytes": evaluation.num_bytes,
        "step": trained.step,
        "weights": trained.weights,
        "checkpoint": str(trained.path),
    }
    print(json.dumps(record, indent=2) if given.json else _text(trained, evaluation))
    return 0


def _evaluate(trained: Trained, given: EvaluateOptions, length: int) -> Evaluation:
    """Evaluate on the text of --data or of the run. The batches are those of training, for results of equal bits."""
    from diloco.data import heldout_rows
    from diloco.trained import evaluate

    settings = Configuration()
    if trained.step is not None:
        settings = read_record(trained.run / CONFIG_FILE)
    elif not given.data:
        raise ConfigurationError(f"{given.path} is not a run, so it has no held-out text: give --data PATH.")
    tokenizer: Tokenizer = trained.tokenizer
    if settings.data.chat:
        tokenizer = trained.chat_tokenizer()
        tokens: Any = heldout_rows(settings.data, tokenizer, length, given.data)
    else:
        tokens = _tokens(settings, given, tokenizer)
    done = 0

    def progress(count: int) -> None:
        nonlocal done
        done = count

    with waiting_for(lambda: f"the evaluation, with {done:,} tokens predicted,"):
        return evaluate(
            trained.model,
            tokenizer,
            tokens,
            sequence_length=length,
            batch_size=settings.train.batch_size * 8,
            sequences=settings.evaluation.sequences if given.sequences is None else given.sequences,
            document_masks=settings.data.document_masks,
            progress=progress,
        )


def _tokens(settings: Configuration, given: EvaluateOptions, tokenizer: Tokenizer) -> Any:
    """Return the tokens to evaluate: all documents packed, each followed by the end-of-document token."""
    from diloco.data import heldout_tokens, read_texts

    if not given.data:
        return heldout_tokens(settings.data, tokenizer)
    source = dataclasses.replace(settings.data, text_field=given.text_field or settings.data.text_field)
    return tokenizer.encode_documents(list(read_texts(source, given.data)))


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
