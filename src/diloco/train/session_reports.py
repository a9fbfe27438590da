"""Reports of a run: facts to compare and to print, evaluations, samples, checkpoint metadata and the summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from diloco.algorithm import data_parallel_bytes, trainable_parameters
from diloco.checkpoint import whole
from diloco.cores import usable_cores
from diloco.events import Evaluated, SampleGenerated
from diloco.model import LanguageModel
from diloco.outer import argument_facts
from diloco.protocol import PROTOCOL_VERSION
from diloco.train.components import make_configured_codec, outer_arguments
from diloco.train.describe import describe
from diloco.train.session import Session
from diloco.train.settings import RunSettings
from diloco.trained import evaluate, generate, mean_evaluation
from diloco.units import format_count

__all__ = [
    "checkpoint_about",
    "evaluate_session",
    "handshake_facts",
    "leave_adapter",
    "model_fingerprint",
    "run_facts",
    "run_summary",
    "sample_session",
]


SAMPLE_TOKENS = 200


def handshake_facts(
    settings: RunSettings, model: LanguageModel, corpus_fingerprint: str, base: str = ""
) -> Mapping[str, str]:
    """Return the facts on which all replicas must agree, by name, the likeliest mistakes first.

    Args:
        model: the model to train; it may be on the meta device.
        base: a digest of the stored weights from which the model starts; "" without stored weights.
    """
    train, network = settings.train, settings.network
    replicas = f"{network.replicas} of {network.replica_size} ranks"
    if network.transport == "hivemind":
        replicas = f"any number, {network.replicas} to begin with"
    outer = {"codec": str(settings.sync.codec)}
    if settings.algorithm in ("streaming", "diloco"):
        outer = argument_facts(model, outer_arguments(settings, model))
    return {
        "protocol version": str(PROTOCOL_VERSION),
        "model": model_fingerprint(trainable_parameters(model)),
        **({"base model": base} if base else {}),
        "algorithm": settings.algorithm,
        "steps": f"{train.steps}, {train.data_parallel_steps} of them shared ones",
        **outer,
        "token weighting": f"by the steps trained, in batches of {train.batch_size} x {train.sequence_length}",
        "dynamic steps": "yes" if network.straggler == "dynamic" else "no",
        "replicas": replicas,
        "seed": str(settings.seed),
        "data": corpus_fingerprint,
    }


def model_fingerprint(parameters: Mapping[str, Tensor]) -> str:
    """Return the number of values in ``parameters`` and a digest of their names, shapes and dtypes."""
    digest = xxhash.xxh3_64()
    for name, parameter in parameters.items():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
    numel = sum(parameter.numel() for parameter in parameters.values())
    dtypes = ", ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters.values()}))
    return f"{numel:,} parameters of {dtypes}, {digest.hexdigest()}"


def run_facts(session: Session, folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return what to show when a run in ``folder`` starts, and details, each by name."""
    facts, details = describe(session.settings, session.replicas[0].model)
    data, _, more = session.corpus.description().partition("; ")
    codec = make_configured_codec(session.settings.sync)
    if codec.parameters():  # block-wise
        details["codec kernels"] = codec.implementation
    facts = {"data": data, **facts, "device": _device(session), **session.fleet.facts(), "run folder": str(folder)}
    return facts, {"further data": more, **details, **session.fleet.details()}


def _device(session: Session) -> str:
    peak = session.peak_flops_per_s
    limit = f", {format_count(peak)} operations/s at most" if peak is not None else ""
    threads, cores = torch.get_num_threads(), usable_cores()
    shared = "" if threads == cores else f" on {cores} cores"
    return f"{session.device}, {threads} thread{'' if threads == 1 else 's'}{shared}{limit}"


def evaluate_session(session: Session, *, final: bool) -> Evaluated:
    """Evaluate the global parameters, or return the mean over independent replicas."""
    settings, corpus = session.settings, session.corpus
    with session.evaluated_models() as models:
        found = [
            evaluate(
                model,
                corpus.tokenizer,
                corpus.heldout,
                sequence_length=settings.train.sequence_length,
                batch_size=settings.train.batch_size * 8,
                sequences=settings.evaluation.sequences,
                document_masks=settings.data.document_masks,
            )
            for model in models
        ]
    mean = mean_evaluation(found)
    return Evaluated(
        step=session.totals.steps,
        heldout_loss=mean.loss,
        perplexity=mean.perplexity,
        bits_per_byte=mean.bits_per_byte,
        heldout_tokens=mean.tokens,
        final=final,
    )


def sample_session(session: Session, *, final: bool) -> Iterator[SampleGenerated]:
    """Generate a sample for each prompt of the settings with the first model.

    Each call uses a separate generator with the same seed, so sampling does not change the bits of training.
    """
    settings, tokenizer = session.settings.evaluation, session.corpus.tokenizer
    generator = torch.Generator(session.device).manual_seed(session.settings.seed)
    for prompt in settings.sample_prompts:
        with session.evaluated_models() as models:
            tokens = generate(
                models[0],
                tokenizer.encode(prompt) or [tokenizer.eos_id],
                generator,
                max_new_tokens=SAMPLE_TOKENS,
                stop_tokens=[tokenizer.eos_id],
                window=session.settings.train.sequence_length,
                agreed=session.fleet.group.share,
            )
            text = tokenizer.decode(list(tokens))
        yield SampleGenerated(step=session.totals.steps, prompt=prompt, text=text, final=final)


def checkpoint_about(session: Session) -> dict[str, Any]:
    """Return the metadata that can be read without loading a checkpoint, as JSON. Call it on all ranks of a replica."""
    settings, diloco = session.settings, session.replicas[0].diloco
    return {
        "algorithm": settings.algorithm,
        "num_replicas": settings.network.replicas,
        "parameters": session.replicas[0].model.num_parameters(),
        "sequence_length": settings.train.sequence_length,
        "seed": settings.seed,
        "model": settings.model.settings.described(),
        "model_fingerprint": model_fingerprint(session.replicas[0].state.parameters),
        "definition": session.replicas[0].model.definition(),
        "corpus": session.corpus.fingerprint,
        "threads": torch.get_num_threads(),
        "global_params_digest": session.global_digest(),
        "fragments": [
            {"index": f.index, "parameters": list(f.names), "numel": f.numel, "outer_step": f.state.outer.step}
            for f in (diloco.fragments if diloco else ())
        ],
        "rounds_in_flight": [str(round_id) for round_id in diloco.in_flight] if diloco else [],
    }


def leave_adapter(session: Session, home: Path) -> None:
    """Save the global parameters of a model with adapters in the format of ``peft``, together with the tokeniser.

    Other models have nothing to save. Call it on all ranks of a replica.
    """
    model: Any = session.replicas[0].model
    if getattr(model, "adapters", None) is None:
        return
    from diloco.model import ADAPTER_FOLDER, save_adapter

    values = {name: whole(value) for name, value in session.global_params().items()}

    def save() -> None:
        save_adapter(home / ADAPTER_FOLDER, model, values)
        session.corpus.tokenizer.save(home / ADAPTER_FOLDER)

    session.fleet.group.done_by_leader(save)


def run_summary(
    session: Session, folder: Path, evaluation: Evaluated | None, signal_name: str | None
) -> dict[str, Any]:
    """Return the summary of a run at its end, as JSON. Call it on all ranks of a replica.

    Args:
        evaluation: the final evaluation, or None if there was none.
        signal_name: what stopped the run, or None if it has finished.
    """
    replicas, steps = session.settings.network.replicas, session.totals.steps
    sent_bytes, received_bytes = session.traffic()
    first = session.replicas[0].diloco
    spent_s = session.totals.compute_s + session.totals.exchange_s
    return {
        "heldout_loss": evaluation.heldout_loss if evaluation else None,
        "perplexity": evaluation.perplexity if evaluation else None,
        "bits_per_byte": evaluation.bits_per_byte if evaluation else None,
        "tokens": session.tokens,
        "steps": steps,
        "algorithm": session.settings.algorithm,
        "num_replicas": replicas,
        "parameters": session.replicas[0].model.num_parameters(),
        "sent_bytes_per_replica": sent_bytes,
        "received_bytes_per_replica": received_bytes,
        "data_parallel_bytes_per_replica": data_parallel_bytes(
            session.replicas[0].model.num_trained(), replicas, steps
        ),
        "shared_start_steps": min(steps, session.settings.train.data_parallel_steps),
        "shared_start_sent_bytes_per_replica": session.totals.shared_start_sent_bytes if first else sent_bytes,
        "compute_utilization": session.compute_utilization(),
        "wall_s": session.totals.wall_s,
        "tokens_per_s": session.tokens / spent_s if spent_s else None,
        "model_flops_utilization": session.flops_utilization(spent_s, steps) if session.pace is None else None,
        "rounds_committed": first.rounds_committed if first else 0,
        "rounds_void": first.rounds_void if first else 0,
        "global_params_digest": session.global_digest(),
        "epochs": dict(session.replicas[0].sampler.epochs),
        "interrupted": signal_name,
        "out": str(folder),
    }
