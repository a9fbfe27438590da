"""What can be set about the native decoder. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diloco.errors import ConfigurationError

__all__ = ["ModelSettings"]


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """A pre-norm decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU or GELU."""

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
        for name in ("layers", "width", "ffn_width", "heads", "max_sequence_length"):
            if getattr(self, name) < 1:
                raise ConfigurationError(
                    f"model.{name}={getattr(self, name)} was given; at least 1 is needed. Nothing was started."
                )
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ConfigurationError(
                f"model.vocab_size={self.vocab_size} was given; at least 1 is needed. Nothing was started."
            )
        for name in ("rope_theta", "norm_epsilon"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(
                    f"model.{name}={getattr(self, name)} was given; it must be positive. Nothing was started."
                )
        if not self.z_loss >= 0:
            raise ConfigurationError(f"model.z_loss={self.z_loss} was given; 0 or more is needed. Nothing was started.")
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ConfigurationError(
                f"model.width={self.width} with model.heads={self.heads} gives heads of {self.width / self.heads:g}; "
                "rotary positions need an even whole number. Nothing was started."
            )
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise ConfigurationError(
                f"model.kv_heads={self.kv_heads} must divide model.heads={self.heads}. Nothing was started."
            )
