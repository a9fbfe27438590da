"""Convert the native decoder to a stock model of ``transformers`` with the same logits, and back.

=================  ===========================  ====================================
feed-forward       without QK-norm              with QK-norm
=================  ===========================  ====================================
swiglu             ``LlamaForCausalLM``         ``Qwen3ForCausalLM``
gelu (tanh)        ``ArceeForCausalLM``         ``ApertusForCausalLM``
=================  ===========================  ====================================

The last two are published with other activations. With ``hidden_act="gelu_pytorch_tanh"``, and for Apertus plain rotary
positions, they equal the native decoder. Rotary angles are float64 here and float32 in ``transformers``, so the logits
differ by round-off that grows with the position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from diloco.errors import CheckpointError, ConfigurationError
from diloco.model.huggingface_folder import CONFIG_NAME, import_transformers, read_json, stored_tensors
from diloco.model.settings import ModelSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from diloco.model.transformer import Transformer

__all__ = [
    "SIZES",
    "as_huggingface",
    "native_settings",
    "native_weights",
    "why_not_native",
]

SIZES = (
    *("layers", "width", "ffn_width", "heads", "kv_heads", "ffn", "vocab_size"),
    *("rope_theta", "norm_epsilon", "qk_norm", "tie_embeddings"),
)
"""The settings of a native decoder that determine the meaning of its weights."""


_THEIR_SETTINGS = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "ffn_width": "intermediate_size",
    "heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "max_sequence_length": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
}
"""Our name -> the name in ``transformers`` of settings with the same meaning."""


@dataclass(frozen=True)
class _Architecture:
    """A decoder of ``transformers`` that equals the native one under the right configuration."""

    model_type: str
    ffn: Literal["swiglu", "gelu"]
    qk_norm: bool
    activations: tuple[str, ...]  # its names of the activation that is used here; the first one is written
    attention_norm: str = "input_layernorm"
    feed_forward_norm: str = "post_attention_layernorm"


_SILU, _TANH_GELU = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_new")
_ARCHITECTURES = (
    _Architecture("llama", "swiglu", False, _SILU),
    _Architecture("qwen3", "swiglu", True, _SILU),
    _Architecture("arcee", "gelu", False, _TANH_GELU),
    _Architecture("apertus", "gelu", True, _TANH_GELU, "attention_layernorm", "feedforward_layernorm"),
)

_OF_LAYER = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
_OUTSIDE = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


def as_huggingface(model: Transformer) -> PreTrainedModel:
    """Return ``model`` as the stock architecture with the same logits, in evaluation mode.

    The parameters are shared with ``model``, not copied. No random generator advances.

    Raises:
        ConfigurationError: ``transformers`` is not installed.
    """
    transformers = import_transformers()
    settings = model.settings
    architecture = _architecture_of(settings)
    config = transformers.AutoConfig.for_model(
        architecture.model_type,
        **{theirs: getattr(settings, ours) for ours, theirs in _THEIR_SETTINGS.items()},
        num_key_value_heads=settings.kv_heads if settings.kv_heads is not None else settings.heads,
        head_dim=settings.width // settings.heads,
        hidden_act=architecture.activations[0],
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        tie_word_embeddings=settings.tie_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype=str(model.embedding.weight.dtype).removeprefix("torch."),
    )
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    with torch.device(model.embedding.weight.device):  # the rotary table is computed, not loaded
        made.model.rotary_emb = type(made.model.rotary_emb)(config)
    state = {_their_name(name, architecture): parameter.detach() for name, parameter in model.named_parameters()}
    if settings.tie_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    made.load_state_dict(state, assign=True)
    made.tie_weights()
    converted: PreTrainedModel = made.eval()
    return converted


def native_settings(folder: Path) -> ModelSettings:
    """Return the settings of the native decoder that equals the ``config.json`` in ``folder``.

    Raises:
        ConfigurationError: the native decoder can't express the configuration, and the message names everything that is
            different; or ``transformers`` is not installed.
        CheckpointError: there is no such file, or it can't be read.
    """
    if why := why_not_native(folder):
        raise ConfigurationError(
            f"{folder} holds {why}. Use another model, or use this one directly (--model hf:{folder})."
        )
    architecture, config = _configuration_in(folder)
    assert architecture is not None
    heads = config.num_attention_heads
    return ModelSettings(
        **{ours: getattr(config, theirs) for ours, theirs in _THEIR_SETTINGS.items()},
        kv_heads=None if config.num_key_value_heads == heads else config.num_key_value_heads,
        ffn=architecture.ffn,
        rope_theta=float(config.rope_parameters["rope_theta"]),
        qk_norm=architecture.qk_norm,
        tie_embeddings=bool(config.tie_word_embeddings),
    )


def why_not_native(folder: Path) -> str:
    """Return what the native decoder can't express of the model in ``folder``, as text; "" if they are equal.

    Raises:
        CheckpointError: there is no ``config.json``, or it can't be read.
        ConfigurationError: ``transformers`` is not installed.
    """
    architecture, config = _configuration_in(folder)
    if architecture is None:
        known = ", ".join(each.model_type for each in _ARCHITECTURES)
        return f"a model of type {config!r}, but the native decoder equals only {known}"
    odd = _not_expressible(config, architecture)
    return f"a model with {'; '.join(odd)}, which the native decoder does not support" if odd else ""


def _configuration_in(folder: Path) -> tuple[_Architecture | None, Any]:
    """Return architecture and configuration; for an unsupported architecture, None and its ``model_type``."""
    model_type = read_json(folder / CONFIG_NAME).get("model_type")
    architecture = next((each for each in _ARCHITECTURES if each.model_type == model_type), None)
    if architecture is None:
        return None, model_type
    auto_config = import_transformers().AutoConfig
    try:
        return architecture, auto_config.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{folder / CONFIG_NAME} can't be read: {error}.") from error


def native_weights(folder: Path, settings: ModelSettings) -> dict[str, Tensor]:
    """Return native parameter name -> float32 value on the CPU, from the ``.safetensors`` files in ``folder``.

    Args:
        folder: a folder with ``model.safetensors``, or several files and their index.
        settings: the result of `native_settings` for this folder.

    Raises:
        CheckpointError: a file is missing or damaged, or weights are missing or unexpected; the message names them.
    """
    from diloco.model.transformer import build_model

    architecture = _architecture_of(settings)
    native = build_model(settings, seed=0, device="meta")
    due = {_their_name(name, architecture): name for name, _ in native.named_parameters()}
    # Some files contain the tied head and others leave it out; older files contain a table of the rotary frequencies.
    optional = {"lm_head.weight"} if settings.tie_embeddings else set()
    found: dict[str, Tensor] = {}
    unknown: list[str] = []
    for name, value in stored_tensors(folder):
        if name in due:
            found[due[name]] = value.float()
        elif name not in optional and not name.endswith("rotary_emb.inv_freq"):
            unknown.append(name)
    missing = [name for name, ours in due.items() if ours not in found]
    for what, names in (("lack", missing), ("include entries unknown to the native decoder:", unknown)):
        if names:
            more = " and others" if len(names) > 5 else ""
            raise CheckpointError(f"The weights in {folder} {what} {', '.join(sorted(names)[:5])}{more}.")
    return found


def _architecture_of(settings: ModelSettings) -> _Architecture:
    kind = settings.ffn, settings.qk_norm
    return next(each for each in _ARCHITECTURES if (each.ffn, each.qk_norm) == kind)


def _their_name(native: str, architecture: _Architecture) -> str:
    """Return the name of a parameter in ``transformers``.

    >>> _their_name("layers.3.attention.query.weight", _ARCHITECTURES[0])
    'model.layers.3.self_attn.q_proj.weight'
    """
    stem = native.removesuffix(".weight")
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.weight"
    _, index, part = stem.split(".", 2)
    of_layer = _OF_LAYER | {
        "attention_norm": architecture.attention_norm,
        "feed_forward_norm": architecture.feed_forward_norm,
    }
    return f"model.layers.{index}.{of_layer[part]}.weight"


def _not_expressible(config: Any, architecture: _Architecture) -> list[str]:
    """Return the entries of ``config`` for which the native decoder has no setting, as in its file."""
    odd = []
    rope: Mapping[str, Any] = config.rope_parameters
    if rope.get("rope_type", "default") != "default":
        odd.append(f"rotary positions of type {rope['rope_type']!r}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        odd.append(f"partial_rotary_factor={rope['partial_rotary_factor']}")
    if config.hidden_act not in architecture.activations:
        odd.append(f"hidden_act={config.hidden_act!r} (its own is {architecture.activations[0]!r})")
    head_width = getattr(config, "head_dim", None)
    if head_width is not None and head_width * config.num_attention_heads != config.hidden_size:
        odd.append(f"head_dim={head_width}, not hidden_size / num_attention_heads")
    # Not every architecture has all of these.
    for name in ("attention_bias", "mlp_bias", "attention_dropout", "sliding_window", "quantization_config"):
        if value := getattr(config, name, None):
            odd.append(f"{name}={value}" if isinstance(value, int | float) else name)
    return odd
