"""Exported runs: transformers gives the same loss and token ids, a new run can begin there, and files are kept."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.checkpoint import open_checkpoint, read_manifest, write_manifest
from diloco.cli import main
from diloco.data import load_tokenizer
from diloco.errors import CheckpointError, ConfigurationError
from diloco.model import LanguageModel, ModelSettings, Transformer, build_language_model
from diloco.trained import Trained, export_huggingface, load_parameters, load_trained, read_weights
from tests.command_lines import load_configuration
from tests.finetuning import write_base
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
    for each, padding in ((other.config, None), (other.generation_config, end), (tokenizer, end)):
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


def test_an_earlier_checkpoint_or_the_mean_of_the_last_can_be_taken(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, mean = run.parent / "earlier", run.parent / "mean"
    assert main(["export", str(run), "--out", str(file), "--checkpoint", "6"]) == 0
    assert main(["export", str(run), "--out", str(mean), "--average-last", "2"]) == 0
    assert "mean of the global parameters of 2 checkpoints, from step 6" in capsys.readouterr().out
    first, last = (open_checkpoint(run / "checkpoints" / f"step-{step:08}").load("global") for step in (6, 12))
    assert same(read_weights(file), first)
    assert same(read_weights(mean), {n: ((first[n].double() + last[n].double()) / 2).float() for n in last})
    for arguments, words in (
        (["--checkpoint", "7"], "no checkpoint of step 7. Its steps are: 6, 12"),
        (["--average-last", "2", "--checkpoint", "6"], "has no 2 checkpoints up to step 6 to average, only those of"),
    ):
        assert main(["export", str(run), "--out", "x", *arguments]) == 1
        assert words in capsys.readouterr().err
    for number, place in (("0", run), ("2", mean)):
        assert main(["evaluate", str(place), "--average-last", number]) == 2


def test_a_later_step_that_the_run_went_back_from_is_in_no_mean(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    earlier = tmp_path / "run" / "checkpoints" / "step-00000006"
    manifest = replace(read_manifest(earlier), serial=2)  # saved after step 12
    (earlier / "manifest.json").unlink()
    write_manifest(earlier, manifest)
    with pytest.raises(CheckpointError, match="has no 2 checkpoints up to step 6 to average"):
        load_trained(tmp_path / "run", average_last=2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_and_what_does_not_fit_it(run: Path, tmp_path: Path, dtype: Any) -> None:
    export_huggingface(load_trained(run), tmp_path / "hf", dtype=dtype)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert other.dtype == getattr(torch, dtype)
    expected = {name: value.to(other.dtype).float() for name, value in read_weights(run).items()}
    assert same(read_weights(tmp_path / "hf"), expected)
    trained = load_trained(run)
    with torch.no_grad():
        next(trained.model.parameters()).view(-1)[5] = 3.4e38 if dtype == "bfloat16" else 1e6
    with pytest.raises(CheckpointError, match=rf"embed\S* holds values that are not finite as {dtype}"):
        export_huggingface(trained, tmp_path / "large", dtype=dtype)
    assert not (tmp_path / "large").exists()


def test_weights_of_eight_bits_are_begun_from(run: Path) -> None:
    """Not every operation of torch has them."""
    model = load_trained(run).model
    values = {name: value.to(torch.float8_e5m2) for name, value in read_weights(run).items()}
    load_parameters(model, values)
    assert same(dict(model.named_parameters()), {name: value.float() for name, value in values.items()})


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


def test_a_link_stays_a_link_and_a_file_is_no_folder(run: Path, tmp_path: Path) -> None:
    trained, disk, link = load_trained(run), tmp_path / "disk" / "model", tmp_path / "link"
    disk.mkdir(parents=True)
    link.symlink_to(disk)
    export_huggingface(trained, link)
    export_huggingface(trained, link, overwrite=True)
    assert link.is_symlink()
    assert load_trained(disk).sequence_length == 16
    with pytest.raises(CheckpointError, match=r"can't be written: .*What was there before is unchanged"):
        export_huggingface(trained, disk / "config.json" / "hf")


def test_a_model_without_a_counterpart_says_what_would_work(run: Path) -> None:
    with pytest.raises(ConfigurationError, match="Transformer does not define to_huggingface"):
        LanguageModel.to_huggingface(load_trained(run).model)


def test_a_model_of_transformers_is_exported_as_it_is_and_only_the_same_model_begins_from_it(tmp_path: Path) -> None:
    """A GPT-2, which the native decoder can't express; its padding and beginning of a document are of its own."""
    settings = ModelSettings(source=f"hf:{write_base(tmp_path / 'base', name='GPT-2', bos_token_id=271)}")
    model, tokenizer, out = build_language_model(settings, seed=0), load_tokenizer(tmp_path / "base"), tmp_path / "out"
    export_huggingface(Trained(model.eval(), tokenizer, None, 16, tmp_path / "base"), out)
    other, tokens = transformers.AutoModelForCausalLM.from_pretrained(out), [tokenizer.encode("alpha beta")]
    assert type(other) is transformers.GPT2LMHeadModel
    assert (other.config.bos_token_id, other.config.eos_token_id) == (tokenizer.eos_id, tokenizer.eos_id)
    assert transformers.AutoTokenizer.from_pretrained(out)("alpha beta")["input_ids"] == tokens[0]
    with torch.no_grad():
        assert torch.equal(other(torch.tensor(tokens)).logits, model(torch.tensor(tokens)))
    begun = build_language_model(replace(settings, arguments={"weights": "fresh"}), seed=1)
    assert not same(begun.state_dict(), model.state_dict())
    load_parameters(begun, read_weights(out, settings))
    assert same(begun.state_dict(), model.state_dict())
    with pytest.raises(
        ConfigurationError, match=r"holds no exported native decoder\. For its own model, use --model hf:"
    ):
        read_weights(out, ModelSettings())
