"""A model of transformers, trained, exported unchanged, and evaluated and continued from its folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from diloco.cli import main
from diloco.trained import load_trained, read_weights
from tests.lazy import Lazy
from tests.runs import write_text

transformers = Lazy("transformers")

SHORT = (
    "--steps 4 --data-parallel-steps 0 --inner-steps 2 --replicas 2 --optimizer.warmup-steps 0 --sequence-length 16 "
    "--device cpu --monitor.console quiet --evaluation.sample-prompts"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2, which the native decoder can't express, trained for 4 steps."""
    folder = tmp_path_factory.mktemp("models")
    shape = {"vocab_size": 257, "n_positions": 64, "n_embd": 8, "n_layer": 2, "n_head": 2}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=None, eos_token_id=256)).save_pretrained(
        folder / "gpt2"
    )
    data = ["--data", str(write_text(folder)), "--out", str(folder / "run")]
    assert main(["train", "--model", f"hf:{folder / 'gpt2'}", *SHORT.split(), *data]) == 0
    assert main(["export", str(folder / "run"), "--to", "hf", "--out", str(folder / "out")]) == 0
    return folder / "run"


def test_the_export_is_the_model_that_was_trained(run: Path) -> None:
    other = transformers.AutoModelForCausalLM.from_pretrained(run.parent / "out")
    assert (type(other), other.config.n_positions) == (transformers.GPT2LMHeadModel, 64)
    assert (other.config.bos_token_id, other.config.eos_token_id) == (256, 256)
    trained = load_trained(run)
    tokens = torch.tensor([trained.tokenizer.encode("alpha beta")])
    assert (
        transformers.AutoTokenizer.from_pretrained(run.parent / "out")("alpha beta")["input_ids"] == tokens[0].tolist()
    )
    with torch.no_grad():
        assert torch.equal(other(tokens).logits, trained.model(tokens))


def test_its_folder_is_evaluated_and_continued_as_the_run_is(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, texts = [], []
    for path in (run, run.parent / "out"):
        assert main(["evaluate", str(path), "--data", str(run.parent / "text.jsonl"), "--json"]) == 0
        results.append(json.loads(capsys.readouterr().out))
        assert main(["generate", str(path), "--prompt", "al", "--tokens", "9"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    for key in ("heldout_loss", "tokens", "bytes"):
        assert results[0][key] == results[1][key]


def test_a_run_begins_from_its_folder_as_the_same_model_only(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, data = run.parent / "out", ["--data", str(run.parent / "text.jsonl"), "--out", str(tmp_path / "on")]
    begun = ["train", "--init-from", str(out), *SHORT.split(), *data, "--learning-rate", "1e-30"]
    assert main(begun) == 2
    assert "holds a model of type 'gpt2', but the native decoder equals only" in capsys.readouterr().err
    assert main([*begun, "--model", f"hf:{run.parent / 'gpt2'}", "--algorithm", "none"]) == 0
    after, before = read_weights(tmp_path / "on"), read_weights(run)
    assert all(torch.allclose(after[name], before[name], rtol=0, atol=1e-20) for name in before)
