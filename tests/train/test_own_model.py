"""Runs of a model of `transformers`, also fine-tuned, or of the user's own, which may freeze or hide what it holds."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from diloco.algorithm import named_parameters
from diloco.checkpoint import open_checkpoint
from diloco.cli import main
from diloco.config import plan_run
from diloco.data import ByteTokenizer, build_corpus
from diloco.errors import CheckpointError, ConfigurationError
from diloco.train import run_training
from diloco.trained import load_trained
from tests.command_lines import command_line
from tests.finetuning import asked, write_base, write_records, write_sums
from tests.huggingface import write_config
from tests.train.source_runs import plan_of, trained

NETS = """
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

class Net(nn.Module):
    def __init__(self, vocab_size, width=8):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        self.head = nn.Linear(width, vocab_size)
        self.scale = nn.Parameter(torch.rand(width), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, tokens):
        if self.training:
            self.seen += tokens.numel()
        return self.head(self.blocks(self.embedding(tokens) * self.scale).tanh())

class Freezing(Net):
    steps = 0

    def forward(self, tokens):
        self.steps += self.training
        if self.steps == 3:
            self.head.requires_grad_(False)
        return super().forward(tokens)

class Hiding(Net):
    def __init__(self, vocab_size):
        super().__init__(vocab_size)
        self.blocks.append(nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(8)))

    def forward(self, tokens):
        hidden = self.blocks[:4](self.embedding(tokens))
        return self.head(self.blocks[4](hidden).view(hidden.shape))

    def state_dict(self, *args, **kwargs):
        return {}

def wrapped(vocab_size):
    net = Net(vocab_size)
    net.blocks = nn.Sequential(*(checkpoint_wrapper(block, preserve_rng_state=False) for block in net.blocks))
    return net

def build(vocab_size, width):
    return Net(vocab_size, width)
"""


@pytest.fixture
def nets(tmp_path: Path) -> Path:
    file = tmp_path / "nets.py"
    file.write_text(NETS, encoding="utf-8")
    return file


def test_a_parameter_frozen_in_mid_run_is_the_global_one_in_the_final_model(
    nets: Path, data: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    trained(run, plan_of(f"{nets}:Freezing", data, train__steps=14))
    agreed = open_checkpoint(run).load("global")
    assert {"wrapped.head.weight", "wrapped.head.bias"} <= agreed.keys()
    model = load_trained(run, source=f"{nets}:Freezing").model
    assert all(torch.equal(model.get_parameter(name), value) for name, value in agreed.items())
    resumed = plan_run(command_line(checkpoint__resume=run, train__steps=18, model__source=f"{nets}:Freezing"))
    whole = trained(tmp_path / "whole", plan_of(f"{nets}:Freezing", data, train__steps=18))
    assert trained(run, resumed)["parameters"] == whole["parameters"]


@pytest.mark.parametrize("source", ["wrapped", "Hiding"])
def test_stop_and_resume_of_a_model_that_is_wrapped_or_has_its_own_state_dict(
    nets: Path, data: Path, tmp_path: Path, source: str
) -> None:
    """Invariant 6. Names in checkpoints are those of the plain model, and buffers are in them."""
    whole = trained(tmp_path / "whole", plan_of(f"{nets}:{source}", data, train__steps=14))
    trained(tmp_path / "run", plan_of(f"{nets}:{source}", data, train__steps=14, train__stop_after=6))
    again = plan_run(command_line(checkpoint__resume=tmp_path / "run", model__source=f"{nets}:{source}"))
    resumed = trained(tmp_path / "run", again)
    assert resumed["global_params_digest"] == whole["global_params_digest"]
    one, other = (open_checkpoint(tmp_path / name).load("replica-0-values") for name in ("whole", "run"))
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert not any("_checkpoint_wrapped_module" in name for name in one)
    assert ("model/wrapped.blocks.4.1.running_mean" in one) == (source == "Hiding")
    model = load_trained(tmp_path / "run", source=f"{nets}:{source}").model
    save_file(named_parameters(model), tmp_path / "net.safetensors")
    trained(tmp_path / "next", plan_of(f"{nets}:{source}", data, train__init_from=tmp_path / "net.safetensors"))


@pytest.mark.parametrize(("algorithm", "steps"), [("data-parallel", 5), ("streaming", 5), ("streaming", 14)])
def test_the_saved_model_has_the_buffers_that_all_replicas_agreed_on(
    nets: Path, data: Path, tmp_path: Path, algorithm: str, steps: int
) -> None:
    """Statistics of BatchNorm; also with data-parallel, and right after the shared start, which takes 5 steps."""
    settings = {"algorithm": algorithm, "train__steps": steps}
    settings |= {"train__data_parallel_steps": 5} if algorithm == "streaming" else {}
    trained(tmp_path / "run", plan_of(f"{nets}:Hiding", data, **settings))
    checkpoint, name = open_checkpoint(tmp_path / "run"), "wrapped.blocks.4.1.running_mean"
    locals_ = [checkpoint.load(f"replica-{m}-values")[f"model/{name}"] for m in range(2)]
    agreed = load_trained(tmp_path / "run", source=f"{nets}:Hiding").model.get_buffer(name)
    assert bool(agreed.any())
    assert torch.equal(*locals_) == (steps == 5)
    assert [torch.equal(agreed, each) for each in locals_] == [steps == 5] * 2


def test_replicas_compare_what_their_models_freeze(nets: Path, data: Path, tmp_path: Path) -> None:
    """The values come from the user's own code, which may differ between machines."""
    meet = mock.Mock(side_effect=InterruptedError)
    other = tmp_path / "other.py"
    other.write_text(NETS.replace("torch.rand(width)", "torch.ones(width)"), encoding="utf-8")
    for source in (nets, nets, other):
        plan = plan_of(f"{source}:Net", data)
        with pytest.raises(InterruptedError):
            run_training(plan.configuration, folder=tmp_path, sink=mock.Mock(), config_toml=plan.record, meet=meet)
    facts = [call.args[0] for call in meet.call_args_list]
    assert facts[0] == facts[1]
    assert {name for name in facts[0] if facts[0][name] != facts[2][name]} == {"first weights"}


def test_a_model_of_a_function_in_a_file_is_trained_and_loaded_again(nets: Path, data: Path, tmp_path: Path) -> None:
    """The layers of a plain module are found though its head is larger; frozen parameters and buffers are kept."""
    plan = plan_of(f"{nets}:build", data, model__arguments={"width": 12})
    summary = trained(tmp_path / "run", plan)
    assert plan.configuration.sync.num_fragments == 3  # four layers, three per fragment, and the rest
    again = load_trained(tmp_path / "run", source=f"{nets}:build").model
    assert (again.num_layers, again.vocab_size, again.wrapped.embedding.weight.shape[1]) == (4, 257, 12)
    checkpoint = open_checkpoint(tmp_path / "run")
    synchronised = {name for fragment in checkpoint.about["fragments"] for name in fragment["parameters"]}
    assert synchronised == {name for name, p in again.named_parameters() if p.requires_grad}
    assert "wrapped.scale" not in synchronised
    state = checkpoint.load("replica-0-values")
    assert torch.equal(again.wrapped.scale, state["model/wrapped.scale"])  # type: ignore[arg-type]  # a buffer
    assert 0 < float(again.wrapped.seen) < float(state["model/wrapped.seen"])  # type: ignore[arg-type]  # that of the last average
    assert trained(tmp_path / "run-2", plan)["global_params_digest"] == summary["global_params_digest"]
    with pytest.raises(ConfigurationError, match="has no argument `documents`"):
        again(torch.zeros(1, 4, dtype=torch.int64), documents=torch.zeros(1, 4, dtype=torch.int64))
    assert again.flops_per_token(16) == 6 * (257 * 12 + 4 * 12 * 12)

    written_ns = nets.stat().st_mtime_ns
    nets.write_text(NETS.replace("range(4)", "range(5)"), encoding="utf-8")
    os.utime(nets, ns=(written_ns, written_ns))  # bytecode in `__pycache__` detects an edit by size and second
    longer = {"checkpoint__resume": tmp_path / "run", "train__steps": 16, "model__source": f"{nets}:build"}
    with pytest.raises(CheckpointError, match=r"has model = .* and this run has"):
        trained(tmp_path / "run", plan_run(command_line(**longer)))


def test_a_run_resumes_exactly_and_is_evaluated_when_its_source_is_gone(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run has dropout, four bits with error feedback and the model's own tokeniser, and stops between rounds."""
    folder = write_config(tmp_path, "GPT-2")
    ByteTokenizer().save(folder)
    values = {"sync__error_feedback": 1.0, "network__replicas": 2}
    whole = plan_of(f"hf:{folder}", data, **values)
    assert whole.configuration.data.tokenizer == str(folder)
    straight = trained(tmp_path / "straight", whole)
    trained(tmp_path / "run", plan_of(f"hf:{folder}", data, train__stop_after=7, **values))
    resumed = plan_run(command_line(checkpoint__resume=tmp_path / "run", train__stop_after=12))
    assert trained(tmp_path / "run", resumed)["global_params_digest"] == straight["global_params_digest"]
    moved = folder.rename(tmp_path / "moved")
    elsewhere = {"model__source": f"hf:{moved}", "data__tokenizer": str(moved)}
    resumed = plan_run(command_line(checkpoint__resume=tmp_path / "run", train__steps=13, **elsewhere))
    trained(tmp_path / "again", resumed)
    shutil.rmtree(moved)

    run = str(tmp_path / "run")
    assert main(["evaluate", run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["heldout_loss"] == straight["heldout_loss"]
    assert main(["generate", run, "--prompt", "alpha", "--tokens", "3"]) == 0
    assert main(["status", run]) == 0
    assert "GPT2LMHeadModel" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match=r"cannot change model\.source"):
        plan_run(command_line(checkpoint__resume=tmp_path / "run", model__source="nets:build"))


SMALL = {
    "preset": "finetune",
    "train__sequence_length": 48,
    "sync__num_fragments": 2,
    "data__heldout_fraction": 0.2,
    "optimizer__learning_rate": 1e-2,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole fine-tuning run, which tests must not change."""
    folder = tmp_path_factory.mktemp("run")
    trained(folder, plan_of(f"hf:{base}", write_sums(folder.with_name("sums.jsonl")), **SMALL))
    return folder


def test_a_checkpoint_holds_what_is_trained_and_nothing_of_the_base_and_so_does_its_adapter(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    checkpoint = open_checkpoint(run)
    names = set(checkpoint.load("global"))
    assert names
    assert all("lora_" in name for name in names)
    values = checkpoint.load("replica-0-values")
    assert {name.removeprefix("model/") for name in values if name.startswith("model/")} == names
    assert "rest" not in checkpoint.parts
    sizes = [fragment["numel"] for fragment in checkpoint.about["fragments"]]
    assert max(sizes) - min(sizes) < 0.1 * sum(sizes)  # balanced
    # data-parallel training would also send only adapters
    assert summary["data_parallel_bytes_per_replica"] < summary["parameters"] * 12 * 8
    model = load_trained(run).model
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == names
    assert main(["export", str(run), "--out", str(run.with_name("adapter")), "--to", "adapter"]) == 0
    exported = load_file(run.with_name("adapter") / "adapter_model.safetensors")
    assert len(exported) == len(names)
    for name, value in checkpoint.load("global").items():
        peft_name = name.replace("wrapped.", "base_model.model.", 1).replace(".default.", ".")
        assert torch.equal(exported[peft_name], value)


def edited(file: Path, before: str, after: str) -> None:
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


def swapped(base: Path) -> None:
    """Swap the ids of two letters."""
    content = json.loads((base / "tokenizer.json").read_text())
    letters = content["model"]["vocab"]
    letters["y"], letters["z"] = letters["z"], letters["y"]
    (base / "tokenizer.json").write_text(json.dumps(content))


CHANGES: dict[str, tuple[Callable[[Path], Any], str, bool]] = {
    # what changes the base -> the change, the fact that is named on resume, and whether it is evaluated all the same
    "weights": (lambda base: write_base(base, seed=1), "base model", False),
    "epsilon": (
        lambda base: edited(base / "config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.9'),
        "conf",
        False,
    ),
    "theta": (lambda base: edited(base / "config.json", "10000.0", "3.0"), "configuration", False),
    # the run has its own tokenizer and template
    "template": (
        lambda base: edited(base / "chat_template.jinja", "m.content", "m.content.strip()"),
        "chat temp",
        True,
    ),
    "tokenizer": (swapped, "tokenizer", True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_base_that_changed_is_refused_when_adapters_are_loaded_and_when_their_run_resumes(
    change: str, tmp_path: Path
) -> None:
    """Before, a run resumed on other weights, whose name its next checkpoint had; and another configuration was used
    in silence everywhere."""
    make, fact, loads = CHANGES[change]
    base, run, data = write_base(tmp_path / "base"), tmp_path / "run", write_sums(tmp_path / "sums.jsonl")
    trained(run, plan_of(f"hf:{base}", data, **SMALL, train__stop_after=2))
    original = shutil.copytree(base, tmp_path / "original")
    make(base)
    resumed = plan_run(command_line(checkpoint__resume=run))
    with pytest.raises(CheckpointError, match=f"has {fact}.* and this run has {fact}"):
        trained(run, resumed)
    begun = plan_of(f"hf:{base}", data, **SMALL, train__init_from=run, train__steps=2)
    if loads:
        load_trained(run)
    else:
        with pytest.raises(ConfigurationError, match="Put the original"):
            load_trained(run)
    if change == "tokenizer":
        assert begun.configuration.data.tokenizer == str(run), "a new run has that of the weights"
    elif change != "template":  # a new run may have another
        with pytest.raises(ConfigurationError, match=f"has {fact}.* would mean something else here"):
            trained(tmp_path / "begun", begun)
        assert not (tmp_path / "begun").exists()
    # an equal folder elsewhere works
    load_trained(run, source=f"hf:{original}")
    elsewhere = {"model__source": f"hf:{original}", "data__tokenizer": str(original), "train__stop_after": 3}
    trained(run, plan_run(command_line(checkpoint__resume=run, **elsewhere)))


def test_a_folder_whose_configuration_changed_is_refused_when_the_training_of_all_weights_resumes(
    data: Path, tmp_path: Path
) -> None:
    folder = write_config(tmp_path, "Llama")
    ByteTokenizer().save(folder)
    trained(tmp_path / "run", plan_of(f"hf:{folder}", data, train__stop_after=2))
    edited(folder / "config.json", "10000.0", "500.0")
    with pytest.raises(CheckpointError, match=r"has configuration = .* and this run has configuration = "):
        trained(tmp_path / "run", plan_run(command_line(checkpoint__resume=tmp_path / "run")))
    load_trained(tmp_path / "run")  # the checkpoint has the configuration that was trained


def test_a_replica_weighs_as_many_tokens_as_counted(base: Path, tmp_path: Path) -> None:
    """Answers have two lengths; a checkpoint holds the weights of the replicas' contributions."""
    records = [asked(f"q{number}", "7" * (3 if number < 20 else 15)) for number in range(40)]
    data = write_records(tmp_path / "data.jsonl", records)
    plan = plan_of(f"hf:{base}", data, **SMALL, data__packing="single", train__stop_after=3)
    trained(tmp_path / "run", plan)
    checkpoint = open_checkpoint(tmp_path / "run")
    corpus = build_corpus(plan.configuration.data, 48)
    counted = []
    for replica in range(2):
        batches = corpus.batches(sequence_length=48, batch_size=2, replica=replica, num_replicas=2, seed=0)
        counted.append(sum(int((batches.next_batch()[1] >= 0).sum()) for _ in range(3)))
        fragment = checkpoint.load(f"replica-{replica}-own-0")["state"]["diloco"]["fragments"][0]
        assert fragment["trained"] == pytest.approx(counted[-1] / (2 * 48))
    assert counted[0] != counted[1]
