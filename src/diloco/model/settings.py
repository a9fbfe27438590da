"""The model settings, the source of the model that they name, and the named models of the papers. Works without torch.

OpenDiLoCo's models (2407.07852, its files config_NAME.json) are Llama models (SwiGLU, untied embeddings), and their
names are not parameter counts. For its models, Streaming DiLoCo (2501.18512, table 2) gives the feed-forward width
("hidden dim"), layers, heads, vocabulary, QK-norm and z-loss. The rest is inferred: a model width of a quarter of that,
a two-matrix GELU feed-forward, and tied embeddings. This reading gives the counts in the table of its companion paper
(2503.09799) to within 3 % (5 % for 4B, which is stated to one digit).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta
from tyro.conf import arg

from diloco.algorithm import check_ranges
from diloco.devices import Precision
from diloco.errors import ConfigurationError, nearest
from diloco.plugins import is_own
from diloco.waiting import described

Kind = TypeVar("Kind")


_Size = Annotated[int, Meta(ge=1)]
_Weight = Annotated[float, Meta(ge=0)]
_Positive = Annotated[float, Meta(gt=0)]


@dataclass(frozen=True, kw_only=True)
class DecoderSettings:
    """A pre-norm decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU or GELU."""

    layers: _Size = 4
    width: _Size = 128
    ffn_width: _Size = 512
    heads: _Size = 4
    kv_heads: _Size | None = None  # None: as many as heads
    ffn: Literal["swiglu", "gelu"] = "swiglu"  # three matrices (Llama) or two (Chinchilla)
    vocab_size: _Size | None = None  # None: the tokeniser's
    max_sequence_length: _Size = 1024
    rope_theta: _Positive = 10_000.0
    norm_epsilon: _Positive = 1e-5
    qk_norm: bool = False  # RMSNorm of queries and keys, per head (Streaming DiLoCo)
    z_loss: _Weight = 0.0  # weight of the squared log-partition in the training loss (Streaming DiLoCo: 1e-4)
    tie_embeddings: bool = False  # use the input embedding as the output projection

    def __post_init__(self) -> None:
        if self.kv_heads == self.heads:
            object.__setattr__(self, "kv_heads", None)  # so that equal decoders have equal settings
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ConfigurationError(
                f"model.arguments.width={self.width} with model.arguments.heads={self.heads} gives heads of width "
                f"{self.width / self.heads:g}, but rotary positions need an even integer."
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ConfigurationError(
                f"model.arguments.kv_heads={self.kv_heads} must divide model.arguments.heads={self.heads}."
            )

    def arguments(self) -> dict[str, Any]:
        """Return the values that are not the default, as ``model.arguments`` has them."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value != getattr(type(self), name)}


@dataclass(frozen=True, kw_only=True)
class HuggingFaceSettings:
    """What ``model.arguments`` says about a model of ``transformers``, beside changes of its configuration."""

    weights: Literal["auto", "stored", "fresh"] = "auto"  # auto is stored if there are any, else fresh
    z_loss: _Weight = 0.0
    attn_implementation: str | dict[str, Any] | None = None  # None: the choice of the library
    lora_alpha: _Positive | None = None  # None: twice the rank
    lora_dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    lora_targets: Annotated[tuple[str, ...], Meta(min_length=1)] = ("all-linear",)
    base_dtype: Precision = "float32"  # of the frozen weights


LORA_ONLY = ("lora_alpha", "lora_dropout", "lora_targets", "base_dtype")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The section ``model`` of the settings of a run: which model to train, and how."""

    source: Annotated[str | None, arg(aliases=["--model"])] = None
    """hf:PATH_OR_NAME for a causal model of transformers, or module:function. Default: the decoder of the preset."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """A table of what else describes the model. Native decoder: its sizes (layers, width, ffn_width, heads, kv_heads,
    ffn, vocab_size, max_sequence_length, rope_theta, norm_epsilon, qk_norm, z_loss, tie_embeddings). module:function:
    arguments of the function. hf: changes to the model's configuration, and weights (stored or fresh), z_loss,
    attn_implementation (sdpa, flex_attention, ...), lora_alpha (twice the rank), lora_dropout, lora_targets
    (all-linear), base_dtype of the frozen weights (float32)."""
    lora_rank: Annotated[int, Meta(ge=0), arg(aliases=["--lora-rank"])] = 0
    """With an hf: model: train only adapters of this rank (LoRA). 0: all weights."""
    quantization: Annotated[Literal["nf4", "int8"] | None, arg(aliases=["--quantization"])] = None
    """With LoRA: quantise the frozen weights to four or eight bits with bitsandbytes (QLoRA)."""

    @property
    def kind(self) -> Literal["native", "hf", "module"]:
        """Where the model comes from: the native decoder, ``hf:PLACE``, or a function of the user's."""
        if self.source is None:
            return "native"
        if self.place:
            return "hf"
        if is_own(self.source):
            return "module"
        raise ConfigurationError(
            f"model.source={self.source!r} is neither hf:PATH_OR_NAME (a causal language model of transformers) nor "
            "module:function (your own model). For a native model, use --preset NAME."
        )

    @property
    def place(self) -> str:
        """The folder of an ``hf:`` model, or its name on the hub; empty for other models."""
        prefix, _, place = (self.source or "").partition(":")
        return place.strip() if prefix == "hf" else ""

    @property
    def on_hub(self) -> tuple[str, str | None]:
        """The name of an ``hf:`` model on the hub, and its revision, if it is given.

        >>> ModelSettings(source="hf:meta-llama/Llama-3.2-1B@v2").on_hub
        ('meta-llama/Llama-3.2-1B', 'v2')
        """
        name, _, revision = self.place.partition("@")
        return name, revision or None

    @property
    def label(self) -> str:
        """A short name of the source for use in folder names.

        >>> ModelSettings(source="hf:meta-llama/Llama-3.2-1B").label, ModelSettings(source="my.models:small").label
        ('Llama-3.2-1B', 'small')
        """
        word = (self.place or self.source or "").rstrip("/").replace(":", "/").rpartition("/")[2]
        return re.sub(r"[^\w.-]+", "-", word).strip(".-") or "model"

    @cached_property
    def decoder(self) -> DecoderSettings:
        """The native decoder that ``arguments`` describe, if there is no source."""
        return _converted(self.arguments, DecoderSettings)

    @cached_property
    def huggingface(self) -> HuggingFaceSettings:
        """What ``arguments`` say about a model of ``transformers``, beside `config_changes`."""
        changes = self.config_changes
        return _converted({k: value for k, value in self.arguments.items() if k not in changes}, HuggingFaceSettings)

    @property
    def config_changes(self) -> dict[str, Any]:
        """The ``arguments`` that change the configuration of a model of ``transformers``."""
        own = {field.name for field in dataclasses.fields(HuggingFaceSettings)}
        return {name: value for name, value in self.arguments.items() if name not in own}

    @property
    def vocab_size(self) -> int | None:
        """The size of the vocabulary that ``arguments`` give; None: that of the tokeniser or of the source."""
        size: int | None = self.arguments.get("vocab_size")
        return size

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> ModelSettings:
        """Return the settings that were `described`, perhaps by a file from elsewhere."""
        return _converted(described, cls, "model")

    def described(self) -> dict[str, Any]:
        """Return the section as JSON, with all values of a native decoder, for a version with other defaults."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return values | {"arguments": dataclasses.asdict(self.decoder) if self.kind == "native" else self.arguments}

    def __post_init__(self) -> None:
        kind, rank = self.kind, self.lora_rank
        check_ranges(self, "model.")
        if kind == "native":
            _ = self.decoder  # checked here
        if rank and kind != "hf":
            raise ConfigurationError(f"model.lora_rank={rank} needs a model of transformers: --model hf:FOLDER.")
        options = self.huggingface if kind == "hf" else HuggingFaceSettings()
        if rank and options.weights == "fresh":
            raise ConfigurationError(
                f"model.lora_rank={rank} adapts stored weights, so it can't be combined with "
                "model.arguments.weights='fresh'. Leave out one of them."
            )
        idle = [name for name in LORA_ONLY if getattr(options, name) != getattr(HuggingFaceSettings, name)]
        idle = [*(f"arguments.{name}" for name in idle), *(["quantization"] if self.quantization else [])]
        if idle and not rank:
            raise ConfigurationError(
                f"model.{idle[0]} has an effect only with LoRA. Also set model.lora_rank (--lora-rank), such as 16."
            )


def _converted(values: Mapping[str, Any], kind: type[Kind], table: str = "model.arguments") -> Kind:
    """Return the dataclass with ``values``, which may come from a file, of a section or table."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]  # a dataclass
    for name in values:
        if name not in names:
            raise ConfigurationError(f"{table}.{name} is not a setting of this model; {nearest(name, names)}")
    try:
        return msgspec.convert(dict(values), described(kind))
    except msgspec.ValidationError as error:
        said = str(error)
        raise ConfigurationError(said if said.startswith("model.") else f"{table}: {said}.") from error


def with_vocabulary(settings: ModelSettings, tokens: int) -> ModelSettings:
    """Return the settings with a vocabulary of ``tokens``, if neither they nor the source determine its size."""
    if settings.vocab_size is not None or settings.kind == "hf":
        return settings
    arguments = settings.decoder.arguments() if settings.kind == "native" else settings.arguments
    return replace(settings, arguments={**arguments, "vocab_size": tokens})


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named model."""

    name: str
    model: DecoderSettings  # the sizes; ``vocab_size`` is None if the tokeniser decides it
    parameters: int  # the exact count, with ``vocab_size`` tokens and tied embeddings counted once
    sequence_length: int = 1024  # tokens per sequence in the source's training
    vocab_size: int = 32_000  # that of the model, or 257: bytes


def get_preset(name: str) -> Preset:
    """Return the preset with this name.

    Raises:
        ConfigurationError: the name is unknown; the message gives the nearest one.

    >>> get_preset("streaming-35m").parameters
    35265792
    """
    if name not in PRESETS:
        raise ConfigurationError(f"there is no preset {name!r}; {nearest(name, PRESETS)}")
    return PRESETS[name]


def _presets() -> Iterator[Preset]:
    for name in ("tiny", "tiny-muon"):
        model = DecoderSettings(ffn_width=352)
        yield Preset(name=name, model=model, parameters=869_760, sequence_length=128, vocab_size=257)
    llama = DecoderSettings(max_sequence_length=2048, vocab_size=32_000)
    for name, layers, width, ffn_width, heads, kv_heads, vocab_size, parameters in (
        ("2m", 2, 64, 256, 2, None, 1024, 262_464),
        ("14m", 6, 128, 512, 4, None, 32_000, 9_766_528),
        ("60m", 3, 1024, 2688, 16, None, 32_000, 102_898_688),
        ("150m", 12, 1024, 2688, 16, None, 32_000, 214_983_680),
        ("1b", 22, 2048, 5632, 32, 4, 32_000, 1_100_048_384),  # TinyLlama
    ):
        model = replace(llama, layers=layers, width=width, ffn_width=ffn_width, heads=heads, kv_heads=kv_heads)
        model = replace(model, vocab_size=vocab_size)
        yield Preset(name=name, model=model, parameters=parameters, vocab_size=vocab_size)
    chinchilla = replace(llama, ffn="gelu", qk_norm=True, z_loss=1e-4, tie_embeddings=True)
    for name, layers, width, heads, parameters in (
        ("35m", 6, 512, 8, 35_265_792),
        ("100m", 9, 768, 12, 88_292_736),
        ("200m", 12, 1024, 16, 183_790_080),
        ("300m", 15, 1280, 20, 335_913_600),
        ("500m", 18, 1536, 24, 558_819_072),
        ("1b", 24, 2048, 32, 1_273_598_976),
        ("4b", 36, 3072, 48, 4_175_396_352),
    ):
        model = replace(chinchilla, layers=layers, width=width, ffn_width=4 * width, heads=heads)
        yield Preset(name=f"streaming-{name}", model=model, parameters=parameters)


PRESETS = {preset.name: preset for preset in _presets()}
"""The presets by name, the smallest model first within each family."""
