"""``diloco evaluate``: measure how well a trained model predicts text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from diloco.cli.tables import facts_table
from diloco.cli.trained_model import AppliedOptions
from diloco.config import CONFIG_FILE, Configuration, parse_options, read_record
from diloco.errors import ConfigurationError
from diloco.waiting import waiting_for

if TYPE_CHECKING:
    from diloco.trained import Evaluation, Trained

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
class EvaluateOptions(AppliedOptions):
    """The options of `diloco evaluate`."""

    data: Annotated[tuple[Path, ...], arg(metavar="PATH...", help_behavior_hint="")] = ()
    """Files or folders whose whole text is evaluated. Default: the text that the run held out."""
    text_field: Annotated[str | None, arg(metavar="TEXT", help_behavior_hint="")] = None
    """Field of records that holds the text. Default: as in the run."""
    sequences: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Number of sequences to evaluate, spread evenly over the text; 0: all. Default: as in the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sequences is not None and self.sequences < 0:
            raise ConfigurationError(f"--sequences must be at least 0, got {self.sequences}.")
        if self.text_field is not None and not self.data:
            raise ConfigurationError(
                f"--text-field {self.text_field!r} needs --data PATH: held-out text is always read as in the run."
            )


def run(arguments: Sequence[str]) -> int:
    """Evaluate and print."""
    options = parse_options(EvaluateOptions, "evaluate", DESCRIPTION, arguments)
    trained = options.load(options.device)
    result = _evaluate(trained, options, trained.length(options.context, "--context"))
    if options.json:
        figures = {name: getattr(result, name) for name in ("perplexity", "bits_per_token", "bits_per_byte", "tokens")}
        about = {"step": trained.step, "weights": trained.weights, "checkpoint": str(trained.path)}
        print(json.dumps({"heldout_loss": result.loss, **figures, "bytes": result.num_bytes, **about}, indent=2))
        return 0
    print(trained.path if trained.step is None else f"{trained.path}, step {trained.step}, {trained.weights}")
    facts = {
        "held-out loss": f"{result.loss:.4f} nats per token",
        "perplexity": f"{result.perplexity:.4g}",
        "bits per token": f"{result.bits_per_token:.4f}",
        "bits per byte": f"{result.bits_per_byte:.4f}",
        "tokens": f"{result.tokens:,}",
        "bytes": f"{result.num_bytes:,}",
    }
    print(facts_table(facts, indent=""))
    return 0


def _evaluate(trained: Trained, options: EvaluateOptions, length: int) -> Evaluation:
    """Evaluate on the text of --data or of the run. The batches are those of training, for results of equal bits."""
    from diloco.data import heldout_rows, heldout_tokens, read_texts
    from diloco.trained import evaluate

    if trained.step is None and not options.data:
        raise ConfigurationError(f"{options.path} is not a run, so it has no held-out text: give --data PATH.")
    settings = Configuration() if trained.step is None else read_record(trained.run / CONFIG_FILE)
    data, tokenizer = settings.data, trained.tokenizer
    tokens: Any
    if data.chat:
        tokenizer = trained.chat_tokenizer()
        tokens = heldout_rows(data, tokenizer, length, options.data)
    elif options.data:
        source = replace(data, text_field=options.text_field or data.text_field)
        tokens = tokenizer.encode_documents(list(read_texts(source, options.data)))
    else:
        tokens = heldout_tokens(data, tokenizer)
    done = [0]
    with waiting_for(lambda: f"the evaluation, with {done[-1]:,} tokens predicted,"):
        return evaluate(
            trained.model,
            tokenizer,
            tokens,
            sequence_length=length,
            batch_size=settings.train.batch_size * 8,
            sequences=settings.evaluation.sequences if options.sequences is None else options.sequences,
            document_masks=data.document_masks,
            progress=done.append,
        )
