"""The native decoder: pre-norm, RMSNorm, rotary positions, grouped-query attention, SwiGLU or GELU, no biases.

Its parameters have the names and layouts of ``LlamaForCausalLM``: ``model.embed_tokens.weight``,
``model.layers.0.self_attn.q_proj.weight``, ..., ``model.norm.weight``, ``lm_head.weight`` (absent if the embeddings are
tied). The first half of a head is rotated against its second half.

Without documents, the mask is the causal one, for which `scaled_dot_product_attention` has its fastest kernel. A mask
given as an array would rule out that kernel. So on CUDA, FlexAttention masks documents from each other, and skips the
blocks that no token sees; on other devices, a boolean array does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diloco.algorithm import set_whole_
from diloco.errors import ConfigurationError
from diloco.model.language_model import LanguageModel
from diloco.model.loss import compiled_once, product_dtype
from diloco.model.settings import DecoderSettings

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask
    from transformers import PreTrainedModel

    from diloco.transport import ReplicaGroup


OUTPUT_STD = 0.02  # standard deviation of the initial output projection (GPT-2)


class Transformer(LanguageModel):
    """A decoder: embedding, ``settings.layers`` layers, norm, output projection.

    Args:
        settings: its sizes; ``vocab_size`` must be set.
        seed: of the initial weights; see `initialise`. The global generator is never used.

    Raises:
        ConfigurationError: ``settings.vocab_size`` is not set.

    >>> model = Transformer(DecoderSettings(vocab_size=257, layers=1, width=8, heads=2, ffn_width=16))
    >>> tuple(model(torch.zeros(4, 10, dtype=torch.int64)).shape), model.num_parameters()
    ((4, 10, 257), 4776)
    """

    loss_calls_model = False
    whole_graphs = True

    def __init__(self, settings: DecoderSettings, *, seed: int = 0) -> None:
        super().__init__()
        if settings.vocab_size is None:
            raise ConfigurationError("vocab_size is required: the tokeniser's vocabulary size, 257 for bytes.")
        self.settings = settings
        self.vocab_size = settings.vocab_size
        self.max_sequence_length = settings.max_sequence_length
        self.num_layers = settings.layers
        self.attention_width = settings.layers * settings.width
        self.z_loss = settings.z_loss
        self.model = Decoder(settings, settings.vocab_size)
        self.lm_head = None if settings.tie_embeddings else _linear(settings.width, settings.vocab_size)
        if not self.model.embed_tokens.weight.is_meta:
            self.initialise(seed)

    def fill(self, device: torch.device, *, seed: int, group: ReplicaGroup) -> None:
        self.to_empty(device=device)
        self.initialise(seed)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw all weights, one at a time, and fill the rotary table.

        Every matrix is normal with standard deviation 1/sqrt(fan-in) (LeCun et al., "Efficient BackProp", 1998), where
        the fan-in of the embedding is taken as the width, with two exceptions. The output projection and a tied
        embedding use 0.02 (GPT-2), for a first loss near log(vocab). The attention output and feed-forward down
        matrices, which write into the residual stream, are scaled by a further 1/sqrt(2 * layers) (GPT-2). Norms are 1.

        Values are drawn as float32 on the CPU in the order of ``named_parameters``, so that the bits depend only on the
        seed, not on the device or on how the model is sharded.
        """
        generator = torch.Generator("cpu").manual_seed(seed)
        residual_scale = 1 / math.sqrt(2 * self.settings.layers)
        for name, parameter in self.named_parameters():
            value = torch.ones(parameter.shape, dtype=torch.float32, device="cpu")
            if parameter.ndim > 1:
                is_output = name == "lm_head.weight" or (name == "model.embed_tokens.weight" and self.lm_head is None)
                std = OUTPUT_STD if is_output else 1 / math.sqrt(parameter.shape[1])
                if name.endswith((".o_proj.weight", ".down_proj.weight")):
                    std *= residual_scale
                value.normal_(0, std, generator=generator)
            set_whole_(parameter, value)
        self.model.fill_rotary_table()

    def forward(self, tokens: Tensor, cache: KeyValueCache | None = None, documents: Tensor | None = None) -> Tensor:
        return F.linear(self.model(tokens, cache, documents), self.projection)

    def hidden(self, tokens: Tensor, documents: Tensor | None) -> Tensor:
        hidden: Tensor = self.model(tokens, None, documents)
        return hidden

    @property
    def projection(self) -> Tensor:
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def new_cache(self) -> KeyValueCache:
        return KeyValueCache()

    def to_huggingface(self) -> PreTrainedModel:
        from diloco.model.folders import as_huggingface

        return as_huggingface(self)


def build_model(settings: DecoderSettings, *, seed: int, device: torch.device | str = "cpu") -> Transformer:
    """Build a model whose initial weights depend only on ``settings`` and ``seed``, to the bit, on every device.

    On ``device="meta"`` it takes no memory and nothing is drawn.

    >>> settings = DecoderSettings(vocab_size=32_000, width=4096, heads=32)
    >>> build_model(settings, seed=0, device="meta").num_parameters()
    555782144
    """
    with torch.device(device):
        return Transformer(settings, seed=seed)


class Decoder(nn.Module):
    """From ``(batch, sequence)`` tokens to the input of the output projection, ``(batch, sequence, width)``."""

    rotary_cosine: Tensor
    rotary_sine: Tensor

    def __init__(self, settings: DecoderSettings, vocab_size: int) -> None:
        super().__init__()
        self.settings = settings
        # given its values, as torch draws those of a meta tensor with code that imports its compiler (70 MB)
        values = torch.empty(vocab_size, settings.width, dtype=torch.float32)
        self.embed_tokens = nn.Embedding(vocab_size, settings.width, _weight=values)
        self.layers = nn.ModuleList(Layer(settings, index) for index in range(settings.layers))
        self.norm = RMSNorm(settings.width, settings.norm_epsilon)
        # Not persistent: the settings determine them, so checkpoints and replicas need not store or exchange them.
        table = torch.empty(settings.max_sequence_length, settings.width // settings.heads, dtype=torch.float32)
        self.register_buffer("rotary_cosine", table, persistent=False)
        self.register_buffer("rotary_sine", table.clone(), persistent=False)

    def fill_rotary_table(self) -> None:
        """Fill cosine and signed sine of the rotary angles, each ``(max_sequence_length, head_width)`` float32.

        The angles are ``position * theta^(-2i / head_width)``, i = 0 .. head_width/2 - 1 (RoFormer, 2104.09864,
        equation 15). The sine of the first half is negated, so that `_rotate` needs no negation.
        """
        length, head_width = self.rotary_cosine.shape
        # float64: a position of 100,000 times a frequency near 1 loses digits in float32
        exponents = torch.arange(0, head_width, 2, dtype=torch.float64, device="cpu") / head_width
        positions = torch.arange(length, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, self.settings.rope_theta**-exponents)
        sine = angles.sin()
        self.rotary_cosine.copy_(angles.cos().repeat(1, 2))
        self.rotary_sine.copy_(torch.cat((-sine, sine), 1))

    def forward(self, tokens: Tensor, cache: KeyValueCache | None, documents: Tensor | None) -> Tensor:
        start = 0 if cache is None else cache.length
        end = start + tokens.shape[1]
        if end > self.settings.max_sequence_length:
            raise ConfigurationError(
                f"A sequence of {end} tokens is longer than max_sequence_length="
                f"{self.settings.max_sequence_length}. Shorten it, or build the model with a larger one."
            )
        cosine, sine = self.rotary_cosine[start:end], self.rotary_sine[start:end]
        hidden: Tensor = self.embed_tokens(tokens)
        mask: Tensor | BlockMask | None = None
        if documents is not None:
            mask = block_mask(documents) if documents.is_cuda else boolean_mask(documents)
        for layer in self.layers:
            hidden = layer(hidden, cosine, sine, cache, mask)
        if cache is not None:
            cache.length = end
        normed: Tensor = self.norm(hidden)
        return normed


class Layer(nn.Module):
    """``x <- x + attention(norm(x))``, then ``x <- x + feed_forward(norm(x))``, on ``(batch, sequence, width)``."""

    def __init__(self, settings: DecoderSettings, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(settings.width, settings.norm_epsilon)
        self.self_attn = Attention(settings, index)
        self.post_attention_layernorm = RMSNorm(settings.width, settings.norm_epsilon)
        self.mlp = FeedForward(settings)

    def forward(
        self, hidden: Tensor, cosine: Tensor, sine: Tensor, cache: KeyValueCache | None, mask: Tensor | BlockMask | None
    ) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cosine, sine, cache, mask)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Attention(nn.Module):
    """Causal self-attention; ``heads / kv_heads`` query heads share one head of keys and values."""

    def __init__(self, settings: DecoderSettings, index: int) -> None:
        super().__init__()
        self.index = index
        self.head_width = settings.width // settings.heads
        kv_heads = settings.kv_heads if settings.kv_heads is not None else settings.heads
        self.grouped = kv_heads != settings.heads
        self.q_proj = _linear(settings.width, settings.width)
        self.k_proj = _linear(settings.width, kv_heads * self.head_width)
        self.v_proj = _linear(settings.width, kv_heads * self.head_width)
        self.o_proj = _linear(settings.width, settings.width)
        self.q_norm = RMSNorm(self.head_width, settings.norm_epsilon) if settings.qk_norm else None
        self.k_norm = RMSNorm(self.head_width, settings.norm_epsilon) if settings.qk_norm else None

    def forward(
        self, hidden: Tensor, cosine: Tensor, sine: Tensor, cache: KeyValueCache | None, mask: Tensor | BlockMask | None
    ) -> Tensor:
        query, key, value = (self._heads(project(hidden)) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = _rotate(query, cosine, sine), _rotate(key, cosine, sine)
        new = query.shape[2]
        if cache is not None:
            before = cache.length
            key, value = cache.extend(self.index, key, value)
            if before and new > 1:
                mask = torch.ones(new, before + new, dtype=torch.bool, device=query.device).tril(before)
        attended = attend(query, key, value, mask, grouped=self.grouped)
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output

    def _heads(self, projected: Tensor) -> Tensor:
        """Reshape ``(batch, sequence, heads * head_width)`` to ``(batch, heads, sequence, head_width)``."""
        batch, sequence, _ = projected.shape
        return projected.view(batch, sequence, -1, self.head_width).transpose(1, 2)


class FeedForward(nn.Module):
    """``down(silu(gate(x)) * up(x))`` (SwiGLU; Shazeer, 2002.05202), or ``down(gelu(up(x)))`` (tanh approximation)."""

    def __init__(self, settings: DecoderSettings) -> None:
        super().__init__()
        self.gate_proj = _linear(settings.width, settings.ffn_width) if settings.ffn == "swiglu" else None
        self.up_proj = _linear(settings.width, settings.ffn_width)
        self.down_proj = _linear(settings.ffn_width, settings.width)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.gate_proj is None:
            inner = F.gelu(self.up_proj(hidden), approximate="tanh")
        else:
            inner = F.silu(self.gate_proj(hidden)) * self.up_proj(hidden)
        output: Tensor = self.down_proj(inner)
        return output


class RMSNorm(nn.Module):
    """``weight * x / sqrt(mean(x^2) + epsilon)`` over the last dimension, in float32.

    The result has the dtype of the matrix products that use it: it is cast once, rather than by each of them.
    """

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=torch.float32))
        self.epsilon = epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        normed = F.rms_norm(hidden.float(), self.weight.shape, self.weight.float(), self.epsilon)
        return normed.to(product_dtype(hidden))


class _Linear(nn.Linear):
    """A layer whose values `Transformer.initialise` sets, not the global generator.

    ``torch.nn.utils.skip_init`` does the same but makes it on ``meta`` first, for which torch imports sympy (40 MB).
    """

    def reset_parameters(self) -> None:
        pass


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return _Linear(inputs, outputs, bias=False, dtype=torch.float32)


def _rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate ``(batch, heads, sequence, head_width)`` by the angles of its positions, in float32; keep its dtype."""
    values = heads.float()
    swapped = values.roll(values.shape[-1] // 2, -1)
    return torch.addcmul(values * cosine, swapped, sine).to(heads.dtype)


class KeyValueCache:
    """The rotated keys and the values of the ``length`` tokens seen so far, for decoding a few tokens at a time."""

    def __init__(self) -> None:
        self.length = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new keys and values of one layer, ``(batch, kv_heads, new, head_width)``, and return all of them.

        The decoder advances ``length`` after the last layer.
        """
        if layer in self._layers:
            before = self._layers[layer]
            keys, values = torch.cat((before[0], keys), 2), torch.cat((before[1], values), 2)
        self._layers[layer] = keys, values
        return keys, values


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | BlockMask | None, *, grouped: bool) -> Tensor:
    """Return softmax attention, ``(batch, heads, queries, head_width)``, as ``query`` has it.

    Args:
        key: ``(batch, kv_heads, keys, head_width)``, as ``value``.
        mask: made by `block_mask` or `boolean_mask`, or a boolean array that fits ``(queries, keys)``. None: causal if
            there are as many queries as keys, else a single query that sees all keys.
        grouped: whether several heads share the same keys and values.
    """
    if mask is not None and not isinstance(mask, Tensor):
        from torch.nn.attention.flex_attention import flex_attention

        attended: Tensor = _fused(flex_attention, query)(query, key, value, block_mask=mask, enable_gqa=grouped)
        return attended
    # is_causal aligns queries and keys at the first token, so it is right only if nothing came before.
    causal = mask is None and query.shape[2] == key.shape[2]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=grouped)


def boolean_mask(documents: Tensor) -> Tensor:
    """Return which tokens each one sees, those before it in its document: ``(batch, 1, sequence, sequence)`` bool.

    Args:
        documents: ``(batch, sequence)`` int64, equal where two tokens of a row belong to one document.
    """
    same = documents.unsqueeze(1).unsqueeze(3) == documents.unsqueeze(1).unsqueeze(2)
    return same.tril()


def block_mask(documents: Tensor) -> BlockMask:
    """Return the same mask for FlexAttention.

    Its shapes depend only on those of ``documents``. So it is made without waiting for the device, and what was
    compiled for one batch can be used for the next.
    """
    from torch.nn.attention.flex_attention import create_block_mask  # takes most of a second

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[batch, query] == documents[batch, key])

    rows, length = documents.shape
    mask: BlockMask = _fused(create_block_mask, documents)(
        sees, rows, None, length, length, device=str(documents.device)
    )
    return mask


def _fused(function: Callable[..., Any], tensor: Tensor) -> Callable[..., Any]:
    """Return ``function``, compiled on a GPU, where it would otherwise store a value for each query and key.

    A caller that is compiled itself gets the plain function.
    """
    return compiled_once(function) if tensor.is_cuda and not torch.compiler.is_compiling() else function
