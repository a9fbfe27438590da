"""The model settings, and the source of the model that they name. This module works without torch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from tyro.conf import arg

from diloco.errors import ConfigurationError, nearest
from diloco.plugins import is_own, split

__all__ = ["ModelSection", "ModelSettings", "Source", "native_keys", "parse_source"]


@dataclass(frozen=True)
class Source:
    """Where a model comes from."""

    # ``hf``: a causal language model of ``transformers``; ``module``: a user-defined function
    kind: Literal["hf", "module"]
    place: str  # for ``hf`` a folder or a name on the hub; else a module, or the path of a ``.py`` file
    function: str = ""  # a function of the module; empty for ``hf``

    @property
    def label(self) -> str:
        """A short name for use in folder names.

        >>> parse_source("hf:meta-llama/Llama-3.2-1B").label, parse_source("my.models:small").label
        ('Llama-3.2-1B', 'small')
        """
        word = self.function or self.place.rstrip("/").rpartition("/")[2]
        return re.sub(r"[^\w.-]+", "-", word).strip(".-") or "model"

    def __str__(self) -> str:
        return f"{self.place}:{self.function}" if self.function else f"hf:{self.place}"


def parse_source(text: str) -> Source:
    """Parse the value of ``model.source``.

    >>> parse_source("hf:models/llama"), parse_source("nets.py:build")
    (Source(kind='hf', place='models/llama', function=''), Source(kind='module', place='nets.py', function='build'))

    Raises:
        ConfigurationError: the text is neither ``hf:PATH_OR_NAME`` nor ``module:function``.
    """
    kind, _, place = text.partition(":")
    if kind == "hf" and place.strip():
        return Source("hf", place.strip())
    if is_own(text):
        return Source("module", *split(text))
    raise ConfigurationError(
        f"model.source={text!r} is neither hf:PATH_OR_NAME (a causal language model of transformers) nor "
        "module:function (your own model). For a native model, use --preset NAME."
    )


LORA_ONLY = ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "base_dtype", "quantization")
"""The settings that only affect adapters, beginning with the rank."""

NATIVE_ONLY = (
    *("layers", "width", "ffn_width", "heads", "kv_heads", "ffn"),
    *("rope_theta", "norm_epsilon", "qk_norm", "tie_embeddings"),
)


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The section ``model`` of the settings of a run: which model to train, and how."""

    source: Annotated[str | None, arg(aliases=["--model"])] = None
    """hf:PATH_OR_NAME for a causal model of transformers, or module:function. Default: the decoder of the preset."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """A table of what else describes the model. Native decoder: its sizes (layers, width, ffn_width, heads, kv_heads,
    ffn, vocab_size, max_sequence_length, rope_theta, norm_epsilon, qk_norm, z_loss, tie_embeddings). module:function:
    arguments of the function. hf: changes to the model's configuration, and weights (stored or fresh), z_loss,
    lora_alpha (twice the rank), lora_dropout, lora_targets (all-linear), base_dtype of the frozen weights (float32)."""
    lora_rank: Annotated[int, arg(aliases=["--lora-rank"])] = 0
    """With an hf: model: train only adapters of this rank (LoRA) next to frozen weights. 0: all weights."""
    quantization: Annotated[Literal["nf4", "int8"] | None, arg(aliases=["--quantization"])] = None
    """With LoRA: quantise the frozen weights to four or eight bits with bitsandbytes (QLoRA)."""

    @classmethod
    def of(cls, settings: ModelSettings) -> Self:
        """Return the section from which ``settings`` follow."""
        named = [each for each in dataclasses.fields(settings) if each.name not in ("arguments", *_SECTION)]
        changed = {each.name: getattr(settings, each.name) for each in named}
        changed = {name: value for name, value in changed.items() if value != getattr(ModelSettings(), name)}
        section = {name: getattr(settings, name) for name in _SECTION}
        return cls(arguments={**settings.arguments, **changed}, **section)

    @cached_property
    def settings(self) -> ModelSettings:
        """All settings of the model.

        Raises:
            ConfigurationError: an argument of the native decoder is unknown, or a value is invalid.
        """
        known = {each.name for each in dataclasses.fields(ModelSettings)} - {"arguments", *_SECTION}
        kind = None if self.source is None else parse_source(self.source).kind
        if kind is None:
            for name in self.arguments:
                if name not in known - {*_OF_TRANSFORMERS}:
                    hint = nearest(name, known - {*_OF_TRANSFORMERS})
                    raise ConfigurationError(f"model.arguments.{name} is not a setting of the native decoder; {hint}")
        own = {None: known, "hf": {"z_loss", *_OF_TRANSFORMERS}, "module": {*_OF_MODULES}}[kind]
        given = {name: tuple(value) if name == "lora_targets" else value for name, value in self.arguments.items()}
        values: dict[str, Any] = {name: value for name, value in given.items() if name in own}
        values |= {name: getattr(self, name) for name in _SECTION}
        return ModelSettings(**values, arguments={name: value for name, value in given.items() if name not in own})

    def __post_init__(self) -> None:
        _ = self.settings  # checked here


_SECTION = ("source", "lora_rank", "quantization")  # the keys of the section besides its table
_OF_MODULES = ("z_loss", "vocab_size", "max_sequence_length")  # the last two are offered to the function
_OF_TRANSFORMERS = ("weights", "lora_alpha", "lora_dropout", "lora_targets", "base_dtype")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """A pre-norm decoder (RMSNorm, rotary positions, grouped-query attention, SwiGLU or GELU), or a model from a
    source.
    """

    source: str | None = None  # hf:PATH_OR_NAME or module:function; None: the native decoder
    weights: Literal["auto", "stored", "fresh"] = "auto"  # hf: auto is stored if there are any, else fresh
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the source
    lora_rank: int = 0  # 0: train all weights
    lora_alpha: float | None = None  # None: twice the rank
    lora_dropout: float = 0.0
    lora_targets: tuple[str, ...] = ("all-linear",)
    base_dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of the frozen weights
    quantization: Literal["nf4", "int8"] | None = None
    layers: int = 4
    width: int = 128
    ffn_width: int = 512
    heads: int = 4
    kv_heads: int | None = None  # None: as many as heads
    ffn: Literal["swiglu", "gelu"] = "swiglu"  # three matrices (Llama) or two (Chinchilla)
    vocab_size: int | None = None  # None: the tokeniser's
    max_sequence_length: int = 1024
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    qk_norm: bool = False  # RMSNorm of queries and keys, per head (Streaming DiLoCo)
    z_loss: float = 0.0  # weight of the squared log-partition in the training loss (Streaming DiLoCo: 1e-4)
    tie_embeddings: bool = False  # use the input embedding as the output projection

    def __post_init__(self) -> None:
        targets: Any = self.lora_targets
        if isinstance(targets, list):  # in the JSON of a checkpoint
            object.__setattr__(self, "lora_targets", tuple(targets))
        for name, annotation in _annotations().items():
            if not _fits(value := getattr(self, name), annotation):
                default = getattr(ModelSettings(), name)
                raise ConfigurationError(f"model.arguments.{name} can't be {value!r:.100}. Its default is {default!r}.")
        self._check_source()
        for name in ("layers", "width", "ffn_width", "heads", "max_sequence_length", "vocab_size"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigurationError(f"model.arguments.{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("rope_theta", "norm_epsilon"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"model.arguments.{name} must be positive, got {getattr(self, name)}.")
        self._check_lora()
        if not self.z_loss >= 0:
            raise ConfigurationError(f"model.arguments.z_loss must be at least 0, got {self.z_loss}.")
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ConfigurationError(
                f"model.arguments.width={self.width} with model.arguments.heads={self.heads} gives heads of width "
                f"{self.width / self.heads:g}, but rotary positions need an even integer."
            )
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            divisors = [str(number) for number in range(1, self.heads + 1) if self.heads % number == 0]
            raise ConfigurationError(
                f"model.arguments.kv_heads={self.kv_heads} must divide model.arguments.heads={self.heads}. Use one of "
                f"{', '.join(divisors)}."
            )

    def described(self) -> dict[str, Any]:
        """Return the settings that identify the model, by name: all of them, or for a source those that apply to it.

        >>> ModelSettings(source="hf:gpt2").described()["weights"], len(ModelSettings(source="hf:gpt2").described())
        ('auto', 5)
        """
        skipped = {*native_keys(self.source), *(() if self.lora_rank else LORA_ONLY)}
        names = [entry.name for entry in dataclasses.fields(self) if entry.name not in skipped]
        values = {name: getattr(self, name) for name in names}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def _check_lora(self) -> None:
        if self.lora_rank < 0 or not 0 <= self.lora_dropout < 1 or not (self.lora_alpha is None or self.lora_alpha > 0):
            raise ConfigurationError(
                "model.lora_rank must be at least 0, model.arguments.lora_alpha positive, and "
                "model.arguments.lora_dropout at least 0 and "
                f"below 1, not {self.lora_rank}, {self.lora_alpha} and {self.lora_dropout}."
            )
        if not self.lora_targets:
            raise ConfigurationError("model.arguments.lora_targets must name at least one module, or be all-linear.")
        defaults = {entry.name: entry.default for entry in dataclasses.fields(self)}
        if not self.lora_rank:
            for name in LORA_ONLY[1:]:
                if getattr(self, name) != defaults[name]:
                    raise ConfigurationError(
                        f"model.arguments.{name}={getattr(self, name)!r} has an effect only with LoRA. Also set "
                        "model.lora_rank (--lora-rank), such as 16."
                    )
        elif self.source is None or parse_source(self.source).kind != "hf":
            raise ConfigurationError(
                f"model.lora_rank={self.lora_rank} needs a model of transformers: --model hf:FOLDER."
            )
        elif self.weights == "fresh":
            raise ConfigurationError(
                f"model.lora_rank={self.lora_rank} adapts stored weights, so it can't be combined with "
                "model.arguments.weights='fresh'. Leave out one of them."
            )

    def _check_source(self) -> None:
        if self.source is None:
            for name in ("weights", "arguments"):
                if getattr(self, name) not in ("auto", {}):
                    raise ConfigurationError(
                        f"model.arguments.{name}={getattr(self, name)!r} needs a model.source: "
                        "--model hf:PATH_OR_NAME or module:function."
                    )
            return
        source = parse_source(self.source)
        if source.kind == "module" and self.weights != "auto":
            raise ConfigurationError(
                f"model.arguments.weights={self.weights!r} can't be combined with model.source={source}, whose "
                "function makes the weights. To begin from the weights of a file, use train.init_from."
            )


@cache
def _annotations() -> dict[str, Any]:
    return get_type_hints(ModelSettings)


def _fits(value: Any, annotation: Any) -> bool:
    """Return whether the value of a setting, such as one in a checkpoint, is of its type."""
    kind, parts = get_origin(annotation), get_args(annotation)
    if kind is Literal:
        return value in parts
    if kind is tuple:
        return isinstance(value, tuple) and all(_fits(each, parts[0]) for each in value)
    if kind in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if kind is not None:
        return isinstance(value, kind)
    return type(value) is annotation or (annotation is float and type(value) is int)


def native_keys(source: str | None) -> tuple[str, ...]:
    """Return the settings that have no effect on a model from ``source``; there are none for the native decoder.

    >>> "width" in native_keys("hf:gpt2"), native_keys(None)
    (True, ())
    """
    if source is None:
        return ()
    return (*NATIVE_ONLY, *(("max_sequence_length",) if parse_source(source).kind == "hf" else ()))
