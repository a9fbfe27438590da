"""Build a model from ``hf:PATH_OR_NAME``: read its configuration and weights, and refuse what can't be trained.

Only installed code runs: no code from a model's folder, and no pickles.
"""

from __future__ import annotations

import copy
import importlib.util
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from diloco.errors import ConfigurationError, DiLoCoError, nearest
from diloco.model.folders import (
    CONFIG_NAME,
    has_weights,
    import_transformers,
    read_json,
    stored_tensors,
    weights_digest,
    without_progress_bars,
)
from diloco.model.huggingface import HuggingFaceModel
from diloco.model.settings import ModelSettings, parse_source
from diloco.waiting import fetching

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["build_huggingface", "stored_digest"]

IMPLEMENTATIONS = {
    **dict.fromkeys(("eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm"), "torch"),
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
}
"""The implementations of attention and experts that a configuration may name -> the installed package that has it."""

PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_NAMES_OF_CODE = {"auto_map", "transformers_weights", "fusion_config"}  # of a configuration; never passed on
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")


def build_huggingface(
    settings: ModelSettings, *, on_meta: bool, definition: Mapping[str, Any] | None = None
) -> HuggingFaceModel:
    """Build the model that ``settings.source`` names, on the CPU in float32.

    Fresh values come from the global generators.

    Args:
        on_meta: build it without memory, and read no weights.
        definition: what `HuggingFaceModel.definition` returned. The source is then not read, and weights are fresh.

    Raises:
        ConfigurationError: the model does not exist or can't be trained; the message says what would work.
    """
    auto = import_transformers().AutoModelForCausalLM
    folder: Path | None = None
    base = "" if definition is None else str(definition.get("base", ""))
    if definition is not None and not settings.lora_rank:
        config = _config_of(definition.get("config"), {}, "the checkpoint")
    else:
        assert settings.source is not None
        place = parse_source(settings.source).place
        folder = _find_folder(place, with_weights=not on_meta and settings.weights != "fresh")
        config = _read_config(folder, settings.arguments)
    _check_kind(config)
    stored = folder is not None and settings.weights != "fresh" and _stored(folder, settings, looked=not on_meta)
    if stored and not on_meta:
        assert folder is not None
        there = weights_digest(folder)
        if base not in ("", there):
            raise ConfigurationError(
                f"The adapters in the checkpoint were trained with other weights ({base}) than those in "
                f"{settings.source} ({there}). Put the original model there."
            )
        base = there
    size = settings.vocab_size
    if folder is not None and size is not None and size != config.vocab_size:
        if stored:
            raise ConfigurationError(
                f"model.arguments.vocab_size={size} does not fit the weights in {folder}, which have "
                f"{config.vocab_size}. Leave it out, or use --model.arguments.weights fresh."
            )
        config.vocab_size = size
    pad = getattr(config, "pad_token_id", None)  # not every architecture has one
    if isinstance(pad, int) and not 0 <= pad < config.vocab_size:
        config.pad_token_id = None  # it belongs to a larger vocabulary; nothing is padded here
    with _in_words(type(config).__name__):
        if on_meta:
            with torch.device("meta"):
                wrapped = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
        elif stored:
            assert folder is not None
            wrapped = _load(folder, config, _quantised(settings))
        else:
            wrapped = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
    if settings.quantization is None or on_meta:
        wrapped = wrapped.float()
    model = HuggingFaceModel(wrapped, z_loss=settings.z_loss)
    model.base = base
    if not on_meta:
        with _in_words(f"{type(config).__name__}, in a first forward pass"):
            model.probe()
    if folder is not None and (not on_meta or settings.weights == "fresh" or stored):
        model.weights = "stored" if stored else "fresh"
    return model


def stored_digest(settings: ModelSettings, definition: Mapping[str, Any] | None = None) -> str:
    """Return a digest of the weights from which a model of ``transformers`` begins; "" if they are fresh.

    Args:
        definition: as for `build_huggingface`; it gives the digest if the weights are not read.

    Raises:
        ConfigurationError, CheckpointError: the folder does not exist, or its weights can't be read.
    """
    assert settings.source is not None
    if definition is not None and not settings.lora_rank:
        return str(definition.get("base", ""))
    if settings.weights == "fresh":
        return ""
    folder = _find_folder(parse_source(settings.source).place, with_weights=True)
    return weights_digest(folder) if _stored(folder, settings, looked=True) else ""


def _find_folder(place: str, *, with_weights: bool) -> Path:
    """Return the local folder, or the local copy of the hub's files."""
    local = Path(place).expanduser()
    if local.is_dir():
        return local
    if local.exists() or not _HUB_NAME.fullmatch(place):
        what = "is not a folder" if local.exists() else "does not exist and is not a valid name on the hub"
        raise ConfigurationError(
            f"model.source=hf:{place} {what}. Give a folder with a config.json, or a name such as "
            "hf:HuggingFaceTB/SmolLM2-135M."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name, _, revision = place.partition("@")
    wanted = ["config.json", "generation_config.json"]
    if with_weights:
        wanted += ["model.safetensors", "model-*.safetensors", "model.safetensors.index.json", *PICKLES[1:]]
    try:
        with fetching(name, "models"):
            return Path(snapshot_download(name, revision=revision or None, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigurationError(
            f"model.source=hf:{place} is not a local folder and can't be downloaded from the Hugging Face hub: "
            f"{str(error).splitlines()[0]} Check the name, or give a local folder."
        ) from error


def _read_config(folder: Path, arguments: Mapping[str, Any]) -> PretrainedConfig:
    from transformers import PretrainedConfig

    if not (folder / CONFIG_NAME).is_file():
        raise ConfigurationError(
            f"{folder} has no config.json, which describes the model. Give a folder written by save_pretrained."
        )
    with _in_words(str(folder)):
        values, _ = PretrainedConfig.get_config_dict(folder, local_files_only=True)
    return _config_of(values, arguments, str(folder))


def _config_of(described: Any, arguments: Mapping[str, Any], where: str) -> PretrainedConfig:
    from transformers import CONFIG_MAPPING, __version__

    values: dict[str, Any] = dict(described) if isinstance(described, Mapping) else {}
    model_type = values.pop("model_type", None)
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        custom = ", and code that comes with a model is not run" if "auto_map" in values else ""
        raise ConfigurationError(
            f"{where} has model_type={model_type!r}, which transformers {__version__} does not know{custom}. Try a "
            "newer transformers, or write your own function (--model module:function)."
        )
    with _in_words(where):
        kind = CONFIG_MAPPING[model_type]
        known = kind()
        for name in arguments:
            if name not in values and not hasattr(known, name):
                raise ConfigurationError(
                    f"model.arguments.{name} is not a part of {kind.__name__}; {nearest(name, vars(known).keys())}"
                )
        values |= copy.deepcopy(dict(arguments))
        _check_implementations(values, where)
        config: PretrainedConfig = kind.from_dict(
            {name: value for name, value in values.items() if name not in _NAMES_OF_CODE}
        )
    return config


def _check_implementations(values: Any, where: str, name: str = "") -> None:
    """Refuse an implementation of attention or experts that is not in `IMPLEMENTATIONS`, at any depth of ``values``.

    For another name, the library may fetch code from the hub and run it.
    """
    if isinstance(values, Mapping):
        for key, value in values.items():
            _check_implementations(value, where, name if "_implementation" in name else str(key))
    elif isinstance(values, list | tuple):
        for value in values:
            _check_implementations(value, where, name)
    elif "_implementation" in name and isinstance(values, str):
        package = IMPLEMENTATIONS.get(values)
        if package is None or importlib.util.find_spec(package) is None:
            lack = "is not known" if package is None else f"needs the package {package}"
            raise ConfigurationError(
                f"{where} has {name}={values!r}, which {lack}; code from elsewhere is not run. Known are "
                f"{', '.join(IMPLEMENTATIONS)}: --model.arguments '{{attn_implementation = \"sdpa\"}}'."
            )


def _check_kind(config: PretrainedConfig) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    name = type(config).__name__.removesuffix("Config")
    if getattr(config, "is_encoder_decoder", False):
        why = "an encoder with a decoder"
    elif config.get_text_config() is not config:
        why = "a model of more than text"
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        why = "not a causal language model of transformers"
    elif getattr(config, "quantization_config", None) is not None:
        why = "quantised, and quantised weights can't be trained"
    else:
        return
    raise ConfigurationError(f"{name} is {why}. Use a causal language model such as Llama, Qwen3 or GPT-2.")


def _stored(folder: Path, settings: ModelSettings, *, looked: bool) -> bool:
    """Return whether to begin from the weights in ``folder``; ``looked``: whether any weights have been fetched."""
    if has_weights(folder) or not looked:
        return has_weights(folder)
    if pickles := [name for name in PICKLES if (folder / name).is_file()]:
        raise ConfigurationError(
            f"The weights in {folder} are in {pickles[0]}, a pickle, which could run any code and is not read. Convert "
            "them to safetensors, or use --model.arguments.weights fresh."
        )
    if settings.weights == "stored" or settings.lora_rank:
        raise ConfigurationError(
            f"{folder} has no model.safetensors, but stored weights are needed. For new weights, use "
            "--model.arguments.weights fresh without LoRA."
        )
    return False


def _quantised(settings: ModelSettings) -> dict[str, Any]:
    """Return the arguments that load the weights quantised, if that is asked for.

    Raises:
        ConfigurationError: bitsandbytes is not installed, or does not work on this machine.
    """
    if settings.quantization is None:
        return {}
    try:
        import bitsandbytes  # noqa: F401  # transformers imports it later, with a less specific error
        from transformers import BitsAndBytesConfig
    except Exception as error:  # its native library raises other types
        raise ConfigurationError(
            f"model.quantization={settings.quantization!r} needs bitsandbytes, which can't be imported ({error}): pip "
            "install bitsandbytes, or use --model.arguments.base-dtype bfloat16."
        ) from error
    made: Any = BitsAndBytesConfig
    dtype = getattr(torch, settings.base_dtype)
    if settings.quantization == "int8":
        return {"quantization_config": made(load_in_8bit=True)}
    return {"quantization_config": made(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)}


def _load(folder: Path, config: PretrainedConfig, quantised: Mapping[str, Any]) -> PreTrainedModel:
    """Load all weights of ``folder``. Weights that this kind of model does not use are ignored.

    The library gets tensors and no folder, in which it would also look for adapters, other weights and code.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig

    generation = folder / "generation_config.json"
    with without_progress_bars():
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        wrapped, found = model_class.from_pretrained(
            None,
            config=config,
            generation_config=GenerationConfig.from_dict(read_json(generation)) if generation.is_file() else None,
            state_dict=dict(stored_tensors(folder)),
            dtype=torch.float32,
            output_loading_info=True,
            trust_remote_code=False,
            **quantised,
        )
    if missing := sorted(found["missing_keys"]):
        raise ConfigurationError(
            f"The weights in {folder} lack {', '.join(missing[:5])}. Give all weights that the configuration needs, or "
            "use --model.arguments.weights fresh."
        )
    for module in wrapped.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # bitsandbytes 0.50 on a CPU: after one evaluation, training would use the fast kernel, without gradients
            module.support_avx512bf16_for_cpu = False
    model: PreTrainedModel = wrapped
    return model


@contextmanager
def _in_words(what: str) -> Iterator[None]:
    """Turn any refusal of transformers, which has types of its own, into a configuration error."""
    try:
        yield
    except DiLoCoError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"transformers refused {what}: {str(error).strip() or type(error).__name__}"
        ) from error
