"""Low-rank adapters next to frozen weights (LoRA, 2106.09685) with ``peft``: add, save and merge them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor

from diloco.algorithm import model_state, named_parameters
from diloco.errors import ConfigurationError, from_extra
from diloco.model.huggingface import HuggingFaceModel, base_card
from diloco.model.settings import ModelSettings

if TYPE_CHECKING:
    from peft import LoraConfig


_NAME = "default"  # peft's name for the only adapter of a model; names in files leave it out


def lora_config(settings: ModelSettings) -> LoraConfig:
    """Return the configuration of ``peft`` for settings with a rank."""
    with from_extra("finetune", "LoRA needs peft"):
        from peft import LoraConfig
    options = settings.huggingface
    return LoraConfig(
        r=settings.lora_rank,
        lora_alpha=options.lora_alpha or 2 * settings.lora_rank,  # type: ignore[arg-type]  # any number is accepted
        lora_dropout=options.lora_dropout,
        target_modules="all-linear" if options.lora_targets == ("all-linear",) else list(options.lora_targets),
        task_type="CAUSAL_LM",
    )


def add_adapters(model: HuggingFaceModel) -> None:
    """Freeze ``model`` and add adapters to the modules that its settings name; only the adapters are trained.

    The output of the model stays the same, because one factor of each adapter is initialised to zero. The other is
    drawn from the global generator. Adapters are float32 whatever the type of the frozen weights, which is
    ``base_dtype``.

    Raises:
        ConfigurationError: ``peft`` is not installed, or refuses the targets.
    """
    settings, wrapped = model.settings, model.wrapped
    config = lora_config(settings)
    from peft.tuners.lora import LoraModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    head = wrapped.get_output_embeddings()
    tied = head is not None and head.weight is wrapped.get_input_embeddings().weight
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to")  # peft corrects it itself
            tuner = LoraModel(wrapped, config, _NAME)
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigurationError(f"peft refused the adapters: {' '.join(str(error).split())}") from error
    ends = wrapped.get_input_embeddings(), wrapped.get_output_embeddings()
    if tied and any(isinstance(end, BaseTunerLayer) for end in ends):
        raise ConfigurationError(
            "An adapter of an output projection that is tied to the embedding can't be merged. Choose other "
            "model.arguments.lora_targets (all-linear leaves it out)."
        )
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
        elif settings.quantization is None:  # after injection, which draws the adapters in the type of the weights
            parameter.data = parameter.data.to(getattr(torch, settings.huggingface.base_dtype))
    trained = {name for name, parameter in named_parameters(model).items() if parameter.requires_grad}
    model.tuner = (tuner,)
    model.source_has = frozenset(model_state(model).keys() - trained)


@torch.no_grad()
def merge_adapters(model: HuggingFaceModel) -> None:
    """Add every adapter to the weights it belongs to, in place and in float32, and remove it.

    Raises:
        ConfigurationError: the weights are quantised, so merging would round them once more.
    """
    quantization, wrapped = model.settings.quantization, model.wrapped
    if quantization is not None:
        raise ConfigurationError(
            f"Merging an adapter into {quantization} weights would round them once more. Merge into weights "
            "that are not quantised."
        )
    wrapped.float()  # a small change would vanish in the rounding of 16-bit weights
    model.tuner[0].merge_and_unload()
    model.tuner = ()
    wrapped.requires_grad_(True)


def save_adapter(folder: Path, model: HuggingFaceModel, values: Mapping[str, Tensor]) -> None:
    """Write a folder that ``peft.PeftModel.from_pretrained`` loads.

    Args:
        folder: created if it is missing; existing files are overwritten.
        values: name of a trained parameter -> its value.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = lora_config(model.settings)
    config.base_model_name_or_path = base_card(model.settings)["base_model"]  # no path: others have it elsewhere
    if not Path(model.settings.place).expanduser().is_dir():
        config.revision = model.settings.on_hub[1]
    config.inference_mode = True
    config.fan_in_fan_out = vars(model.tuner[0].peft_config[_NAME])["fan_in_fan_out"]
    tensors = {_file_name(name): value.detach().float().cpu().contiguous() for name, value in values.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(str(folder))


def _file_name(name: str) -> str:
    """Return the name of a parameter in the files of ``peft``.

    >>> _file_name("wrapped.model.layers.0.mlp.up_proj.lora_A.default.weight")
    'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    return f"base_model.model.{name.removeprefix('wrapped.').replace(f'.{_NAME}.', '.')}"
