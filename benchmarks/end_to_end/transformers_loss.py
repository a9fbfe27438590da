"""The held-out loss of an export, computed with the model and tokenizer that transformers loads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from diloco.config import Configuration, build, read_toml
from diloco.data import heldout_batches, heldout_tokens, load_tokenizer

__all__ = ["loss_with_transformers"]

PROMPT = "def "


def loss_with_transformers(run: Path, exported: Path, sequence_length: int) -> dict[str, Any]:
    """Return the loss and perplexity of ``exported`` on the held-out text of ``run``, and a continuation of a prompt.

    The result also says whether the exported tokenizer encodes a sample of the text to the token ids of the run.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = build(Configuration, read_toml(run / "config.toml", Configuration))
    ours = load_tokenizer(run)
    tokens = heldout_tokens(settings.data, ours)
    packed = torch.from_numpy(tokens[0 : len(tokens)].astype("int64"))
    tokenizer = AutoTokenizer.from_pretrained(exported, trust_remote_code=False)
    model: Any = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=False)
    model.train(False)
    nats, count = 0.0, 0
    with torch.no_grad():
        batches = heldout_batches(packed.numpy(), sequence_length, 8, settings.evaluation.sequences)
        for inputs, targets in batches:
            logits = model(inputs).logits
            nats += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
            count += targets.numel()
        text = ours.decode(packed[:2000].tolist())
        prompt = tokenizer(PROMPT, return_tensors="pt")
        continued = model.generate(**prompt, max_new_tokens=60, do_sample=False)
    return {
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "heldout_loss": nats / count,
        "perplexity": math.exp(nats / count),
        "tokens": count,
        "same_token_ids": tokenizer(text)["input_ids"] == ours.encode(text),
        "continued": tokenizer.decode(continued[0], skip_special_tokens=True),
    }
