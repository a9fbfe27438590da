"""Named models from the tables of the papers, as data. This module does not import torch, so listing them is instant.

OpenDiLoCo's models are Llama models (SwiGLU, untied embeddings), and their names are not parameter counts. For its
models, Streaming DiLoCo gives the feed-forward width ("hidden dim"), layers, heads, vocabulary, QK-norm and z-loss. The
rest is inferred: a model width of a quarter of that, a two-matrix GELU feed-forward, and tied embeddings. This reading
gives the counts in the table of its companion paper (2503.09799) to within 3 % (5 % for 4B, which is stated to one
digit).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diloco.errors import ConfigurationError, nearest
from diloco.model.settings import ModelSettings

__all__ = ["Preset", "count_parameters", "get_preset", "preset_names"]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named model."""

    name: str
    model: ModelSettings  # the sizes; ``vocab_size`` is None if the tokeniser decides it
    sequence_length: int  # tokens per sequence in the source's training
    vocab_size: int  # the vocabulary to which the counts refer
    nominal: str  # the parameter count as the source states it
    parameters: int = field(init=False)  # the exact count, with tied embeddings counted once
    source: str
    note: str = ""
    alias: str | None = None  # another name of the same preset

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", count_parameters(self.model, self.vocab_size))


def count_parameters(model: ModelSettings, vocab_size: int | None = None) -> int:
    """Return the parameter count of a model without building it; tied embeddings count once.

    ``E V W + L (2 W^2 + 2 W K + F W G + 2 W + Q) + W``, with V tokens, width W, L layers, keys and values of K =
    ``kv_heads`` * head width, feed-forward width G in F = 3 (swiglu) or 2 (gelu) matrices, E = 1 (tied) or 2, and Q = 2
    * head width with QK-norm, else 0.

    Args:
        vocab_size: V, instead of that of ``model``.

    Raises:
        ConfigurationError: neither gives the vocabulary size.

    >>> count_parameters(ModelSettings(layers=22, width=2048, ffn_width=5632, heads=32, kv_heads=4), vocab_size=32_000)
    1100048384
    """
    vocabulary = vocab_size if vocab_size is not None else model.vocab_size
    if vocabulary is None:
        raise ConfigurationError(
            "vocab_size is required to count parameters: the vocabulary size of the tokeniser, 257 for bytes."
        )
    width, head_width = model.width, model.width // model.heads
    kv_width = (model.kv_heads if model.kv_heads is not None else model.heads) * head_width
    layer = 2 * width * width + 2 * width * kv_width
    layer += (3 if model.ffn == "swiglu" else 2) * width * model.ffn_width
    layer += 2 * width + (2 * head_width if model.qk_norm else 0)
    return (1 if model.tie_embeddings else 2) * vocabulary * width + model.layers * layer + width


def get_preset(name: str) -> Preset:
    """Return the preset with this name or alias. "1b" is OpenDiLoCo's; Streaming DiLoCo's is "streaming-1b" only.

    Raises:
        ConfigurationError: the name is unknown; the message gives the nearest one.

    >>> get_preset("opendiloco-150m").name, get_preset("35m").name
    ('150m', 'streaming-35m')
    """
    listed = _ALIASES.get(name, name)
    if listed not in _PRESETS:
        raise ConfigurationError(f"there is no preset {name!r}; {nearest(name, (*_PRESETS, *_ALIASES))}")
    return _PRESETS[listed]


def preset_names() -> tuple[str, ...]:
    """Return the names without aliases, smallest model first within each family.

    >>> preset_names()[:3]
    ('tiny', 'tiny-muon', '2m')
    """
    return tuple(_PRESETS)


def _open_diloco(
    size: str,
    *,
    layers: int,
    width: int,
    ffn_width: int,
    heads: int,
    kv_heads: int | None = None,
    vocab_size: int = 32_000,
    note: str = "",
) -> Preset:
    model = ModelSettings(
        layers=layers,
        width=width,
        ffn_width=ffn_width,
        heads=heads,
        kv_heads=kv_heads,
        vocab_size=vocab_size,
        max_sequence_length=2048,
    )
    return Preset(
        name=size,
        alias=f"opendiloco-{size}",
        model=model,
        sequence_length=1024,
        vocab_size=vocab_size,
        nominal=size.upper(),
        source=f"OpenDiLoCo (2407.07852), its configuration config_{size}.json",
        note=note,
    )


def _streaming(size: str, *, nominal: str, layers: int, width: int, heads: int, alias: bool = True) -> Preset:
    model = ModelSettings(
        layers=layers,
        width=width,
        ffn_width=4 * width,
        heads=heads,
        ffn="gelu",
        vocab_size=32_000,
        max_sequence_length=2048,
        qk_norm=True,
        z_loss=1e-4,
        tie_embeddings=True,
    )
    return Preset(
        name=f"streaming-{size}",
        alias=size if alias else None,
        model=model,
        sequence_length=1024,
        vocab_size=32_000,
        nominal=nominal,
        source="Streaming DiLoCo (2501.18512), table 2; nominal count: 2503.09799",
        note="(inferred): model width, two-matrix GELU feed-forward, tied embeddings",
    )


def _tiny(name: str, source: str) -> Preset:
    return Preset(
        name=name,
        model=ModelSettings(ffn_width=352),
        sequence_length=128,
        vocab_size=257,  # bytes
        nominal="0.9M",
        source=source,
        note="counted with the byte vocabulary; the tokeniser decides",
    )


_ALL = (
    _tiny("tiny", "this project, for the quick start"),
    _tiny("tiny-muon", "this project: the quick start with Muon inside"),
    _open_diloco("2m", layers=2, width=64, ffn_width=256, heads=2, vocab_size=1024),
    _open_diloco("14m", layers=6, width=128, ffn_width=512, heads=4),
    _open_diloco("60m", layers=3, width=1024, ffn_width=2688, heads=16),
    _open_diloco("150m", layers=12, width=1024, ffn_width=2688, heads=16),
    _open_diloco("1b", layers=22, width=2048, ffn_width=5632, heads=32, kv_heads=4, note="TinyLlama"),
    _streaming("35m", nominal="35M", layers=6, width=512, heads=8),
    _streaming("100m", nominal="90M", layers=9, width=768, heads=12),
    _streaming("200m", nominal="180M", layers=12, width=1024, heads=16),
    _streaming("300m", nominal="335M", layers=15, width=1280, heads=20),
    _streaming("500m", nominal="550M", layers=18, width=1536, heads=24),
    _streaming("1b", nominal="1.3B", layers=24, width=2048, heads=32, alias=False),
    _streaming("4b", nominal="4B", layers=36, width=3072, heads=48),
)
_PRESETS = {preset.name: preset for preset in _ALL}
_ALIASES = {preset.alias: preset.name for preset in _ALL if preset.alias}
