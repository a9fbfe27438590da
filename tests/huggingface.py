"""Configurations of ``transformers`` models that are small enough for tests, and folders with them."""

from pathlib import Path
from typing import Any

WIDTHS = {
    "vocab_size": 272,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 48,
}
GROUPED = WIDTHS | {"num_key_value_heads": 2}
GPT2 = {"vocab_size": 272, "n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 48}
NO_SPECIAL = {"bos_token_id": 0, "eos_token_id": 0}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", GROUPED),
    "Qwen3": ("qwen3", GROUPED | {"head_dim": 8, "tie_word_embeddings": True}),
    "GPT-2": ("gpt2", GPT2 | NO_SPECIAL),
    "GPT-NeoX": ("gpt_neox", WIDTHS | NO_SPECIAL),
    "Gemma 2": ("gemma2", GROUPED | {"head_dim": 8, "sliding_window": 6}),
    "OPT": (
        "opt",
        {k: v for k, v in WIDTHS.items() if k != "intermediate_size"} | {"ffn_dim": 24, "word_embed_proj_dim": 16},
    ),
    "Mixtral": ("mixtral", GROUPED | {"num_local_experts": 4}),
    "Qwen3-MoE": ("qwen3_moe", GROUPED | EXPERTS | {"num_experts": 4, "head_dim": 8, "mlp_only_layers": [0]}),
}
"""A dense or a routed model of every kind of layout: experts, tied and untied, biases, positions learned or rotary."""


def config_of(name: str, **changes: Any) -> Any:
    """Return the configuration of one of `ARCHITECTURES`, or of a ``model_type`` with only the values ``changes``."""
    from transformers import CONFIG_MAPPING

    kind, values = ARCHITECTURES.get(name, (name, {}))
    return CONFIG_MAPPING[kind](**(values | changes))


def write_config(folder: Path, name: str, **changes: Any) -> Path:
    """Create a folder with that configuration and no weights."""
    place = folder / name.replace(" ", "-")
    config_of(name, **changes).save_pretrained(place)
    return place
