"""How far the models of a run have come: their loss on held-out text, and samples of what they write."""

from __future__ import annotations

from collections.abc import Callable

import torch

from diloco.events import Evaluated, Event, SampleGenerated
from diloco.train.session import Session
from diloco.trained.evaluate import Evaluation, evaluate, mean_evaluation
from diloco.trained.generate import generate

__all__ = ["evaluate_session", "sample_session"]


def evaluate_session(session: Session, emit: Callable[[Event], None], *, final: bool) -> Evaluation:
    """Evaluate what the replicas agree on, or the mean of them where they are independent.

    Args:
        session: of the run.
        emit: told of it.
        final: whether training is over.
    """
    settings, corpus = session.settings, session.corpus
    with session.evaluated_models() as models:
        evaluation = mean_evaluation(
            [
                evaluate(
                    model,
                    corpus.tokenizer,
                    corpus.heldout,
                    sequence_length=settings.train.sequence_length,
                    batch_size=settings.train.batch_size * 8,
                    sequences=settings.evaluation.sequences,
                    document_masks=settings.train.document_masks,
                )
                for model in models
            ]
        )
    emit(
        Evaluated(
            step=session.totals.steps,
            heldout_loss=evaluation.loss,
            perplexity=evaluation.perplexity,
            bits_per_byte=evaluation.bits_per_byte,
            heldout_tokens=evaluation.tokens,
            final=final,
        )
    )
    return evaluation


def sample_session(session: Session, emit: Callable[[Event], None], *, final: bool) -> None:
    """Let the first model continue each prompt of the settings.

    Drawn by a generator of their own, so that training keeps its bits, and the same one each time.

    Args:
        session: of the run.
        emit: told of each sample.
        final: whether training is over.
    """
    settings, tokenizer = session.settings.evaluation, session.corpus.tokenizer
    if not settings.sample_tokens:
        return
    generator = torch.Generator(session.device).manual_seed(session.settings.seed)
    for prompt in settings.sample_prompts:
        with session.evaluated_models() as models:
            tokens = generate(
                models[0],
                tokenizer.encode(prompt) or [tokenizer.eos_id],
                generator,
                max_new_tokens=settings.sample_tokens,
                stop_token=tokenizer.eos_id,
                window=session.settings.train.sequence_length,
            )
            text = tokenizer.decode(list(tokens))
        emit(SampleGenerated(step=session.totals.steps, prompt=prompt, text=text, final=final))
