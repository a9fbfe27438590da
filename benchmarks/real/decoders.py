"""``python -m benchmarks.real.decoders``: every causal decoder of the installed transformers, with packed documents.

Each is built small, with fresh weights, and asked to keep documents apart. Where it claims to, three documents in one
row are compared with each of them alone, over windows that are shorter than a document.
"""

import json
import logging
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.markdown import table, write_below
from diloco.errors import DiLoCoError
from diloco.model import ModelSettings, build_language_model

PAGE = Path(__file__).with_name("decoders.md")
MARK = "<!-- what follows is written by python -m benchmarks.real.decoders -->"

LENGTHS = (9, 14, 7)  # tokens of the documents
CLOSE = 1e-4  # of the largest logit
MOST_PARAMETERS = 20_000_000

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "dff"), 48),
    **dict.fromkeys(("ffn_hidden_size", "dim_ff"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "mamba_n_heads", "mamba_num_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("head_dim", "ssm_state_size", "state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("sliding_window", "window_size"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "mamba_expand"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict(bos_token_id=1, eos_token_id=2, pad_token_id=0, decoder_start_token_id=1),
    **dict(vocab_size=96, attention_chunk_size=16, rotary_dim=4, is_decoder=True, initializer_range=0.2, init_std=0.2),
}
"""The value of each entry that a configuration has."""

LATENT = {"head_dim": None, "num_key_value_heads": 4}  # with latent attention, the width of a head follows from others
FURTHER: dict[str, dict[str, Any]] = {
    "ctrl": {"dff": 48},
    "gemma4_text": {"head_dim": None},
    "gemma4_unified_text": {"head_dim": None},
    "dots3_note_text": {"num_attention_heads": None, "head_dim": None, "num_key_value_heads": None},
    "falcon": {"head_dim": None, "num_kv_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1, "expand": 2},
    "xlstm": {"v_head_dim": None, "qk_head_dim": None},
    "zaya": {"num_experts_per_tok": 1},
    "longcat_flash": {**LATENT, "zero_expert_num": 2, "num_layers": 2},
    "roc_bert": {
        "pronunciation_embed_dim": 32,
        "shape_embed_dim": 32,
        "pronunciation_vocab_size": 96,
        "shape_vocab_size": 96,
    },
    "falcon-alibi": {"head_dim": None, "num_kv_heads": 4, "alibi": True},
    **dict.fromkeys(
        (
            "axk1",
            "axk2",
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "minicpm3",
            "youtu",
        ),
        LATENT,
    ),
}
"""What a type needs beside `SIZES`; None: its own default."""


def small(name: str) -> Any:
    """Return a small configuration of a type."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[name.partition("-alibi")[0]]
    known, values = kind(), dict[str, Any]()
    for entry, value in (SIZES | FURTHER.get(name, {})).items():
        if value is not None and hasattr(known, entry):
            values[entry] = value
    return kind(**values)


def outcome(name: str, folder: Path) -> tuple[str, str]:
    """Return what became of a type, "right", "refused" or "not built", or "WRONG"; and how, or why."""
    try:
        config = small(name)
        config.architectures = None
        config.save_pretrained(folder)
    except Exception as error:
        return "not built", sentence(error)
    settings = ModelSettings(source=f"hf:{folder}", arguments={"weights": "fresh"})
    try:
        if build_language_model(settings, seed=0, device="meta").num_parameters() > MOST_PARAMETERS:
            return "not built", "no small sizes are known"
        model = build_language_model(settings, seed=0).eval()
        tokens = 3 + torch.arange(sum(LENGTHS)) * 7 % 90
        with torch.no_grad():
            alone = torch.cat([model(piece[None])[0] for piece in torch.split(tokens, list(LENGTHS))])
    except Exception as error:
        # a refusal of the package is an outcome; what the small sizes break in the library is none
        why = sentence(error)
        is_refusal = isinstance(error, DiLoCoError) and "is not a causal language model" in why
        return "refused" if is_refusal else "not built", why
    try:
        model.keep_documents_apart()
    except DiLoCoError as error:
        return "refused", sentence(str(error).partition("(")[2].rpartition("). Give")[0])
    numbers = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    with torch.no_grad():
        packed = model(tokens[None], documents=numbers[None])[0]
    off = float((packed - alone).abs().max() / alone.abs().max())
    return "right" if off < CLOSE else "WRONG", f"by {model.masking}, off by {off:.0e}"


def sentence(error: Exception | str) -> str:
    """Return the beginning of a message in one line, without folders of this machine."""
    text = str(error) if isinstance(error, DiLoCoError | str) else f"{type(error).__name__}: {error}"
    text = re.sub(rf"{tempfile.gettempdir()}/\w+/", "", " ".join(text.split()).replace("|", "/"))
    return text.partition(". Use one such as")[0][:160]


def page(outcomes: Mapping[str, tuple[str, str]], version: str) -> str:
    counts = Counter(kind for kind, _ in outcomes.values())
    total = ", ".join(f"{counts[kind]} {kind}" for kind in ("right", "refused", "not built", "WRONG"))
    rows = [(kind, name, why) for name, (kind, why) in outcomes.items()]
    listed = table(("outcome", "type", "how, or why"), sorted(rows))
    return f"transformers {version}, {len(outcomes)} types: {total}.\n\n{listed}\n"


def main() -> None:
    import transformers

    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    logging.disable(logging.WARNING)
    names = sorted({kind.model_type for kind in transformers.MODEL_FOR_CAUSAL_LM_MAPPING} | {"falcon-alibi"})
    outcomes = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            outcomes[name] = outcome(name, Path(folder) / name)
        print(json.dumps([name, *outcomes[name]]), flush=True)
    write_below(MARK, page(outcomes, transformers.__version__), PAGE)


if __name__ == "__main__":
    main()
