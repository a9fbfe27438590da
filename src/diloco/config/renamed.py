"""The keys and flags of versions before 0.6, which are refused with what replaces them."""

from __future__ import annotations

from diloco.errors import ConfigurationError

__all__ = ["RENAMED", "OldKeyError", "replacement"]


class OldKeyError(ConfigurationError):
    """A key of a version before 0.6."""


_ARGUMENTS = ("vocab_size", "max_sequence_length", "rope_theta", "norm_epsilon", "qk_norm", "z_loss", "tie_embeddings")
_TUNED = ("streams", "pace", "piece_bytes", "heartbeat_s", "interface", "position", "inner_store")

RENAMED: dict[str, str] = {
    **{f"inner.{name}": f"optimizer.{name}" for name in ("name", "learning_rate", "arguments", "schedule")},
    **{f"inner.{name}": f"optimizer.{name}" for name in ("warmup_steps", "final_ratio", "clip_norm")},
    "inner.decay_steps": "",  # a fifth of the run
    "schedule.inner_steps": "sync.inner_steps",
    "schedule.overlap_steps": "sync.overlap_steps",
    "schedule.offsets": "",
    "fragments.num_fragments": "sync.num_fragments",
    "fragments.strategy": "sync.fragment_strategy",
    "fragments.patterns": "sync.fragment_strategy",
    "merge.rule": "sync.merge",
    "merge.alpha": "sync.merge_alpha",
    "merge.arguments": "sync.arguments.merge",
    "outer.name": "sync.outer",
    "outer.arguments": "sync.arguments.outer",
    "outer.learning_rate": "sync.outer_learning_rate",
    "outer.momentum": "sync.outer_momentum",
    "outer.gain": "sync.outer_learning_rate, which is gain * (1 - momentum)",
    "outer.betas": "sync.arguments.outer.betas",
    "outer.epsilon": "sync.arguments.outer.epsilon",
    "outer.learning_rate_schedule": "sync.arguments.outer.schedule",
    "outer.learning_rate_final_ratio": "sync.arguments.outer.final_ratio",
    "outer.momentum_warmup_outer_steps": "sync.arguments.outer.momentum_warmup",
    "outer.average": "sync.average",
    "outer.average_arguments": "sync.arguments.average",
    "outer.max_norm": "sync.arguments.average.max_norm",
    "outer.median_norm_factor": "sync.arguments.average.max_norm",
    "outer.telemetry": "",
    "codec.name": "sync.codec",
    "codec.arguments": "sync.arguments.codec",
    "codec.block_size": "sync.arguments.codec.block_size",
    "codec.error_feedback": "sync.error_feedback, a number from 0 (none) to 1",
    "codec.error_feedback_decay": "sync.error_feedback",
    "transport.name": "network.transport",
    **{f"transport.{name}": f"network.{name}" for name in ("replicas", "replica", "replica_size", "min_replicas")},
    **{f"transport.{name}": f"network.{name}" for name in ("secret_file", "compress")},
    "transport.on_failure": "network.on_loss",
    "transport.rendezvous": "network.join",
    "transport.host": "network.listen",
    "transport.ports": "network.listen",
    "transport.round_timeout_s": "network.round_timeout",
    "transport.silence_s": "network.silence",
    "transport.rendezvous_timeout_s": "network.round_timeout, of which it is half",
    "transport.mean_codec": "sync.arguments.average.codec",
    "transport.mean_error_feedback": "sync.error_feedback",
    "transport.min_contributors": "network.min_replicas",
    "transport.restarts": "torchrun --max-restarts",
    "transport.give_up_after_s": "",  # a replica that is alone searches until it is stopped
    "transport.faults": "",
    "transport.bandwidth_bits_per_s": "emulate.bandwidth",
    "transport.latency_s": "emulate.latency",
    "transport.step_time_s": "emulate.step_time",
    **{f"transport.{name}": "" for name in _TUNED},
    **{f"swarm.{name}": f"network.{name}" for name in ("run", "join", "straggler", "secret_file", "allow")},
    **{f"swarm.{name}": f"network.{name}" for name in ("listen", "announce", "behind_nat")},
    "swarm.start_replicas": "network.replicas",
    "swarm.split": "network.on_loss",
    "swarm.join_window_s": "network.silence, of which it is twice as long",
    "swarm.dynamic_steps": "network.straggler dynamic",
    "swarm.direct_port": "network.listen HOST:FIRST-LAST",
    **{f"swarm.{name}": "" for name in ("identity", "state_bytes_per_s", "relay", "direct", "map_ports")},
    "train.threads": "the variable OMP_NUM_THREADS",
    "train.document_masks": "data.packing masked",
    "train.matmul_precision": "the variable TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "train.loss_chunk_tokens": "",
    "train.peak_flops_per_s": "",
    **{f"model.{name}": f"model.arguments.{name}" for name in ("layers", "width", "ffn_width", "heads", "kv_heads")},
    **{f"model.{name}": f"model.arguments.{name}" for name in ("ffn", *_ARGUMENTS, "weights", "base_dtype")},
    **{f"model.lora_{name}": f"model.arguments.lora_{name}" for name in ("alpha", "dropout", "targets")},
    "data.bpe_vocab_size": "data.tokenizer bpe:SIZE",
    "data.chat_template": "data.format FILE.jinja",
    **{f"data.{name}": "data.sources" for name in ("text_field", "document_separator")},
    "data.streaming_block": "",
    **{f"data.{name}": "" for name in ("bpe_documents", "streaming_heldout", "prefetch_batches")},
    **{f"data.{name}": "DataSettings in Python" for name in ("sharding", "max_documents")},
    "evaluation.sample_tokens": "evaluation.sample_prompts, which may be empty",
    "evaluation.sample_every_steps": "",
    "evaluation.sample_prompt": "evaluation.sample_prompts",
    "monitor.tensorboard": "monitor.sinks tensorboard",
    "monitor.wandb.mode": "monitor.sinks wandb",
    **{f"monitor.wandb.{name}": f"the variable WANDB_{name.upper()}" for name in ("project", "entity", "name", "tags")},
    "monitor.wandb.group": "the variable WANDB_RUN_GROUP",
    **{f"monitor.wandb.{name}": "" for name in ("replicas", "every_steps", "finish_timeout_s")},
}
"""Old key -> the new key, or what else replaces it; empty if nothing does. A flag follows from its key."""

_FLAGS = {
    **{"on-failure": "transport.on_failure", "start-replicas": "swarm.start_replicas", "rendezvous": "transport.join"},
    **{"give-up-after": "transport.give_up_after_s", "wandb": "monitor.wandb.mode"},
    **{f"lora.{name}": f"model.lora_{name}" for name in ("alpha", "dropout", "targets")},
}
"""Old short flags -> their old keys."""


_OTHER_PROGRAMS = "transformers or lm-eval, after `diloco export`"
_COMMANDS: dict[str, dict[str, str]] = {
    "doctor": {"megabytes": "--size", "timeout-s": "--timeout"},
    "watch": {"export": "--out", "every-s": "--every", "ask-every-s": "--every", "alert": ""},
    "status": {"watch": "--every 2s", "every-s": "--every"},
    "evaluate": {
        **dict.fromkeys(("stride", "by-document", "questions", "answer-tokens"), _OTHER_PROGRAMS),
        **{"sequence-length": "--context", "batch-size": ""},
    },
    "generate": {
        **dict.fromkeys(("num-samples", "stop", "min-p", "repetition-penalty"), _OTHER_PROGRAMS),
        **{"prompt-file": '--prompt "$(cat FILE)"', "batch-size": ""},
    },
    "export": {"": "--out PLACE", "max-length": "", "max-shard-size": ""},
    "plan": {
        **dict.fromkeys(("target-utilization", "plot", "timeline", "table"), "the table that plan prints"),
        **{
            "layers": "--fragments",
            "finetune": "--model hf:FOLDER --lora-rank 16",
            "config": "",
            "peers": "--bandwidth",
        },
    },
}
"""Command -> old flag, without dashes and what follows a dot, or "" for an argument -> what replaces it."""


def replacement(name: str, command: str = "") -> str | None:
    """Return what to say about an old key, or about an old flag (with dashes in front); None if it is none.

    Args:
        command: the command that has the flag.

    >>> replacement("inner.learning_rate"), replacement("--transport.no-pace")
    ('it is now optimizer.learning_rate.', 'it is gone: nothing has to be set.')
    >>> replacement("--start-replicas"), replacement("train.steps")
    ('it is now --network.replicas.', None)
    """
    flag = name.startswith("--")
    key = name.lstrip("-").replace(".no-", ".")
    new = _COMMANDS.get(command, {}).get(key.partition(".")[0])
    if new is not None:
        return f"it is now {new}." if new.startswith("-") else f"it is gone: {new or 'nothing has to be set'}."
    key = _FLAGS.get(key, key.replace("-", "_"))
    if key == "transport.join":
        return "it is now --join."
    if key not in RENAMED and key != "lora.rank":
        return None
    new = RENAMED.get(key, "model.lora_rank")
    if not new:
        return "it is gone: nothing has to be set."
    return f"it is now {'--' + new.replace('_', '-') if flag and '.' in new.partition(' ')[0] else new}."
