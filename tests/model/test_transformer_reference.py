"""The native decoder compared with plain NumPy, one position and one head at a time, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from diloco.model import DecoderSettings, Transformer
from tests.model.decoders import build_uneven, every_variant, random_tokens


def reference_norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    normed: np.ndarray = weight * x / np.sqrt((x**2).mean() + epsilon)
    return normed


def reference_rotate(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """Rotate pair i of a head, (x[i], x[i + half]), by position * theta^(-2i / head width)."""
    half, turned = len(x) // 2, np.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        turned[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        turned[i + half] = x[i] * math.sin(angle) + x[i + half] * math.cos(angle)
    return turned


def reference_logits(model: Transformer, tokens: list[int]) -> np.ndarray:
    """Compute one sequence, one position and one head at a time, in float64."""
    s = model.settings
    w = {name: value.double().numpy() for name, value in model.state_dict().items()}
    head_width, group = s.width // s.heads, s.heads // (s.kv_heads or s.heads)
    stream = [w["model.embed_tokens.weight"][token] for token in tokens]
    for layer in range(s.layers):
        p = f"model.layers.{layer}."
        normed = [reference_norm(x, w[p + "input_layernorm.weight"], s.norm_epsilon) for x in stream]
        heads: dict[str, list[list[np.ndarray]]] = {"q": [], "k": [], "v": []}
        for kind, rows in heads.items():
            for position, x in enumerate(normed):
                row = list((w[f"{p}self_attn.{kind}_proj.weight"] @ x).reshape(-1, head_width))
                if s.qk_norm and kind != "v":
                    row = [reference_norm(h, w[f"{p}self_attn.{kind}_norm.weight"], s.norm_epsilon) for h in row]
                if kind != "v":
                    row = [reference_rotate(h, position, s.rope_theta) for h in row]
                rows.append(row)
        for t in range(len(tokens)):
            outputs = []
            for h in range(s.heads):
                scores = np.array([heads["q"][t][h] @ heads["k"][u][h // group] for u in range(t + 1)])
                weights = np.exp(scores / math.sqrt(head_width))
                weights /= weights.sum()
                outputs.append(sum(weights[u] * heads["v"][u][h // group] for u in range(t + 1)))
            stream[t] = stream[t] + w[p + "self_attn.o_proj.weight"] @ np.concatenate(outputs)
        for t, x in enumerate(stream):
            x = reference_norm(x, w[p + "post_attention_layernorm.weight"], s.norm_epsilon)
            up = w[p + "mlp.up_proj.weight"] @ x
            if s.ffn == "swiglu":
                gate = w[p + "mlp.gate_proj.weight"] @ x
                hidden = gate / (1 + np.exp(-gate)) * up
            else:
                hidden = 0.5 * up * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
            stream[t] = stream[t] + w[p + "mlp.down_proj.weight"] @ hidden
    head = w["model.embed_tokens.weight" if s.tie_embeddings else "lm_head.weight"]
    return np.stack([head @ reference_norm(x, w["model.norm.weight"], s.norm_epsilon) for x in stream])


@every_variant
def test_logits_equal_a_plain_reference(settings: DecoderSettings) -> None:
    model, tokens = build_uneven(settings), random_tokens(2, 16)
    logits = model(tokens).detach().numpy()
    for row in range(2):
        expected = reference_logits(model, tokens[row].tolist())
        np.testing.assert_allclose(logits[row], expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@every_variant
def test_loss_equals_a_plain_reference(settings: DecoderSettings) -> None:
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
