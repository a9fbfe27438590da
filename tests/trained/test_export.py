"""Exported runs: transformers gives the same loss and token ids, a new run can begin there, and files are kept."""

import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.checkpoint import open_checkpoint
from diloco.cli import main
from diloco.errors import CheckpointError, ConfigurationError
from diloco.model import LanguageModel, Transformer
from diloco.trained import Trained, export_huggingface, load_trained, read_weights
from tests.command_lines import load_configuration
from tests.lazy import Lazy
from tests.runs import train, write_text

transformers = Lazy("transformers")

TEXTS = ["alpha beta 12.", " gamma\n\n  héllo\tdelta", "", "日本語 don't \x00", "a" * 99]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps with a trained BPE, QK-norm and tied embeddings; checkpoints after steps 6 and 12."""
    folder = tmp_path_factory.mktemp("export")
    sizes = {"kv-heads": "1", "qk-norm": "true", "tie-embeddings": "true", "norm-epsilon": "1e-3"}
    shape = " ".join(f"--model.arguments.{name} {size}" for name, size in sizes.items())
    tokenizer = "--tokenizer bpe:270"
    train(write_text(folder), folder / "run", f"{shape} {tokenizer} --checkpoint.every-steps 6")
    return folder / "run"


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    assert main(["export", str(run), "--to", "hf", "--out", str(run.parent / "hf")]) == 0
    return run.parent / "hf"


def loss_of(model: Any, tokens: torch.Tensor) -> float:
    with torch.no_grad():
        logits = model(tokens) if isinstance(model, LanguageModel) else model(tokens).logits
    return float(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))


def same(left: Any, right: Any) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_transformers_gives_the_same_loss_and_token_ids_and_ends_documents_alike(run: Path, exported: Path) -> None:
    trained, other = load_trained(run), transformers.AutoModelForCausalLM.from_pretrained(exported)
    assert (type(other).__name__, other.dtype) == ("Qwen3ForCausalLM", torch.float32)
    tokenizer, end = transformers.AutoTokenizer.from_pretrained(exported), trained.tokenizer.eos_id
    for text in TEXTS:
        ids = trained.tokenizer.encode(text)
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == text
    tokens = torch.tensor(trained.tokenizer.encode_documents(TEXTS).astype("int64")).unfold(0, 16, 16)
    with torch.no_grad():
        losses = [loss_of(other, tokens), float(other(tokens, labels=tokens).loss)]  # the trainer's own computation
    assert losses == pytest.approx([loss_of(trained.model, tokens)] * 2, rel=1e-6)
    for each, padding in ((other.config, None), (other.generation_config, end), (tokenizer, None)):
        assert (each.eos_token_id, each.bos_token_id, each.pad_token_id) == (end, end, padding)
    assert tokenizer.model_max_length == other.config.max_position_embeddings == 16
    assert other.generate(max_new_tokens=5, do_sample=False).shape[1] > 1


def test_a_new_run_begins_from_the_folder_with_its_sizes_weights_and_tokenizer(
    run: Path, exported: Path, tmp_path: Path
) -> None:
    """At a learning rate near 0, it ends with the weights with which it began."""
    begun = load_configuration(["--init-from", str(exported), "--preset", "2m"])
    before = open_checkpoint(run).about["model"]
    assert begun.model.described()["arguments"] == before["arguments"] | {"max_sequence_length": 16}
    assert (begun.data.tokenizer, begun.sync.inner_steps) == (str(exported), 500)
    assert same(read_weights(exported, begun.model), read_weights(run))
    flags = f"train --init-from {exported} --data {run.parent / 'text.jsonl'} --out {tmp_path / 'on'} --steps 1"
    tiny = "--sequence-length 8 --optimizer.warmup-steps 0 --learning-rate 1e-30 --monitor.console quiet"
    places = "--device cpu --replicas 1 --evaluation.sample-prompts"
    assert main(f"{flags} {tiny} {places} --algorithm data-parallel".split()) == 0
    assert same(read_weights(tmp_path / "on"), read_weights(exported))
    assert load_trained(tmp_path / "on").tokenizer.encode(TEXTS[0]) == load_trained(run).tokenizer.encode(TEXTS[0])


def test_a_folder_of_others_is_seen_as_much_of_as_is_usual(run: Path, tmp_path: Path) -> None:
    trained = load_trained(run)
    for length, expected in ((500, 500), (5000, 2048)):
        assert isinstance(trained.model, Transformer)
        model = Transformer(replace(trained.model.settings, max_sequence_length=length))
        place = tmp_path / str(length)
        export_huggingface(Trained(model, trained.tokenizer, 1, length, run), place)
        assert load_trained(place).sequence_length == length, "the folder must say so itself"
        assert load_trained(place).weights == "global parameters"
        (place / "diloco.json").unlink()
        assert (load_trained(place).sequence_length, load_trained(place).weights) == (expected, "as stored")


def test_an_earlier_checkpoint_can_be_taken(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run.parent / "earlier"
    assert main(["export", str(run), "--out", str(file), "--checkpoint", "6"]) == 0
    assert same(read_weights(file), open_checkpoint(run / "checkpoints" / "step-00000006").load("global"))
    capsys.readouterr()
    assert main(["export", str(run), "--out", "x", "--checkpoint", "7"]) == 1
    assert "no checkpoint of step 7. Its steps are: 6, 12" in capsys.readouterr().err


def test_the_last_checkpoints_can_be_averaged(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = ["export", str(run), "--out", str(run.parent / "mean"), "--average-last"]
    assert main([*export, "2"]) == 0
    assert "mean of the global parameters of 2 checkpoints, from step 6" in capsys.readouterr().out
    first, last = (open_checkpoint(run / "checkpoints" / f"step-{step:08}").load("global") for step in (6, 12))
    mean = {name: ((first[name].double() + last[name].double()) / 2).float() for name in last}
    assert same(read_weights(run.parent / "mean"), mean)
    assert main([*export, "2", "--checkpoint", "6"]) == 1
    assert "has no 2 checkpoints up to step 6 to average, only those of the steps 6" in capsys.readouterr().err
    for number, place in (("0", run), ("2", run.parent / "mean")):
        assert main(["evaluate", str(place), "--average-last", number]) == 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_and_what_does_not_fit_it(run: Path, tmp_path: Path, dtype: Any) -> None:
    trained = load_trained(run)
    with torch.no_grad():
        next(trained.model.parameters()).view(-1)[5] = 3.4e38 if dtype == "bfloat16" else 1e6
    with pytest.raises(CheckpointError, match=rf"embed\S* holds values that are not finite as {dtype}"):
        export_huggingface(trained, tmp_path / "hf", dtype=dtype)
    assert list(tmp_path.iterdir()) == []
    export_huggingface(load_trained(run), tmp_path / "hf", dtype=dtype)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert other.dtype == getattr(torch, dtype)
    expected = {name: value.to(other.dtype).float() for name, value in read_weights(run).items()}
    assert same(read_weights(tmp_path / "hf"), expected)


def test_nothing_is_overwritten_unless_asked_and_then_only_an_export(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "hf"
    place.mkdir()  # an empty folder counts as free
    arguments = ["export", str(run), "--to", "hf", "--out", str(place)]
    assert main(arguments) == 0
    (place / "note").write_text("mine")
    assert main(arguments) == 2
    assert "already exists. Use --overwrite, or another path" in capsys.readouterr().err
    assert (place / "note").exists()
    assert main([*arguments, "--overwrite"]) == 0
    assert not (place / "note").exists()
    other = tmp_path / "project"
    other.mkdir()
    (other / "config.json").write_text("{}")  # which many programs write
    for folder in (run, other):
        assert main(["export", str(run), "--to", "hf", "--out", str(folder), "--overwrite"]) == 2
        assert "exists and is not an exported model. Use another path" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "project"]


def test_a_link_stays_a_link(run: Path, tmp_path: Path) -> None:
    trained, disk, link = load_trained(run), tmp_path / "disk" / "model", tmp_path / "link"
    disk.mkdir(parents=True)
    link.symlink_to(disk)
    export_huggingface(trained, link)
    export_huggingface(trained, link, overwrite=True)
    assert link.is_symlink()
    assert load_trained(disk).sequence_length == 16


def test_what_cannot_be_written_is_told_and_nothing_is_left(run: Path, tmp_path: Path) -> None:
    trained = load_trained(run)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match=r"can't be written: .*What was there before is unchanged"):
        export_huggingface(trained, tmp_path / "file" / "hf")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # as on a full disk
    try:
        with pytest.raises(CheckpointError, match=r"can't be written: .*File too large"):
            export_huggingface(trained, tmp_path / "hf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_model_without_a_counterpart_says_what_would_work(run: Path) -> None:
    with pytest.raises(ConfigurationError, match="Transformer does not define to_huggingface"):
        LanguageModel.to_huggingface(load_trained(run).model)


SHORT = (
    "--steps 4 --data-parallel-steps 0 --inner-steps 2 --replicas 2 --optimizer.warmup-steps 0 --sequence-length 16 "
    "--device cpu --monitor.console quiet --evaluation.sample-prompts"
)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def test_the_export_is_the_model_that_was_trained(gpt2: Path) -> None:
    other = transformers.AutoModelForCausalLM.from_pretrained(gpt2.parent / "out")
    assert (type(other), other.config.n_positions) == (transformers.GPT2LMHeadModel, 64)
    assert (other.config.bos_token_id, other.config.eos_token_id) == (256, 256)
    trained = load_trained(gpt2)
    tokens = torch.tensor([trained.tokenizer.encode("alpha beta")])
    assert (
        transformers.AutoTokenizer.from_pretrained(gpt2.parent / "out")("alpha beta")["input_ids"] == tokens[0].tolist()
    )
    with torch.no_grad():
        assert torch.equal(other(tokens).logits, trained.model(tokens))


def test_a_run_begins_from_its_folder_as_the_same_model_only(
    gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, data = gpt2.parent / "out", ["--data", str(gpt2.parent / "text.jsonl"), "--out", str(tmp_path / "on")]
    begun = ["train", "--init-from", str(out), *SHORT.split(), *data, "--learning-rate", "1e-30"]
    assert main(begun) == 2
    assert "holds no exported native decoder. For its own model, use --model hf:" in capsys.readouterr().err
    assert main([*begun, "--model", f"hf:{gpt2.parent / 'gpt2'}", "--algorithm", "data-parallel"]) == 0
    after, before = read_weights(tmp_path / "on"), read_weights(gpt2)
    assert all(torch.allclose(after[name], before[name], rtol=0, atol=1e-20) for name in before)
