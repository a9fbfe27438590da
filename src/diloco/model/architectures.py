"""The native decoder as a stock model of ``transformers``, with the same logits, and back.

=================  ===========================  ====================================
feed-forward       without QK-norm              with QK-norm
=================  ===========================  ====================================
swiglu             ``LlamaForCausalLM``         ``Qwen3ForCausalLM``
gelu (tanh)        ``ArceeForCausalLM``         ``ApertusForCausalLM``
=================  ===========================  ====================================

The last two are published with other activations; with ``hidden_act="gelu_pytorch_tanh"``, and for Apertus plain rotary
positions, they are the native decoder. Rotary angles are float64 here and float32 there, so that logits drift apart by
round-off that grows with the position.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diloco.errors import CheckpointError, ConfigurationError
from diloco.model.settings import ModelSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from diloco.model.transformer import Transformer

__all__ = [
    "SIZES",
    "as_huggingface",
    "is_huggingface_folder",
    "native_settings",
    "native_weights",
    "stored_tensors",
    "why_not_native",
]

SIZES = (
    *("layers", "width", "ffn_width", "heads", "kv_heads", "ffn", "vocab_size"),
    *("rope_theta", "norm_epsilon", "qk_norm", "tie_embeddings"),
)
"""The settings of a native decoder that decide what its weights mean."""

CONFIG_NAME = "config.json"
WEIGHTS_NAME, INDEX_NAME = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class _Architecture:
    """A decoder of ``transformers`` that the native one equals, under the right configuration."""

    ffn: Literal["swiglu", "gelu"]
    qk_norm: bool
    activations: tuple[str, ...]
    """Names there of the activation that is used here; the first is written."""
    attention_norm: str = "input_layernorm"
    feed_forward_norm: str = "post_attention_layernorm"


_SILU, _TANH_GELU = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_new")
_ARCHITECTURES = {
    "llama": _Architecture("swiglu", False, _SILU),
    "qwen3": _Architecture("swiglu", True, _SILU),
    "arcee": _Architecture("gelu", False, _TANH_GELU),
    "apertus": _Architecture("gelu", True, _TANH_GELU, "attention_layernorm", "feedforward_layernorm"),
}
"""By ``model_type``."""

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
    """``model`` as the stock architecture that has its logits, in evaluation mode.

    The parameters are shared with ``model``, not copied. No generator is drawn from.

    Raises:
        ConfigurationError: ``transformers`` is not installed.
    """
    transformers = _transformers()
    settings = model.settings
    model_type, architecture = next(
        (name, entry)
        for name, entry in _ARCHITECTURES.items()
        if (entry.ffn, entry.qk_norm) == (settings.ffn, settings.qk_norm)
    )
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=settings.vocab_size,
        hidden_size=settings.width,
        intermediate_size=settings.ffn_width,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads if settings.kv_heads is not None else settings.heads,
        head_dim=settings.width // settings.heads,
        hidden_act=architecture.activations[0],
        max_position_embeddings=settings.max_sequence_length,
        rms_norm_eps=settings.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        tie_word_embeddings=settings.tie_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype=str(model.embedding.weight.dtype).removeprefix("torch."),
    )
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config)
    # The one thing that is computed and not loaded.
    made.model.rotary_emb = type(made.model.rotary_emb)(config).to(model.embedding.weight.device)
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    state = {_their_name(name, architecture): value for name, value in values.items()}
    if settings.tie_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    made.load_state_dict(state, assign=True)
    made.tie_weights()
    converted: PreTrainedModel = made.eval()
    return converted


def is_huggingface_folder(path: Path) -> bool:
    """Whether ``path`` is a folder with a ``config.json`` of ``transformers``."""
    return (path / CONFIG_NAME).is_file()


def native_settings(folder: Path) -> ModelSettings:
    """What the ``config.json`` in ``folder`` says, as settings of the native decoder.

    Raises:
        ConfigurationError: it describes something that the native decoder can't express, all of which is named; or
            ``transformers`` is not installed.
        CheckpointError: there is none, or it can't be read.
    """
    if why := why_not_native(folder):
        raise ConfigurationError(
            f"{folder} holds {why}. A model without, or that one as it is (--model hf:{folder}), would work. "
            "Nothing was started."
        )
    architecture, config = _configuration_in(folder)
    return ModelSettings(
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        ffn_width=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=None if config.num_key_value_heads == config.num_attention_heads else config.num_key_value_heads,
        ffn=architecture.ffn,
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        rope_theta=float(config.rope_parameters["rope_theta"]),
        norm_epsilon=config.rms_norm_eps,
        qk_norm=architecture.qk_norm,
        tie_embeddings=bool(config.tie_word_embeddings),
    )


def why_not_native(folder: Path) -> str:
    """What of the model in ``folder`` the native decoder does not have, in words; empty if it equals it.

    Raises:
        CheckpointError: there is no ``config.json``, or it can't be read.
        ConfigurationError: ``transformers`` is not installed.
    """
    model_type = _read_json(folder / CONFIG_NAME).get("model_type")
    if model_type not in _ARCHITECTURES:
        return f"a model of type {model_type!r}; the native decoder equals {', '.join(_ARCHITECTURES)}"
    architecture, config = _configuration_in(folder)
    odd = _not_expressible(config, architecture)
    return f"a model with {'; '.join(odd)}, which the native decoder does not have" if odd else ""


def _configuration_in(folder: Path) -> tuple[_Architecture, Any]:
    architecture, auto_config = (
        _ARCHITECTURES[_read_json(folder / CONFIG_NAME)["model_type"]],
        _transformers().AutoConfig,
    )
    try:
        return architecture, auto_config.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{folder / CONFIG_NAME} can't be read: {error}. Nothing was started.") from error


def native_weights(folder: Path, settings: ModelSettings) -> dict[str, Tensor]:
    """Native parameter name -> float32 value on the CPU, from the ``.safetensors`` files in ``folder``.

    Args:
        folder: with ``model.safetensors``, or several files and their index.
        settings: of `native_settings` for this folder.

    Raises:
        CheckpointError: a file is missing or damaged, or there are weights too many or too few; it names them.
    """
    architecture = next(
        entry for entry in _ARCHITECTURES.values() if (entry.ffn, entry.qk_norm) == (settings.ffn, settings.qk_norm)
    )
    due = {_their_name(name, architecture): name for name in _native_names(settings)}
    # Tied, it is written by some and left out by others; older files hold a table of the rotary frequencies.
    optional = {"lm_head.weight"} if settings.tie_embeddings else set()
    found: dict[str, Tensor] = {}
    unknown: list[str] = []
    for name, value in stored_tensors(folder):
        if name in due:
            found[due[name]] = value.float()
        elif name not in optional and not name.endswith("rotary_emb.inv_freq"):
            unknown.append(name)
    missing = [name for name, native in due.items() if native not in found]
    for words, names in (("lack", missing), ("hold, which the native decoder does not have,", unknown)):
        if names:
            raise CheckpointError(
                f"the weights in {folder} {words} {', '.join(sorted(names)[:5])}"
                f"{' and others' if len(names) > 5 else ''}. Nothing was started."
            )
    return found


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigurationError(
            "transformers is not installed: pip install 'diloco[hf]' would work. Nothing was started."
        ) from error
    return transformers


def _their_name(native: str, architecture: _Architecture) -> str:
    """A parameter's name there.

    >>> _their_name("layers.3.attention.query.weight", _ARCHITECTURES["llama"])
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


def _native_names(settings: ModelSettings) -> list[str]:
    from diloco.model.transformer import build_model

    return [name for name, _ in build_model(settings, seed=0, device="meta").named_parameters()]


def _not_expressible(config: Any, architecture: _Architecture) -> list[str]:
    """What of ``config`` the native decoder has no setting for, in the words of its file."""
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
    # Not all of the four have each of these.
    for name in ("attention_bias", "mlp_bias", "attention_dropout", "sliding_window", "quantization_config"):
        if value := getattr(config, name, None):
            odd.append(f"{name}={value}" if isinstance(value, int | float) else name)
    return odd


def stored_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the ``.safetensors`` weights in ``folder``, file by file, by its name there.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    if (folder / INDEX_NAME).is_file():
        shards = _read_json(folder / INDEX_NAME).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise CheckpointError(f"{folder / INDEX_NAME} has no weight_map of file names. Nothing was started.")
        names = sorted(set(shards.values()))
    else:
        names = [WEIGHTS_NAME]
    for name in names:
        path = folder / name
        if Path(name).name != name or not path.is_file():
            pickles = sorted(entry.name for entry in folder.glob("*.bin"))
            why = f" ({pickles[0]} is a pickle, which could run any code, and is not read)" if pickles else ""
            raise CheckpointError(f"{folder} has no file {name} of weights{why}. Nothing was started.")
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for key in file.keys():  # noqa: SIM118  # no dict
                    yield key, file.get_tensor(key)
        except SafetensorError as error:
            raise CheckpointError(f"{path} is no safetensors file: {error}. Nothing was started.") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not there. Nothing was started.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read: {error}. Nothing was started.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object. Nothing was started.")
    return value
