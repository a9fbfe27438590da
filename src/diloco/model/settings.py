"""What can be set about the model, and where it comes from. No torch here."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from tyro.conf import arg

from diloco.errors import ConfigurationError
from diloco.plugins import is_own, split

__all__ = ["ModelSettings", "Source", "native_keys", "native_only_error", "parse_source"]


@dataclass(frozen=True)
class Source:
    """Where a model comes from."""

    # ``hf``: a causal language model of ``transformers``; ``module``: somebody's own function
    kind: Literal["hf", "module"]
    place: str  # folder or name on the hub; module, or path of a ``.py`` file
    function: str = ""  # of the module; empty for ``hf``

    @property
    def label(self) -> str:
        """A word for folders.

        >>> parse_source("hf:meta-llama/Llama-3.2-1B").label, parse_source("my.models:small").label
        ('Llama-3.2-1B', 'small')
        """
        word = self.function or self.place.rstrip("/").rpartition("/")[2]
        return re.sub(r"[^\w.-]+", "-", word).strip(".-") or "model"

    def __str__(self) -> str:
        return f"{self.place}:{self.function}" if self.function else f"hf:{self.place}"


def parse_source(text: str) -> Source:
    """What ``model.source`` says.

    >>> parse_source("hf:models/llama"), parse_source("nets.py:build")
    (Source(kind='hf', place='models/llama', function=''), Source(kind='module', place='nets.py', function='build'))

    Raises:
        ConfigurationError: if it is neither ``hf:PATH_OR_NAME`` nor ``module:function``.
    """
    kind, _, place = text.partition(":")
    if kind == "hf" and place.strip():
        return Source("hf", place.strip())
    if kind != "hf" and is_own(text):
        return Source("module", *split(text))
    raise ConfigurationError(
        f"model.source={text!r} is neither hf:PATH_OR_NAME (a causal language model of transformers) nor "
        "module:function (your own). A native model is named by --preset NAME."
    )


LORA_ONLY = ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "base_dtype", "quantization")
"""What only adapters have a use for, the rank first."""

NATIVE_ONLY = (
    *("layers", "width", "ffn_width", "heads", "kv_heads", "ffn"),
    *("rope_theta", "norm_epsilon", "qk_norm", "tie_embeddings"),
)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """A pre-norm decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU or GELU; with a source, any."""

    source: Annotated[str | None, arg(aliases=["--model"])] = None
    """hf:PATH_OR_NAME, a causal language model of transformers; or module:function, your own. Default: the native
    decoder, of the sizes below."""
    weights: Literal["auto", "stored", "fresh"] = "auto"
    """hf: stored: begin from the weights that are there; fresh: from new ones, drawn from the seed; auto: stored where
    there are any."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """hf: changes to the model's configuration; module:function: further arguments, as a table."""
    lora_rank: Annotated[int, arg(aliases=["--lora.rank"])] = 0
    """hf: train adapters of this rank beside frozen weights (LoRA, 2106.09685), and nothing else. 0: all weights."""
    lora_alpha: Annotated[float | None, arg(aliases=["--lora.alpha"])] = None
    """LoRA: adapters count alpha / rank times. Default: twice the rank."""
    lora_dropout: Annotated[float, arg(aliases=["--lora.dropout"])] = 0.0
    """LoRA: fraction of an adapter's inputs that is left out in training."""
    lora_targets: Annotated[tuple[str, ...], arg(aliases=["--lora.targets"])] = ("all-linear",)
    """LoRA: names of the modules with an adapter, such as q_proj v_proj; all-linear: all but the output projection."""
    base_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """LoRA: type of the frozen weights."""
    quantization: Literal["nf4", "int8"] | None = None
    """LoRA: frozen weights in four or eight bits (QLoRA), by bitsandbytes. Default: as `base_dtype`."""
    layers: int = 4
    width: int = 128
    """Model width (d_model)."""
    ffn_width: int = 512
    """Hidden width of the feed-forward block."""
    heads: int = 4
    kv_heads: int | None = None
    """Key-value heads; default: as many as heads."""
    ffn: Literal["swiglu", "gelu"] = "swiglu"
    """swiglu: three matrices (Llama); gelu: two matrices (Chinchilla)."""
    vocab_size: int | None = None
    """Size of the vocabulary. Default: the tokeniser's."""
    max_sequence_length: int = 1024
    """Longest sequence that the rotary table serves."""
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    qk_norm: bool = False
    """RMSNorm on queries and keys, per head (Streaming DiLoCo)."""
    z_loss: float = 0.0
    """Weight of the squared log-partition added to the training loss (Streaming DiLoCo: 1e-4)."""
    tie_embeddings: bool = False
    """Use the input embedding as the output projection."""

    def __post_init__(self) -> None:
        self._check_source()
        for name in ("layers", "width", "ffn_width", "heads", "max_sequence_length", "vocab_size"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigurationError(f"model.{name} must be at least 1, not {getattr(self, name)}.")
        for name in ("rope_theta", "norm_epsilon"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"model.{name} must be positive, not {getattr(self, name)}.")
        self._check_lora()
        if not self.z_loss >= 0:
            raise ConfigurationError(f"model.z_loss must not be negative, and is {self.z_loss}.")
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ConfigurationError(
                f"model.width={self.width} with model.heads={self.heads} gives heads of {self.width / self.heads:g}; "
                "rotary positions need an even whole number."
            )
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            divisors = [str(number) for number in range(1, self.heads + 1) if self.heads % number == 0]
            raise ConfigurationError(
                f"model.kv_heads={self.kv_heads} must divide model.heads={self.heads}: use one of "
                f"{', '.join(divisors)}."
            )

    def described(self) -> dict[str, Any]:
        """What says which model it is, by name: all of it, but for a model from a source what only the native one has.

        >>> ModelSettings(source="hf:gpt2").described()["weights"], len(ModelSettings(source="hf:gpt2").described())
        ('auto', 5)
        """
        skipped = {*native_keys(self.source), *(() if self.lora_rank else LORA_ONLY)}
        names = [entry.name for entry in dataclasses.fields(self) if entry.name not in skipped]
        values = {name: getattr(self, name) for name in names}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def _check_lora(self) -> None:
        object.__setattr__(self, "lora_targets", tuple(self.lora_targets))  # a list, in the JSON of a checkpoint
        if self.lora_rank < 0 or not 0 <= self.lora_dropout < 1 or not (self.lora_alpha is None or self.lora_alpha > 0):
            raise ConfigurationError(
                f"model.lora_rank={self.lora_rank}, model.lora_alpha={self.lora_alpha} and model.lora_dropout="
                f"{self.lora_dropout} were given. The rank must be 0 or more, alpha positive, and dropout 0 or more "
                "and less than 1."
            )
        if not self.lora_targets:
            raise ConfigurationError("model.lora_targets must name a module, or be all-linear.")
        defaults = {entry.name: entry.default for entry in dataclasses.fields(self)}
        if not self.lora_rank:
            for name in LORA_ONLY[1:]:
                if getattr(self, name) != defaults[name]:
                    raise ConfigurationError(
                        f"model.{name}={getattr(self, name)!r} is of LoRA: set model.lora_rank (--lora.rank), such as "
                        "16, too."
                    )
        elif self.source is None or parse_source(self.source).kind != "hf":
            raise ConfigurationError(
                f"model.lora_rank={self.lora_rank} needs a model of transformers: --model hf:FOLDER."
            )
        elif self.weights == "fresh":
            raise ConfigurationError(
                f"model.lora_rank={self.lora_rank} adapts weights that are there, and model.weights='fresh' was given. "
                "Leave out one of them."
            )

    def _check_source(self) -> None:
        if self.source is None:
            for name in ("weights", "arguments"):
                if getattr(self, name) not in ("auto", {}):
                    raise ConfigurationError(
                        f"model.{name}={getattr(self, name)!r} needs a model.source: --model hf:PATH_OR_NAME or "
                        "module:function."
                    )
            return
        source = parse_source(self.source)
        defaults = {entry.name: entry.default for entry in dataclasses.fields(self)}
        for name in native_keys(self.source):
            if getattr(self, name) != defaults[name]:
                raise native_only_error(name, source)
        if source.kind == "module" and self.weights != "auto":
            raise ConfigurationError(
                f"model.weights={self.weights!r} does not go with model.source={source}, whose function decides that; "
                "train.init_from begins from weights of a file."
            )


def native_keys(source: str | None) -> tuple[str, ...]:
    """The settings that a model from ``source`` has no use for; the native decoder has use for all.

    >>> "width" in native_keys("hf:gpt2"), native_keys(None)
    (True, ())
    """
    if source is None:
        return ()
    return (*NATIVE_ONLY, *(("max_sequence_length",) if parse_source(source).kind == "hf" else ()))


def native_only_error(name: str, source: Source) -> ConfigurationError:
    """For a size of the native decoder, set together with a source."""
    example = f", such as '{{{name} = ...}}'" if source.kind == "module" else ""
    return ConfigurationError(
        f"model.{name} is for the native decoder and does not go with model.source={source}. Set what "
        f"that model has by model.arguments{example} instead."
    )
