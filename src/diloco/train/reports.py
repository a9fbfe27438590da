"""What is said of a run: facts at its start, what a checkpoint notes of it, and the summary at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from diloco.algorithm.codec import make_codec
from diloco.algorithm.exchange import data_parallel_bytes
from diloco.train.describe import describe
from diloco.train.evaluate import Evaluation
from diloco.train.handshake import model_fingerprint
from diloco.train.session import Session
from diloco.units import format_bytes

__all__ = ["checkpoint_about", "run_facts", "run_summary"]


def run_facts(session: Session, folder: Path) -> dict[str, str]:
    """What is shown when a run begins in ``folder``: name -> words."""
    corpus, model = session.corpus, session.replicas[0].model
    return {
        "data": (
            f"{corpus.train_documents:,} documents, {format_bytes(corpus.train_bytes)}, "
            f"{len(corpus.train):,} tokens; held out: {corpus.heldout_documents:,} documents, "
            f"{format_bytes(corpus.heldout_bytes)}"
        ),
        "device": f"{session.device}, {torch.get_num_threads()} threads",
        **describe(session.settings, model),
        **session.fleet.facts(),
        "codec kernels": make_codec("fp4").implementation,
        "run folder": str(folder),
    }


def checkpoint_about(session: Session) -> dict[str, Any]:
    """What can be read of a checkpoint without loading it, as JSON. To be called on all ranks of a replica."""
    settings, diloco = session.settings, session.replicas[0].diloco
    states = zip(diloco.fragments, diloco.outer_loop.outer_states, strict=True) if diloco else ()
    return {
        "algorithm": settings.algorithm,
        "num_replicas": settings.transport.replicas,
        "parameters": session.num_parameters,
        "sequence_length": settings.train.sequence_length,
        "seed": settings.seed,
        "model": settings.model.described(),
        "model_fingerprint": model_fingerprint(session.replicas[0].model),
        "definition": session.replicas[0].model.definition(),
        "corpus": session.corpus.fingerprint,
        "global_params_digest": session.global_digest(),
        "fragments": [
            {"index": p, "parameters": list(fragment.names), "numel": fragment.numel, "outer_step": state.step}
            for p, (fragment, state) in enumerate(states)
        ],
        "rounds_in_flight": [str(round_id) for round_id in diloco.in_flight] if diloco else [],
    }


def run_summary(
    session: Session, folder: Path, evaluation: Evaluation | None, signal_name: str | None
) -> dict[str, Any]:
    """What is left to say when a run ends, as JSON. To be called on all ranks of a replica.

    Args:
        session: of the run.
        folder: of the run.
        evaluation: of the end; None: there was none.
        signal_name: what stopped the run; None: it is finished.
    """
    replicas, steps = session.settings.transport.replicas, session.totals.steps
    sent_bytes, received_bytes = session.traffic()
    first = session.replicas[0].diloco
    return {
        "heldout_loss": evaluation.loss if evaluation else None,
        "perplexity": evaluation.perplexity if evaluation else None,
        "bits_per_byte": evaluation.bits_per_byte if evaluation else None,
        "tokens": session.tokens,
        "steps": steps,
        "algorithm": session.settings.algorithm,
        "num_replicas": replicas,
        "parameters": session.num_parameters,
        "sent_bytes_per_replica": sent_bytes,
        "received_bytes_per_replica": received_bytes,
        "data_parallel_bytes_per_replica": data_parallel_bytes(session.num_parameters, replicas, steps),
        "shared_start_steps": min(steps, session.settings.train.data_parallel_steps),
        "shared_start_sent_bytes_per_replica": session.totals.shared_start_sent_bytes if first else sent_bytes,
        "compute_utilization": session.compute_utilization(),
        "wall_s": session.totals.wall_s,
        "rounds_committed": first.rounds_committed if first else 0,
        "rounds_void": first.rounds_void if first else 0,
        "global_params_digest": session.global_digest(),
        "interrupted": signal_name,
        "out": str(folder),
    }
