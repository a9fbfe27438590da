"""The native decoder: pre-norm, RMSNorm, rotary positions, grouped-query attention, SwiGLU or GELU, no biases.

Its parameters are named ``embedding.weight``, ``layers.0.attention.query.weight``, ..., ``norm.weight`` and
``head.weight`` (absent if the embeddings are tied).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diloco.errors import ConfigurationError
from diloco.model.language_model import LanguageModel, LossParts
from diloco.model.loss import cross_entropy_with_z_loss, projected_cross_entropy
from diloco.model.modules import Embedding, KeyValueCache, Layer, Linear, RMSNorm, rotary_table, within_documents
from diloco.model.settings import ModelSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Transformer", "build_model"]

OUTPUT_STD = 0.02  # standard deviation of the initial output projection (GPT-2)


class Transformer(LanguageModel):
    """A decoder: embedding, ``settings.layers`` layers, norm, output projection.

    Args:
        settings: its sizes; ``vocab_size`` must be set.
        generator: a CPU generator for the initial weights; by default a new one with seed 0, never the global one. See
            `initialise`.

    Raises:
        ConfigurationError: ``settings.vocab_size`` is not set.

    >>> model = Transformer(ModelSettings(vocab_size=257, layers=1, width=8, heads=2, ffn_width=16))
    >>> tuple(model(torch.zeros(4, 10, dtype=torch.int64)).shape), model.num_parameters()
    ((4, 10, 257), 4776)
    """

    loss_calls_model = False
    rotary_cosine: Tensor
    rotary_sine: Tensor

    def __init__(self, settings: ModelSettings, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        if settings.vocab_size is None:
            raise ConfigurationError("vocab_size is required: the tokeniser's vocabulary size, 257 for bytes.")
        self.settings = settings
        self.vocab_size = settings.vocab_size
        self.max_sequence_length = settings.max_sequence_length
        self.num_layers = settings.layers
        self.embedding = Embedding(settings.vocab_size, settings.width, dtype=torch.float32)
        self.layers = nn.ModuleList(Layer(settings, index) for index in range(settings.layers))
        self.norm = RMSNorm(settings.width, settings.norm_epsilon)
        self.head = None if settings.tie_embeddings else Linear(settings.width, settings.vocab_size)
        # Not persistent: the settings determine them, so checkpoints and replicas need not store or exchange them.
        table = torch.empty(settings.max_sequence_length, settings.width // settings.heads, dtype=torch.float32)
        self.register_buffer("rotary_cosine", table, persistent=False)
        self.register_buffer("rotary_sine", table.clone(), persistent=False)
        if not table.is_meta:
            self.initialise(generator if generator is not None else torch.Generator("cpu").manual_seed(0))

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Draw all weights and fill the rotary table; use it also after ``to_empty`` of a model built on ``meta``.

        Every matrix is normal with standard deviation 1/sqrt(fan-in) (LeCun et al., "Efficient BackProp", 1998), where
        the fan-in of the embedding is taken as the width, with two exceptions. The output projection and a tied
        embedding use 0.02 (GPT-2), for a first loss near log(vocab). The attention output and feed-forward down
        matrices, which write into the residual stream, are scaled by a further 1/sqrt(2 * layers) (GPT-2). Norms are 1.
        At a width of 2500, 1/sqrt(fan-in) is 0.02 everywhere; at 128, an embedding of 0.1 learns faster than one of
        0.02 or 1.

        Args:
            generator: a CPU generator. Weights are drawn in float32 on the CPU, in the order of ``named_parameters``,
                so that the bits depend only on the seed, not on the device.
        """
        residual_scale = 1 / math.sqrt(2 * self.settings.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1)
                continue
            if name == "head.weight" or (name == "embedding.weight" and self.head is None):
                std = OUTPUT_STD
            else:
                std = 1 / math.sqrt(parameter.shape[1])
            if name.endswith((".output.weight", ".down.weight")):
                std *= residual_scale
            drawn = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            parameter.copy_(drawn.normal_(0, std, generator=generator))
        cosine, sine = rotary_table(self.settings)
        self.rotary_cosine.copy_(cosine)
        self.rotary_sine.copy_(sine)

    def forward(self, tokens: Tensor, cache: KeyValueCache | None = None, documents: Tensor | None = None) -> Tensor:
        return F.linear(self._hidden(tokens, cache, documents), self._projection)

    def loss(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> LossParts:
        """Return the training loss, in float32 also under autocast; see `cross_entropy_with_z_loss`."""
        how, z_loss, targets = self.loss_chunks, self.settings.z_loss, targets.flatten()
        hidden, weight = self._hidden(tokens, None, documents).flatten(0, 1), self._projection
        if how.serve(len(targets)):
            parts = projected_cross_entropy(
                hidden, weight, targets, z_loss, chunk_tokens=how.tokens, compiled=how.compiled
            )
        else:
            parts = cross_entropy_with_z_loss(F.linear(hidden, weight).float(), targets, z_loss)
        return LossParts(*parts)

    @property
    def _projection(self) -> Tensor:
        """The output projection, ``(vocab, width)``, from hidden states to logits."""
        weight: Tensor = (self.embedding if self.head is None else self.head).weight
        return weight

    def _hidden(self, tokens: Tensor, cache: KeyValueCache | None, documents: Tensor | None) -> Tensor:
        """Return the input of the output projection, ``(batch, sequence, width)``, in the dtype of its product."""
        start = 0 if cache is None else cache.length
        end = start + tokens.shape[1]
        if end > self.settings.max_sequence_length:
            raise ConfigurationError(
                f"A sequence of {end} tokens is longer than max_sequence_length="
                f"{self.settings.max_sequence_length}. Shorten it, or build the model with a larger one."
            )
        cosine, sine = self.rotary_cosine[start:end], self.rotary_sine[start:end]
        hidden: Tensor = self.embedding(tokens)
        mask = None if documents is None else within_documents(documents)
        for layer in self.layers:
            hidden = layer(hidden, cosine, sine, cache, mask)
        if cache is not None:
            cache.length = end
        normed: Tensor = self.norm(hidden)
        return normed

    def new_cache(self) -> KeyValueCache:
        return KeyValueCache(self.settings)

    def to_huggingface(self) -> PreTrainedModel:
        from diloco.model.architectures import as_huggingface

        return as_huggingface(self)

    def flops_per_token(self, sequence_length: int | None = None) -> float:
        """Return the estimated floating-point operations of training on one token, forward and backward.

        ``6 * N + 6 * layers * width * (sequence_length + 1)``. There are two operations per weight forward and four
        backward, and N counts the matrices of the layers and the output projection (also when tied). The second term is
        the products with keys and values, over the ``(sequence_length + 1) / 2`` tokens that a token sees on average
        (PaLM's appendix B counts all ``sequence_length``). Left out are the embedding lookup, norms, rotary positions,
        softmax, the activation function, loss and optimizer.
        """
        settings = self.settings
        length = settings.max_sequence_length if sequence_length is None else sequence_length
        matrices = sum(weight.numel() for weight in self.layers.parameters() if weight.ndim == 2)
        matrices += self.embedding.weight.numel()  # the output projection has the same size
        return 6.0 * matrices + 6.0 * settings.layers * settings.width * (length + 1)


def build_model(settings: ModelSettings, *, seed: int, device: torch.device | str = "cpu") -> Transformer:
    """Build a model whose initial weights depend only on ``settings`` and ``seed``, to the bit, on every device.

    On ``device="meta"`` it takes no memory and nothing is drawn.

    >>> settings = ModelSettings(vocab_size=32_000, width=4096, heads=32)
    >>> build_model(settings, seed=0, device="meta").num_parameters()
    555782144
    """
    with torch.device(device):
        return Transformer(settings, generator=torch.Generator("cpu").manual_seed(seed))
