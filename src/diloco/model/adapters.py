"""Low-rank adapters next to frozen weights (LoRA, 2106.09685) with ``peft``: add, save and merge them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from diloco.algorithm import model_state, named_parameters
from diloco.errors import ConfigurationError, from_extra
from diloco.model.huggingface import HuggingFaceModel, alike
from diloco.model.settings import ModelSettings, parse_source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peft import LoraConfig

__all__ = ["ADAPTER_FOLDER", "CONFIG_FILE", "add_adapters", "merge_adapters", "save_adapter"]

ADAPTER_FOLDER = "adapter"  # the folder to which a run writes its adapter
CONFIG_FILE = "adapter_config.json"  # present in every folder with an adapter
TESTED_TOKENS = 128  # with which a merged model is compared, in sequences of four
_NAME = "default"  # peft's name for the only adapter of a model; names in files leave it out


def lora_config(settings: ModelSettings) -> LoraConfig:
    """Return the configuration of ``peft`` for settings with a rank.

    Raises:
        ConfigurationError: ``peft`` is not installed.
    """
    with from_extra("finetune", "LoRA needs peft"):
        from peft import LoraConfig
    targets: str | list[str] = list(settings.lora_targets)
    alpha = 2 * settings.lora_rank if settings.lora_alpha is None else settings.lora_alpha
    return LoraConfig(
        r=settings.lora_rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # any number is accepted
        lora_dropout=settings.lora_dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        task_type="CAUSAL_LM",
    )


def add_adapters(model: HuggingFaceModel, settings: ModelSettings) -> None:
    """Freeze ``model`` and add adapters to the modules that ``settings`` name; only the adapters are trained.

    The output of the model stays the same, because one factor of each adapter is initialised to zero. The other is
    drawn from the global generator. Adapters are float32 whatever the type of the frozen weights, which is
    ``settings.base_dtype``.

    Raises:
        ConfigurationError: ``peft`` is not installed, or refuses the targets.
    """
    from peft import inject_adapter_in_model

    wrapped: Any = model.wrapped
    head = wrapped.get_output_embeddings()
    with _in_words(settings, wrapped):
        inject_adapter_in_model(lora_config(settings), wrapped)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
        elif settings.quantization is None:  # after injection, which draws the adapters in the type of the weights
            parameter.data = parameter.data.to(getattr(torch, settings.base_dtype))
    model.projects = model.projects and wrapped.get_output_embeddings() is head
    trained = {name for name, parameter in named_parameters(model).items() if parameter.requires_grad}
    model.adapters = settings
    model.source_has = frozenset(model_state(model).keys() - trained)


@torch.no_grad()
def merge_adapters(model: HuggingFaceModel) -> None:
    """Add every adapter to the weights it belongs to, in place and in float32, and remove it.

    If one of those weights is tied to another, such as an output projection to the embedding, all are separated first.

    Raises:
        ConfigurationError: the weights are quantised, so merging would round them once more; or the merged model does
            not give the logits of the adapters, except for rounding.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    wrapped: Any = model.wrapped
    layers = {
        name: module
        for name, module in wrapped.named_modules()
        if isinstance(module, BaseTunerLayer) or hasattr(module, "unload_and_optionally_merge_module")
    }
    bases = {name: getattr(layer, "get_base_layer", lambda: None)() for name, layer in layers.items()}
    for name, base in bases.items():
        if type(base).__module__.startswith("bitsandbytes"):
            raise ConfigurationError(
                f"{name} is a {type(base).__name__}, so merging an adapter would round its weights once more. Merge "
                "into weights that are not quantised."
            )
    wrapped.float()  # a small change would vanish in the rounding of 16-bit weights
    tokens = torch.arange(TESTED_TOKENS, dtype=torch.int64, device=wrapped.device)
    tokens *= max(1, model.vocab_size // TESTED_TOKENS)
    tokens = (tokens % model.vocab_size).reshape(-1, 4)[:, : model.max_sequence_length]
    expected = model(tokens)
    uses = Counter(id(parameter) for _, parameter in wrapped.named_parameters(remove_duplicate=False))
    adapted = [each for base in bases.values() if base is not None for each in base.parameters(recurse=False)]
    if any(uses[id(parameter)] > 1 for parameter in adapted):
        _separate(wrapped)  # all of them, since the configuration says only whether any are tied
    for name, layer in layers.items():
        if any(name.startswith(f"{outer}.") for outer in layers):
            continue  # inside a layer that merges it, as the adapters of the matrices of experts are
        if hasattr(layer, "unload_and_optionally_merge_module"):
            merged = layer.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        else:
            layer.merge()
            merged = bases[name]
        parent, _, leaf = name.rpartition(".")
        setattr(wrapped.get_submodule(parent), leaf, merged)
    vars(wrapped).pop("peft_config", None)
    wrapped.requires_grad_(True)
    head, embedding = wrapped.get_output_embeddings(), wrapped.get_input_embeddings()
    if head is not None and head.weight is not embedding.weight:
        wrapped.config.tie_word_embeddings = False
    logits = model(tokens)
    # rounding may send a token to another expert, which changes its own sequence
    if sum(map(alike, logits, expected)) < 0.75 * len(tokens):
        raise ConfigurationError(
            f"The model with merged adapters gives other logits than with the adapters beside it (by up to "
            f"{float((logits - expected).abs().max()):.2g}), so {type(wrapped).__name__} can't be merged. Export the "
            "adapter instead (--to adapter)."
        )


def _separate(model: nn.Module) -> None:
    """Give each module parameters of its own."""
    taken: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in taken:
                setattr(module, name, nn.Parameter(parameter.clone()))
            taken.add(id(parameter))


def save_adapter(folder: Path, model: HuggingFaceModel, values: Mapping[str, Tensor]) -> None:
    """Write a folder that ``peft.PeftModel.from_pretrained`` loads.

    Args:
        folder: created if it is missing; existing files are overwritten.
        values: name of a trained parameter -> its value.
    """
    settings = model.adapters
    assert settings is not None
    assert settings.source is not None
    folder.mkdir(parents=True, exist_ok=True)
    config = lora_config(settings)
    config.base_model_name_or_path = parse_source(settings.source).place
    config.inference_mode = True
    made: Any = vars(model.wrapped)["peft_config"]
    config.fan_in_fan_out = made[_NAME].fan_in_fan_out
    tensors = {_file_name(name): value.detach().float().cpu().contiguous() for name, value in values.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(str(folder))


def _file_name(name: str) -> str:
    """Return the name of a parameter in the files of ``peft``.

    >>> _file_name("wrapped.model.layers.0.mlp.up_proj.lora_A.default.weight")
    'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    return f"base_model.model.{name.removeprefix('wrapped.').replace(f'.{_NAME}.', '.')}"


@contextmanager
def _in_words(settings: ModelSettings, wrapped: nn.Module) -> Iterator[None]:
    """Turn any refusal of peft into a configuration error."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to")  # peft corrects it itself
            yield
    except (ValueError, TypeError, ImportError) as error:
        linear = sorted({n.rpartition(".")[2] for n, m in wrapped.named_modules() if isinstance(m, nn.Linear)})
        raise ConfigurationError(
            f"peft refused model.arguments.lora_targets={list(settings.lora_targets)}: "
            f"{' '.join(str(error).split())[:300]} This model has {', '.join(linear)}."
        ) from error
