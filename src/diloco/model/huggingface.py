"""A causal language model of ``transformers``, with or without LoRA adapters, behind the interface of training.

Only installed code runs: no code from a model's folder, and no pickles. Numbers are those of ``transformers``.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import inspect
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from diloco.algorithm import (
    check_finite,
    check_number,
    largest_magnitude,
    model_state,
    named_parameters,
    persistent_buffers,
    set_whole_,
)
from diloco.errors import ConfigurationError, DiLoCoError, nearest
from diloco.model.folders import (
    CARD_NAME,
    CONFIG_NAME,
    GENERATION_NAME,
    SHARDS,
    WEIGHTS_NAME,
    Unread,
    import_transformers,
    read_json,
    stored_tensors,
    weights_digest,
)
from diloco.model.language_model import LanguageModel, LossParts, build_language_model
from diloco.model.settings import HuggingFaceSettings, ModelSettings
from diloco.model.transformer import block_mask, boolean_mask
from diloco.private_files import check_regular
from diloco.transport import ReplicaGroup
from diloco.units import diff
from diloco.waiting import fetching

if TYPE_CHECKING:
    from peft.tuners.lora import LoraModel
    from transformers import DynamicCache, PretrainedConfig, PreTrainedModel


_log = logging.getLogger(__name__)

UNLIMITED = 1 << 30  # the maximum length for a model without a position limit, such as a recurrent one

_CHANGE_LOGITS = (
    *("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap", "logit_scale", "logits_scaling"),
    *("lm_head_multiplier", "logits_mup_width_multiplier", "unpadded_vocab_size"),
)
"""Entries of configurations with which logits are more than a product of hidden states and output projection."""

IMPLEMENTATIONS = {
    **dict.fromkeys(("eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm"), "torch"),
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
}
"""The implementations of attention and experts that a configuration may name -> the installed package that has it."""

_ON_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")  # the name of a model there
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
"""Names of the number of positions in configurations, the usual one first."""

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # names of their number in configurations
_NAMES_OF_CODE = {"auto_map", "transformers_weights", "fusion_config"}  # of a configuration; never passed on


class HuggingFaceModel(LanguageModel):
    """A causal language model of ``transformers``; its parameters are named ``wrapped.NAME`` here.

    If its configuration has a load-balancing loss for experts (``router_aux_loss_coef``), that loss is included; a
    coefficient of 0 leaves it out.

    Args:
        settings: where it comes from.
        base: a digest of the stored weights from which it begins; "" if there are none.
    """

    loss_calls_model = False
    wrapped: Any  # the `PreTrainedModel`; its own annotations are incomplete

    def __init__(self, wrapped: PreTrainedModel, settings: ModelSettings, *, base: str) -> None:
        super().__init__()
        self.wrapped = wrapped
        # Packed documents have no padding. The padding token is often the end-of-document token, which must be trained.
        self.wrapped.get_input_embeddings().padding_idx = None
        self.settings, self.base = settings, base
        self.z_loss = settings.huggingface.z_loss
        self.tuner: tuple[LoraModel, ...] = ()  # peft's, if it has adapters; in a tuple, so that it isn't a submodule
        config, head = self.wrapped.config, self.wrapped.get_output_embeddings()
        self.vocab_size = int(config.vocab_size if head is None else head.weight.shape[0])
        self.max_sequence_length = _longest_sequence(config)
        self.num_layers = self.count_layers()
        accepted = inspect.signature(wrapped.forward).parameters
        self._caches = "past_key_values" in accepted
        coefficient = getattr(config, "router_aux_loss_coef", None) or 0.0
        self.balance_loss = float(coefficient) if "output_router_logits" in accepted else 0.0
        experts = next((int(n) for name in _EXPERTS if (n := getattr(config, name, None))), 1)
        self.expert_share = int(getattr(config, "num_experts_per_tok", None) or experts) / experts
        heads = int(getattr(config, "num_attention_heads", 0) or 0)
        head_width = getattr(config, "head_dim", None) or (getattr(config, "hidden_size", 0) // heads if heads else 0)
        self.attention_width = heads * head_width * self.num_layers  # as if every layer were full attention
        kinds = set(getattr(config, "layer_types", None) or ())
        has_windows = bool(kinds - {"full_attention"} or getattr(config, "sliding_window", None))
        # the masks of windows are of several kinds; and the balance loss would read a mask as one of tokens
        self.maskings = ("positions", "masks by kind") if has_windows or self.balance_loss else ("mask", "positions")
        self.masking = self.maskings[0]
        self.attends_in_half = "flash" in str(config._attn_implementation)

    def forward(self, tokens: Tensor, cache: DynamicCache | None = None, documents: Tensor | None = None) -> Tensor:
        length = tokens.shape[1] + (0 if cache is None else cache.get_seq_length())
        if length > self.max_sequence_length:
            raise ConfigurationError(
                f"A sequence of {length} tokens is longer than max_position_embeddings={self.max_sequence_length} "
                f"of {type(self.wrapped).__name__}. Shorten it."
            )
        past: dict[str, Any] = {} if cache is None else {"past_key_values": cache, "use_cache": True}
        logits: Tensor = self._call(self.wrapped, tokens, documents, **past).logits
        return logits.view(*tokens.shape, -1)

    def hidden(self, tokens: Tensor, documents: Tensor | None) -> Tensor:
        hidden: Tensor = self._call(self.wrapped.base_model, tokens, documents).last_hidden_state
        return hidden.view(*tokens.shape, -1)

    @property
    def projection(self) -> Tensor | None:
        head: Any = self.wrapped.get_output_embeddings()
        changed = any(getattr(self.wrapped.config, name, None) not in (None, False, 1) for name in _CHANGE_LOGITS)
        changed |= getattr(self.wrapped, "lm_head", head) is not head  # more layers before it, as in ModernBERT
        is_plain = type(head) is nn.Linear and head.bias is None  # not a subclass: neither quantised nor with adapters
        return head.weight if is_plain and not changed else None

    def loss(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> LossParts:
        if not self.balance_loss:
            return super().loss(tokens, targets, documents)
        output = self._call(self.wrapped, tokens, documents, output_router_logits=True)
        parts = self.loss_of_logits(output.logits, targets)
        return LossParts(parts.loss + self.balance_loss * output.aux_loss, parts.cross_entropy)

    def fill(self, device: torch.device, *, seed: int, group: ReplicaGroup) -> None:
        folder, buffers = _find_folder(self.settings, with_weights=True), dict(self.named_buffers())
        stored = stored_tensors(folder) if _has_stored(folder, self.settings) else {}
        self.to_empty(device=device)
        self.wrapped.tie_weights()
        for name, buffer in self.named_buffers():
            buffer.copy_(buffers[name])
        state = self.wrapped.state_dict(keep_vars=True)
        names = {id(state[name]): name for name in stored.keys() & state.keys()}  # one value has several if it is tied
        if self.settings.lora_rank or any(id(value) not in names for value in state.values()):
            return self._receive(seed, group)
        for name in names.values():
            if (there := stored[name]).shape != (here := state[name]).shape:
                raise ConfigurationError(f"{name} is {tuple(there.shape)} in the weights, {tuple(here.shape)} here.")
            set_whole_(here, there)
            del there  # before the next one is read

    def _receive(self, seed: int, group: ReplicaGroup) -> None:
        """Fill with values that no file has by name: fresh ones, adapters, experts that transformers converts.

        The first rank builds the model whole, on the host, and sends one tensor at a time.
        """
        whole: Any = None
        with group.all_or_none():
            whole = build_language_model(self.settings, seed=seed) if group.leads else None
        values = model_state(whole) if whole else {}
        for name, here in {**named_parameters(self), **persistent_buffers(self)}.items():
            there = values[name].contiguous() if whole else torch.empty(here.shape, dtype=here.dtype, device="cpu")
            set_whole_(here, group.share_(there))
        self.base = group.share(whole and whole.base)

    def new_cache(self) -> DynamicCache | None:
        from transformers import DynamicCache

        return DynamicCache(config=self.wrapped.config) if self._caches else None

    def definition(self) -> dict[str, Any]:
        config = json.loads(self.wrapped.config.to_json_string(use_diff=False))
        definition: dict[str, Any] = {"architecture": type(self.wrapped).__name__, "config": config}
        return definition | ({"base": self.base} if self.base else {})

    def configuration(self) -> dict[str, Any]:
        options = dataclasses.asdict(self.settings.huggingface) if self.settings.lora_rank else {}
        for name in ("weights", "attn_implementation"):  # where they are from, and how this machine computes
            options.pop(name, None)
        return _function_of(self.wrapped.config) | {f"arguments.{name}": value for name, value in options.items()}

    def to_huggingface(self) -> PreTrainedModel:
        """Return the model itself, in evaluation mode. Adapters are merged into the weights."""
        self.eval()
        if self.tuner:
            from diloco.model.adapters import merge_adapters

            merge_adapters(self)
        return self.wrapped  # type: ignore[no-any-return]  # declared as Any above

    def _call(self, module: Any, tokens: Tensor, documents: Tensor | None, **arguments: Any) -> Any:
        """Call a module of ``transformers``, whose output may have all rows in one."""
        if self._caches:
            arguments.setdefault("use_cache", False)
        if documents is None:
            return module(input_ids=tokens, **arguments)
        apart = self._apart(documents)
        tokens = tokens.reshape(apart["position_ids"].shape)
        if self.masking != "masks by kind":
            return module(input_ids=tokens, **arguments, **apart)

        def with_masks(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return given, named | apart

        # to the decoder alone, since the balance loss around it would read them as one of tokens
        hook = self.wrapped.base_model.register_forward_pre_hook(with_masks, with_kwargs=True)
        try:
            return module(input_ids=tokens, **arguments)
        finally:
            hook.remove()

    def _apart(self, documents: Tensor) -> dict[str, Any]:
        """Return the arguments that mask the documents of a row from each other."""
        positions = torch.arange(documents.shape[1], dtype=torch.int64, device=documents.device).expand_as(documents)
        begins = nn.functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
        restarted = positions - torch.where(begins, positions, 0).cummax(1).values
        implementation = str(self.wrapped.config._attn_implementation)
        if "flash" in implementation:  # the kernel for documents of any length takes one row
            return {"position_ids": restarted.reshape(1, -1)}
        if self.masking == "positions":  # most architectures derive the masks of all their layers from them
            return {"position_ids": restarted}
        if self.masking == "masks by kind":
            from transformers.masking_utils import create_masks_for_generate

            weight = self.wrapped.get_input_embeddings().weight
            shaped = torch.empty((*documents.shape, 1), dtype=weight.dtype, device=documents.device)
            masks = create_masks_for_generate(self.wrapped.config, shaped, None, None, position_ids=restarted)
            return {"position_ids": restarted, "attention_mask": masks}
        if implementation == "flex_attention":
            return {"position_ids": restarted, "attention_mask": block_mask(documents)}
        mask = boolean_mask(documents)
        if implementation == "eager":  # it adds the mask to the scores
            mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, torch.finfo(torch.float32).min)
        return {"position_ids": restarted, "attention_mask": mask}


def build_huggingface(
    settings: ModelSettings, *, on_meta: bool, definition: Mapping[str, Any] | None = None
) -> HuggingFaceModel:
    """Build the model that ``settings.source`` names, on the CPU in float32, without adapters.

    Fresh values come from the global generators. ``on_meta``: no memory is taken and no weights are read. With a
    ``definition`` the source is not read, and weights are fresh.

    Raises:
        ConfigurationError: the model does not exist or can't be trained; the message says what would work.
        CheckpointError: weights are missing or damaged.
    """
    auto, options = import_transformers().AutoModelForCausalLM, settings.huggingface
    from accelerate import init_empty_weights

    base = str((definition or {}).get("base", ""))
    folder, stored = None, False
    if definition and not settings.lora_rank:
        config = _config_of(definition.get("config"), {}, "the checkpoint", options)
    else:
        folder = _find_folder(settings, with_weights=not on_meta)
        config = _config_of(read_json(folder / CONFIG_NAME), settings.config_changes, str(folder), options)
        stored = not on_meta and _has_stored(folder, settings)
        if stored and base not in ("", there := weights_digest(folder)):
            raise ConfigurationError(
                f"The adapters in the checkpoint were trained with other weights ({base}) than those in "
                f"{settings.source} ({there}). Put the original model there."
            )
        base = weights_digest(folder) if stored else base
    if definition and settings.lora_rank:
        was = _config_of(definition.get("config"), {}, "the checkpoint", options)
        if difference := diff(_function_of(was), _function_of(config), "the checkpoint", f"{settings.source} now"):
            raise ConfigurationError(f"{difference}, so it is another model. Put the original {CONFIG_NAME} there.")
    pad = getattr(config, "pad_token_id", None)  # not every architecture has one
    if isinstance(pad, int) and not 0 <= pad < config.vocab_size:
        config.pad_token_id = None  # it belongs to a larger vocabulary; nothing is padded here
    wrapped: Any
    with _refusals(type(config).__name__):
        if folder is not None and stored:
            wrapped = _load(folder, config, settings)
        else:
            # buffers, which no file has, are computed also on meta
            with init_empty_weights(include_buffers=False) if on_meta else nullcontext():
                wrapped = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
            wrapped.tie_weights()  # which accelerate unties
    if settings.quantization is None or on_meta:
        wrapped = wrapped.float()
    return HuggingFaceModel(wrapped, settings, base=base)


def _longest_sequence(config: PretrainedConfig) -> int:
    """Return the number of positions that a configuration names, also for the text of a model of several media."""
    numbers = (getattr(config.get_text_config(), name, None) for name in _POSITIONS)
    return next((number for number in numbers if isinstance(number, int) and number > 0), UNLIMITED)


def base_digest(settings: ModelSettings) -> str:
    """Return a digest of the stored weights from which a model of ``transformers`` begins; "" if there are none.

    Raises:
        ConfigurationError, CheckpointError: the folder does not exist, or its weights can't be read.
    """
    if settings.kind != "hf":
        return ""
    folder = _find_folder(settings, with_weights=True)
    return weights_digest(folder) if _has_stored(folder, settings) else ""


def generation_settings(settings: ModelSettings) -> dict[str, Any]:
    """Return how the model that ``settings`` name is meant to generate, as its folder says; empty if it does not."""
    if settings.kind != "hf":
        return {}
    file = _find_folder(settings, with_weights=False) / GENERATION_NAME
    return read_json(file) if file.is_file() else {}


def base_card(settings: ModelSettings) -> dict[str, str]:
    """Return what the card of a model made from the one that ``settings`` name says of it: its name, and its licence as
    far as it states one. Neither holds a path.
    """
    from huggingface_hub import metadata_load, try_to_load_from_cache

    folder, (name, revision) = Path(settings.place).expanduser(), settings.on_hub
    card: Any = None
    try:
        if folder.is_dir():
            stored = read_json(folder / CONFIG_NAME)
            cached = re.search(r"models--(\w[\w.-]*?)--(\w[\w.-]*)/snapshots/", f"{folder.resolve()}/")
            named = str(stored.get("_name_or_path"))
            name = named if _ON_HUB.fullmatch(named) else settings.label
            if cached:
                name = "/".join(cached.groups())
            file: Any = folder / CARD_NAME
            card = {"license": stored.get("license")}
        else:
            file = try_to_load_from_cache(name, CARD_NAME, revision=revision)  # fetched with the configuration
        if isinstance(file, str | Path) and Path(file).is_file():
            check_regular(Path(file))
            card = metadata_load(file) or card
    except Exception as error:  # of YAML, which anybody may have written: the model can be used without
        _log.info("The card of %s can't be read: %r", name, error)
    stated = {key: (card or {}).get(key) for key in ("license", "license_name", "license_link")}
    words = {k: value for k, value in stated.items() if isinstance(value, str) and re.fullmatch(r"[\w.:/+-]+", value)}
    return {"base_model": name, **words}


def _find_folder(settings: ModelSettings, *, with_weights: bool) -> Path:
    """Return the local folder, or the local copy of the hub's files."""
    place = settings.place
    local = Path(place).expanduser()
    if local.is_dir():
        return local
    from huggingface_hub import snapshot_download

    name, revision = settings.on_hub
    patterns = [CONFIG_NAME, GENERATION_NAME, CARD_NAME]
    if with_weights and settings.huggingface.weights != "fresh":
        patterns += [WEIGHTS_NAME, SHARDS]
    with _refusals(f"model.source=hf:{place}, which is not a local folder"), fetching(name):
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))


def _has_stored(folder: Path, settings: ModelSettings) -> bool:
    """Return whether to begin from the weights in ``folder``. They must be there if asked for, for a name on the hub,
    and if there are others, such as pickles, or the index of weights that were not fetched to the end.
    """
    weights, local = settings.huggingface.weights, Path(settings.place).expanduser()
    needed = weights == "stored" or settings.lora_rank > 0 or not local.is_dir()
    there = [*folder.glob("pytorch_*.bin"), *folder.glob("*.safetensors*")]
    return weights != "fresh" and (needed or bool(there))


def _config_of(stored: Any, changes: Mapping[str, Any], where: str, options: HuggingFaceSettings) -> PretrainedConfig:
    """Return the configuration that ``stored``, of a file, describes, after ``changes`` by the user."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, __version__

    values: dict[str, Any] = _with_floats(stored) if isinstance(stored, Mapping) else {}
    model_type = str(values.pop("model_type", None))
    if model_type not in CONFIG_MAPPING:
        custom = ", and code that comes with a model is not run" if "auto_map" in values else ""
        raise ConfigurationError(
            f"{where} has model_type={model_type!r}, which transformers {__version__} does not know{custom}. Try a "
            "newer transformers, or write your own function (--model module:function)."
        )
    with _refusals(where):
        kind = CONFIG_MAPPING[model_type]
        known = kind()
        for name, value in values.items():
            if name not in changes and not _holds_infinity(getattr(known, name, None)):  # as Mamba 2's limit of time
                check_finite(f"{where}: {name}", value)
        for name in changes:
            if name not in values and not hasattr(known, name):  # the library would take it in silence
                raise ConfigurationError(
                    f"model.arguments.{name} is not a part of {kind.__name__}; {nearest(name, vars(known).keys())}"
                )
            _check_kind(name, changes[name], getattr(known, name, None))
        values |= copy.deepcopy(dict(changes))
        if options.attn_implementation is not None:
            values["attn_implementation"] = options.attn_implementation
        _check_implementations(values, where)
        safe = {name: value for name, value in values.items() if name not in _NAMES_OF_CODE}
        config: PretrainedConfig = kind.from_dict(safe)
    if (
        type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
        or getattr(config, "is_encoder_decoder", False)
        or config.get_text_config() is not config
        or getattr(config, "quantization_config", None) is not None
        # GPT-NeoX is always causal, whatever it says
        or not (getattr(config, "is_decoder", True) or model_type.startswith("gpt_neox"))
    ):
        raise ConfigurationError(
            f"{where} ({kind.__name__}) is not a causal language model of text alone with weights that can be trained. "
            "Use one such as Llama, Qwen3 or GPT-2, not quantised. For BERT and related models, set is_decoder = true."
        )
    return config


_NOT_THE_FUNCTION = {"transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"}
"""Entries of configurations with which a model computes the same, beside the names of tokens."""


def _function_of(config: PretrainedConfig) -> dict[str, Any]:
    """Return, as JSON, those entries of a configuration that decide what the model computes, without defaults."""
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    left_out = {name for name in values if name.startswith("_") or name.endswith("_token_id")} | _NOT_THE_FUNCTION
    return {name: value for name, value in values.items() if name not in left_out}


def _with_floats(value: Any) -> Any:
    """Return a value of a ``config.json`` with the floats that JSON lacks, as `transformers` writes them."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {name: _with_floats(inside) for name, inside in value.items()}
    return [_with_floats(inside) for inside in value] if isinstance(value, list) else value


def _holds_infinity(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_holds_infinity, value))
    return isinstance(value, float) and not math.isfinite(value)


def _check_kind(name: str, value: Any, default: Any) -> None:
    """Refuse a number for a switch, a switch for a number, and a negative value where the default is positive.

    The library would take them, and train a model without numbers in it.
    """
    kinds = [kind for kind in (bool, int, float) if isinstance(default, kind)]
    if not kinds or not isinstance(value, int | float):
        return
    if isinstance(value, bool) != (bool in kinds):
        raise ConfigurationError(
            f"model.arguments.{name} must be {'true or false' if bool in kinds else 'a number'}, such as the default "
            f"{default!r}, got {value!r}."
        )
    if "drop" in name and float in kinds:
        check_number(f"model.arguments.{name}", value, ge=0, lt=1)
    if default > 0 > value and not name.endswith("token_id"):
        raise ConfigurationError(f"model.arguments.{name} must not be negative, got {value!r}.")


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
                f"{', '.join(IMPLEMENTATIONS)}: --model.arguments.attn-implementation sdpa."
            )


def _load(folder: Path, config: PretrainedConfig, settings: ModelSettings) -> PreTrainedModel:
    """Load all weights of ``folder``. Weights that this kind of model does not use are ignored.

    The library gets tensors and no folder, in which it would also look for adapters, other weights and code.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, BitsAndBytesConfig, GenerationConfig

    arguments: dict[str, Any] = {}
    if settings.quantization is not None:
        dtype = getattr(torch, settings.huggingface.base_dtype)
        four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
        bits = four if settings.quantization == "nf4" else {"load_in_8bit": True}
        arguments["quantization_config"] = BitsAndBytesConfig(**bits)  # type: ignore[no-untyped-call]  # of the library
    if (generation := folder / GENERATION_NAME).is_file():
        arguments["generation_config"] = GenerationConfig.from_dict(read_json(generation))
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    stored = stored_tensors(folder)
    wrapped, report = model_class.from_pretrained(
        None,
        config=config,
        state_dict={name: Unread(stored, name) for name in stored},
        dtype=torch.float32,
        output_loading_info=True,
        trust_remote_code=False,
        **arguments,
    )
    if missing := sorted(report["missing_keys"]):
        raise ConfigurationError(
            f"The weights in {folder} lack {', '.join(missing[:5])}. Give all weights that the configuration needs, or "
            "use --model.arguments.weights fresh."
        )
    for name, value in wrapped.named_parameters():
        if value.is_floating_point() and not math.isfinite(largest_magnitude(value.detach())):
            raise ConfigurationError(
                f"{name} in {folder} holds NaN or infinity, which training would spread. Get the weights again."
            )
    if (folder / "adapter_config.json").exists():
        _log.warning("The adapter in %s is not read, only the weights beside it. Merge it first, with peft.", folder)
    for module in wrapped.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # bitsandbytes 0.50 on a CPU: after one evaluation, training would use the fast kernel, without gradients
            module.support_avx512bf16_for_cpu = False
    return wrapped  # type: ignore[no-any-return]  # a model


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    """Pass on any refusal of a library, which has types of its own, as a configuration error."""
    try:
        yield
    except DiLoCoError:
        raise
    except Exception as error:
        raise ConfigurationError(f"{what} can't be used: {str(error).strip() or type(error).__name__}") from error
