"""Folders of ``transformers``: weights, configuration, and the stock models that equal the native decoder.

Its feed-forward and QK-norm decide: SwiGLU is ``LlamaForCausalLM``, and with QK-norm ``Qwen3ForCausalLM``; GELU (tanh)
is ``ArceeForCausalLM`` and ``ApertusForCausalLM``, which are published with other activations, but equal it with
``hidden_act="gelu_pytorch_tanh"``, and for Apertus plain rotary positions. The names of parameters are the same, but
for two norms of Apertus. Rotary angles are float64 here and float32 in ``transformers``, so the logits differ by
round-off that grows with the position. Pickles are never read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diloco.checkpoint import Lazy
from diloco.errors import CheckpointError, from_extra
from diloco.model.settings import DecoderSettings
from diloco.private_files import check_regular, read_regular

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from diloco.model.transformer import Transformer


CONFIG_NAME, WEIGHTS_NAME, SHARDS = "config.json", "model.safetensors", "model-*.safetensors"
GENERATION_NAME, CARD_NAME = "generation_config.json", "README.md"
MODEL_TYPES: dict[tuple[Literal["swiglu", "gelu"], bool], str] = {
    ("swiglu", False): "llama",
    ("swiglu", True): "qwen3",
    ("gelu", False): "arcee",
    ("gelu", True): "apertus",
}
_APERTUS = {
    "input_layernorm": "attention_layernorm",
    "post_attention_layernorm": "feedforward_layernorm",
}
_SAME = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "ffn_width": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "max_sequence_length": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
"""Our setting -> the entry of a configuration with the same meaning."""


def as_huggingface(model: Transformer) -> PreTrainedModel:
    """Return ``model`` as the stock architecture with the same logits, in evaluation mode.

    The parameters are shared with ``model``, not copied. No random generator advances.
    """
    embedding = model.model.embed_tokens.weight
    config = _configuration(model.settings)
    config.dtype = embedding.dtype
    with torch.device("meta"):
        wrapped = import_transformers().AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    with torch.device(embedding.device):  # the rotary table is computed, not loaded
        wrapped.model.rotary_emb = type(wrapped.model.rotary_emb)(config)
    state = {_stock_name(name, config.model_type): value.detach() for name, value in model.named_parameters()}
    if model.lm_head is None:
        state["lm_head.weight"] = embedding.detach()
    wrapped.load_state_dict(state, assign=True)
    wrapped.tie_weights()
    stock: PreTrainedModel = wrapped.eval()
    return stock


def native_weights(folder: Path) -> Mapping[str, Tensor]:
    """Return native parameter name -> float32 value, read when it is asked for, of a saved `as_huggingface`.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    model_type = str(read_json(folder / CONFIG_NAME).get("model_type"))
    stored = stored_tensors(folder)
    return Lazy({_stock_name(name, model_type, back=True): name for name in stored}, lambda name: stored[name].float())


def _configuration(settings: DecoderSettings) -> PretrainedConfig:
    values = {theirs: getattr(settings, ours) for ours, theirs in _SAME.items()}
    config: PretrainedConfig = import_transformers().AutoConfig.for_model(
        MODEL_TYPES[settings.ffn, settings.qk_norm],
        **values | {"num_key_value_heads": settings.kv_heads or settings.heads},
        head_dim=settings.width // settings.heads,
        hidden_act="silu" if settings.ffn == "swiglu" else "gelu_pytorch_tanh",
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return config


def _stock_name(name: str, model_type: str, *, back: bool = False) -> str:
    """Return the name of a parameter in a model of that type, or ``back``: its name here.

    >>> _stock_name("model.layers.3.input_layernorm.weight", "apertus")
    'model.layers.3.attention_layernorm.weight'
    """
    for ours, theirs in _APERTUS.items() if model_type == "apertus" else ():
        name = name.replace(f".{theirs}.", f".{ours}.") if back else name.replace(f".{ours}.", f".{theirs}.")
    return name


def import_transformers() -> Any:
    """Return the library, which takes seconds to import, without progress bars, or raise `ConfigurationError`."""
    with from_extra("hf", "A model of transformers needs that package"):
        import transformers
    library: Any = transformers
    library.utils.logging.disable_progress_bar()
    return library


def is_huggingface_folder(path: Path) -> bool:
    """Return whether ``path`` is a folder with a ``config.json`` of ``transformers``."""
    return (path / CONFIG_NAME).is_file()


def stored_tensors(folder: Path) -> Mapping[str, Tensor]:
    """Return the tensors of the ``.safetensors`` weights in ``folder`` by name; each is read when it is asked for.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    whole = folder / WEIGHTS_NAME
    files = [whole] if whole.is_file() else sorted(folder.glob(SHARDS))
    if not files:
        pickles = sorted(entry.name for entry in folder.glob("*.bin"))
        others = sorted(entry.name for entry in folder.glob("*.safetensors"))
        why = f" ({pickles[0]} is a pickle, which could run any code, and is not read)" if pickles else ""
        why = f" ({others[0]} has another name)" if others else why
        raise CheckpointError(f"{folder} has no weights file {WEIGHTS_NAME}{why}.")
    return tensors_in(files)


def tensors_in(files: Sequence[Path]) -> Mapping[str, Tensor]:
    """Return the tensors of ``.safetensors`` files by name; each is read when it is asked for.

    Raises:
        CheckpointError: a file is missing or damaged, or two hold the same name.
    """
    places: dict[str, tuple[Path, str]] = {}
    for path in files:
        try:
            check_regular(path, sys.maxsize)
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # not a dict
                    if name in places:
                        raise CheckpointError(f"{path} and {places[name][0]} both hold {name}. Keep one of them.")
                    places[name] = path, name
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} is not a valid safetensors file: {error}.") from error
    return Lazy(places, _read)


def _read(place: tuple[Path, str]) -> Tensor:
    with safe_open(place[0], framework="pt", device="cpu") as file:
        tensor: Tensor = file.get_tensor(place[1])
    return tensor


@dataclass(frozen=True)
class Unread:
    """A tensor of a mapping that is read when `transformers` indexes it, as it does with slices of its own files."""

    tensors: Mapping[str, Tensor]
    name: str

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensors[self.name][index]


def weights_digest(folder: Path) -> str:
    """Return a digest of all weights in ``folder``: names, types, shapes and values, in any division into files.

    Files that have not changed since the last call are not read again.
    """
    files = (path.stat() for path in sorted(folder.glob("*.safetensors*")))
    return _digest(folder, tuple((file.st_ino, file.st_size, file.st_mtime_ns) for file in files))


@cache
def _digest(folder: Path, version: tuple[tuple[int, int, int], ...]) -> str:
    lines = []
    for name, value in stored_tensors(folder).items():
        data = value.contiguous().reshape(-1).view(torch.uint8).numpy()
        lines.append(f"{name} {value.dtype} {tuple(value.shape)} {xxhash.xxh3_128_hexdigest(data.data)}")
    return xxhash.xxh3_128_hexdigest("\n".join(sorted(lines)).encode())


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or raise `CheckpointError`."""
    try:
        value = json.loads(read_regular(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not contain a JSON object.")
    return value
