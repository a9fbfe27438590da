"""The native decoder: against plain NumPy, and its properties."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from diloco.errors import ConfigurationError
from diloco.model import blocks
from diloco.model.blocks import KeyValueCache
from diloco.model.loss import cross_entropy_with_z_loss
from diloco.model.settings import ModelSettings
from diloco.model.transformer import Transformer, build_model

SMALL = ModelSettings(layers=2, width=24, ffn_width=40, heads=6, vocab_size=31, max_sequence_length=16)
VARIANTS = {
    "llama": SMALL,
    "one head": replace(SMALL, heads=1),
    "grouped": replace(SMALL, kv_heads=2),
    "one kv head": replace(SMALL, kv_heads=1),
    "chinchilla": replace(SMALL, ffn="gelu", qk_norm=True, tie_embeddings=True, z_loss=1e-2),
    "grouped qk-norm, long wavelengths": replace(SMALL, kv_heads=3, qk_norm=True, rope_theta=500.0),
}
every_variant = pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS.keys())


def random_tokens(*shape: int, seed: int = 0, vocab: int = 31) -> torch.Tensor:
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def build_uneven(settings: ModelSettings, seed: int = 1) -> Transformer:
    """With norm weights that differ from 1, and embeddings large enough for every term to matter."""
    model, generator = build_model(settings, seed=seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
        model.embedding.weight.normal_(0, 1, generator=generator)
    return model


# --- reference --------------------------------------------------------------------------------------------------------


def reference_norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    normed: np.ndarray = weight * x / np.sqrt((x**2).mean() + epsilon)
    return normed


def reference_rotate(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """Pair i of a head is (x[i], x[i + half]); it turns by position * theta^(-2i / head width)."""
    half, turned = len(x) // 2, np.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        turned[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        turned[i + half] = x[i] * math.sin(angle) + x[i + half] * math.cos(angle)
    return turned


def reference_logits(model: Transformer, tokens: list[int]) -> np.ndarray:
    """One sequence, one position and one head at a time, in float64."""
    s = model.settings
    w = {name: value.double().numpy() for name, value in model.state_dict().items()}
    head_width, group = s.width // s.heads, s.heads // (s.kv_heads or s.heads)
    stream = [w["embedding.weight"][token] for token in tokens]
    for layer in range(s.layers):
        p = f"layers.{layer}."
        normed = [reference_norm(x, w[p + "attention_norm.weight"], s.norm_epsilon) for x in stream]
        heads: dict[str, list[list[np.ndarray]]] = {"query": [], "key": [], "value": []}
        for kind, rows in heads.items():
            for position, x in enumerate(normed):
                row = list((w[f"{p}attention.{kind}.weight"] @ x).reshape(-1, head_width))
                if s.qk_norm and kind != "value":
                    row = [reference_norm(h, w[f"{p}attention.{kind}_norm.weight"], s.norm_epsilon) for h in row]
                if kind != "value":
                    row = [reference_rotate(h, position, s.rope_theta) for h in row]
                rows.append(row)
        for t in range(len(tokens)):
            outputs = []
            for h in range(s.heads):
                scores = np.array([heads["query"][t][h] @ heads["key"][u][h // group] for u in range(t + 1)])
                weights = np.exp(scores / math.sqrt(head_width))
                weights /= weights.sum()
                outputs.append(sum(weights[u] * heads["value"][u][h // group] for u in range(t + 1)))
            stream[t] = stream[t] + w[p + "attention.output.weight"] @ np.concatenate(outputs)
        for t, x in enumerate(stream):
            x = reference_norm(x, w[p + "feed_forward_norm.weight"], s.norm_epsilon)
            up = w[p + "feed_forward.up.weight"] @ x
            if s.ffn == "swiglu":
                gate = w[p + "feed_forward.gate.weight"] @ x
                hidden = gate / (1 + np.exp(-gate)) * up
            else:
                hidden = 0.5 * up * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
            stream[t] = stream[t] + w[p + "feed_forward.down.weight"] @ hidden
    head = w["embedding.weight" if s.tie_embeddings else "head.weight"]
    return np.stack([head @ reference_norm(x, w["norm.weight"], s.norm_epsilon) for x in stream])


@every_variant
def test_logits_equal_a_plain_reference(settings: ModelSettings) -> None:
    model, tokens = build_uneven(settings), random_tokens(2, 16)
    logits = model(tokens).detach().numpy()
    for row in range(2):
        expected = reference_logits(model, tokens[row].tolist())
        np.testing.assert_allclose(logits[row], expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@every_variant
def test_loss_equals_a_plain_reference(settings: ModelSettings) -> None:
    model, tokens, targets = build_uneven(settings), random_tokens(2, 9), random_tokens(2, 9, seed=1)
    cross_entropies, squares = [], []
    for row in range(2):
        for logits, target in zip(reference_logits(model, tokens[row].tolist()), targets[row], strict=True):
            log_partition = math.log(np.exp(logits).sum())
            cross_entropies.append(log_partition - logits[target])
            squares.append(log_partition**2)
    parts = model.loss(tokens, targets)
    assert parts.cross_entropy.item() == pytest.approx(np.mean(cross_entropies), rel=1e-5)
    assert parts.loss.item() == pytest.approx(np.mean(cross_entropies) + settings.z_loss * np.mean(squares), rel=1e-5)
    assert not parts.cross_entropy.requires_grad


# --- properties -------------------------------------------------------------------------------------------------------


@every_variant
def test_a_later_token_changes_no_earlier_logits(settings: ModelSettings) -> None:
    model, tokens = build_uneven(settings), random_tokens(1, 16)
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 31
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :9], after[0, :9])
    assert (before[0, 9:] != after[0, 9:]).any(dim=1).all()  # and is seen by all that follow


def test_attention_depends_on_distances_only() -> None:
    """Rotary positions: the same tokens at positions 7 to 10 give the logits that they give at 0 to 3."""
    model = build_uneven(replace(SMALL, layers=1))
    tokens, cosine, sine = random_tokens(1, 4), model.rotary_cosine, model.rotary_sine
    at_0 = model(tokens)
    model.rotary_cosine, model.rotary_sine = cosine[7:], sine[7:]
    torch.testing.assert_close(model(tokens), at_0, rtol=1e-4, atol=1e-4)
    model.rotary_cosine, model.rotary_sine = cosine[::2], sine[::2]  # twice as far apart
    assert (model(tokens) - at_0).abs().max() > 0.01


@every_variant
def test_every_parameter_gets_a_gradient(settings: ModelSettings) -> None:
    model = build_model(settings, seed=0)
    torch.autograd.backward(model.loss(random_tokens(4, 16), random_tokens(4, 16, seed=1)).loss)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_loss_gradient_equals_that_of_plain_operations(z_loss: float) -> None:
    logits = (5 * torch.randn(6, 31, generator=torch.Generator().manual_seed(0))).requires_grad_()
    targets = random_tokens(6)
    loss, cross_entropy = cross_entropy_with_z_loss(logits, targets, z_loss)
    plain = torch.nn.functional.cross_entropy(logits, targets)
    plain_loss = plain + z_loss * logits.logsumexp(1).square().mean()
    torch.testing.assert_close((loss, cross_entropy), (plain_loss, plain))
    (gradient,) = torch.autograd.grad(8 * loss, logits)  # scaled, as a gradient scaler does
    torch.testing.assert_close(gradient, torch.autograd.grad(8 * plain_loss, logits)[0])


def test_names_and_state() -> None:
    names = list(build_model(replace(SMALL, layers=1, qk_norm=True), seed=0).state_dict())
    assert names == [
        "embedding.weight",
        "layers.0.attention_norm.weight",
        *(f"layers.0.attention.{part}.weight" for part in ("query", "key", "value", "output")),
        *(f"layers.0.attention.{part}.weight" for part in ("query_norm", "key_norm")),
        "layers.0.feed_forward_norm.weight",
        *(f"layers.0.feed_forward.{part}.weight" for part in ("gate", "up", "down")),
        "norm.weight",
        "head.weight",
    ]


def test_tied_weights_are_counted_once_and_held_once() -> None:
    untied, tied = build_model(SMALL, seed=0), build_model(replace(SMALL, tie_embeddings=True), seed=0)
    assert untied.num_parameters() - tied.num_parameters() == 31 * 24
    assert "head.weight" not in tied.state_dict()
    assert tied.flops_per_token() == untied.flops_per_token()


def test_flops_are_six_per_weight_and_the_attended_products() -> None:
    matrices = 2 * (4 * 24 * 24 + 3 * 24 * 40) + 31 * 24
    # forward: a query against (5 + 1) / 2 keys on average, and as many values; 2 FLOPs each; backward twice that
    attention = 3 * 2 * (2 * 2 * 24 * (5 + 1) / 2)
    assert build_model(SMALL, seed=0).flops_per_token(5) == 6 * matrices + attention
    assert build_model(SMALL, seed=0).flops_per_token() == build_model(SMALL, seed=0).flops_per_token(16)


# --- initialisation ---------------------------------------------------------------------------------------------------


def test_the_seed_decides_every_bit_and_the_global_generator_none() -> None:
    state = torch.random.get_rng_state()
    first, again, other = (build_model(SMALL, seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if "norm" not in name)


def test_initial_scales() -> None:
    model = build_model(replace(SMALL, layers=8, width=192, ffn_width=400, heads=4, vocab_size=300), seed=0)
    for name, expected in {
        "embedding.weight": 192**-0.5,
        "head.weight": 0.02,
        "layers.3.attention.query.weight": 192**-0.5,
        "layers.3.attention.output.weight": 192**-0.5 / 4,
        "layers.3.feed_forward.up.weight": 192**-0.5,
        "layers.3.feed_forward.down.weight": 400**-0.5 / 4,
    }.items():
        assert model.get_parameter(name).std().item() == pytest.approx(expected, rel=0.03), name


@pytest.mark.parametrize("settings", [SMALL, VARIANTS["chinchilla"], replace(SMALL, width=192, vocab_size=257)])
def test_initial_loss_is_near_that_of_a_uniform_guess(settings: ModelSettings) -> None:
    vocab = settings.vocab_size
    assert vocab is not None
    tokens, targets = (random_tokens(8, 16, seed=seed, vocab=vocab) for seed in (0, 1))
    with torch.no_grad():
        cross_entropy = build_model(settings, seed=0).loss(tokens, targets).cross_entropy.item()
    assert cross_entropy == pytest.approx(math.log(vocab), rel=0.03)


def test_a_model_built_on_meta_can_be_filled() -> None:
    model = build_model(SMALL, seed=5, device="meta")
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu")
    model.initialise(torch.Generator().manual_seed(5))
    tokens = random_tokens(1, 16)
    assert torch.equal(model(tokens), build_model(SMALL, seed=5)(tokens))


# --- modes and errors -------------------------------------------------------------------------------------------------


@every_variant
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_stays_near_float32(settings: ModelSettings, dtype: torch.dtype) -> None:
    model, tokens, targets = build_model(settings, seed=0), random_tokens(2, 16), random_tokens(2, 16, seed=1)
    exact = model.loss(tokens, targets)
    with warnings.catch_warnings(), torch.autocast("cpu", dtype=dtype):
        warnings.simplefilter("error")
        assert model(tokens).dtype == dtype
        parts = model.loss(tokens, targets)
    assert parts.loss.dtype == parts.cross_entropy.dtype == torch.float32
    assert parts.cross_entropy.item() == pytest.approx(exact.cross_entropy.item(), abs=0.02)
    torch.autograd.backward(parts.loss)
    assert all(
        p.grad is not None and p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters()
    )


@every_variant
def test_a_cache_gives_the_logits_of_the_full_forward(settings: ModelSettings) -> None:
    model, tokens = build_uneven(settings), random_tokens(3, 16)
    cache = KeyValueCache(settings)
    with torch.no_grad():
        full = model(tokens)
        # a prompt, one token, several at once, and one at a time up to the last position
        pieces = [model(piece, cache) for piece in torch.split(tokens, [5, 1, 4, 1, 1, 1, 1, 1, 1], dim=1)]
    assert cache.length == 16
    torch.testing.assert_close(torch.cat(pieces, 1), full, rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigurationError, match="sequence of 17 tokens"):
        model(tokens[:, :1], cache)


def test_under_autocast_attention_is_in_half_precision_and_the_residual_stream_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The flash kernel takes nothing wider; what norms hand on is cast once, not by each product."""
    dtypes: list[set[torch.dtype]] = []
    attend = blocks.attend

    def noting(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        dtypes.append({query.dtype, key.dtype, value.dtype})
        return attend(query, key, value, *rest, **more)

    monkeypatch.setattr(blocks, "attend", noting)
    model = build_model(replace(SMALL, kv_heads=2, qk_norm=True), seed=0)
    normed: list[torch.dtype] = []
    streams: list[torch.dtype] = []
    model.layers[1].attention_norm.register_forward_hook(lambda module, given, made: normed.append(made.dtype))
    model.layers[1].register_forward_hook(lambda module, given, made: streams.append(made.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(random_tokens(2, 8)).dtype == torch.bfloat16
    assert dtypes == [{torch.bfloat16}] * 2
    assert (normed, streams) == ([torch.bfloat16], [torch.float32])


def test_no_graph_breaks() -> None:
    torch._dynamo.reset()
    model = build_model(replace(SMALL, layers=1, kv_heads=2, qk_norm=True, z_loss=1e-4), seed=0)
    tokens, targets = random_tokens(2, 8), random_tokens(2, 8, seed=1)
    compiled = torch.compile(model.loss, backend="eager", fullgraph=True)
    with warnings.catch_warnings():
        # torch's tracer makes an instance of every autograd function it meets and warns of that
        warnings.filterwarnings("ignore", message=".*should not be instantiated", category=DeprecationWarning)
        loss = compiled(tokens, targets).loss
    torch.testing.assert_close(loss, model.loss(tokens, targets).loss)
    torch.autograd.backward(loss)


def test_too_long_a_sequence_is_refused() -> None:
    model = build_model(SMALL, seed=0)
    assert model(random_tokens(1, 16)).shape == (1, 16, 31)
    with pytest.raises(ConfigurationError, match=r"17 tokens.*max_sequence_length=16"):
        model(random_tokens(1, 17))


def test_a_vocabulary_is_needed() -> None:
    with pytest.raises(ConfigurationError, match="vocab_size is not set"):
        Transformer(replace(SMALL, vocab_size=None))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, r"model\.layers=0"),
        ({"vocab_size": 0}, r"model\.vocab_size=0"),
        ({"width": 25}, "heads of 4.16667"),
        ({"heads": 8}, "heads of 3; rotary positions need an even"),
        ({"kv_heads": 4}, "must divide model.heads=6"),
        ({"kv_heads": 0}, r"model\.kv_heads=0"),
        ({"rope_theta": 0.0}, r"model\.rope_theta=0\.0"),
        ({"norm_epsilon": float("nan")}, r"model\.norm_epsilon=nan"),
        ({"z_loss": -1e-4}, r"model\.z_loss=-0\.0001"),
    ],
)
def test_sizes_that_cannot_work(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        replace(SMALL, **change)


@pytest.mark.parametrize("change", [{}, {"ffn": "gelu", "tie_embeddings": True, "qk_norm": True, "z_loss": 1e-4}])
def test_it_learns_a_repeated_sequence(change: dict[str, Any]) -> None:
    """Period 5 over 31 tokens, a different one in each row: only attention to the row's own past can tell."""
    model = build_model(replace(SMALL, layers=1, width=32, heads=4, **change), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    generator = torch.Generator().manual_seed(0)

    def batch() -> torch.Tensor:
        return torch.randint(31, (16, 5), generator=generator).repeat(1, 4)[:, :17]

    for _ in range(150):
        rows = batch()
        torch.autograd.backward(model.loss(rows[:, :-1], rows[:, 1:]).loss)
        optimizer.step()
        optimizer.zero_grad()
    rows = batch()
    predicted = model(rows[:, :-1]).argmax(-1)
    assert (predicted[:, 5:] == rows[:, 6:]).float().mean() > 0.9
