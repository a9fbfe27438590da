"""`diloco finetune` in one process: which tokens count, checkpoints, adapters for peft, other base models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from diloco.checkpoint import open_checkpoint
from diloco.cli import main
from diloco.config import RunPlan, plan_run
from diloco.data import build_corpus
from diloco.errors import ConfigurationError
from diloco.trained import load_trained
from tests.command_lines import command_line
from tests.finetuning import asked, write_base, write_records, write_sums
from tests.train.source_runs import BASE, trained

SMALL = BASE | {
    "train__sequence_length": 48,
    "sync__num_fragments": 2,
    "data__heldout_fraction": 0.2,
    "optimizer__learning_rate": 1e-2,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sums(tmp_path_factory.mktemp("data") / "sums.jsonl")


def plan_of(base: Path, sums: Path, **values: Any) -> RunPlan:
    own = {"preset": "finetune", "model__source": f"hf:{base}", "data__paths": (str(sums),)}
    return plan_run(command_line(**(SMALL | own | values)))


@pytest.fixture(scope="module")
def run(base: Path, sums: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole run, which tests must not change."""
    folder = tmp_path_factory.mktemp("run")
    trained(folder, plan_of(base, sums))
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


def test_adapters_of_another_base_are_refused(base: Path, run: Path) -> None:
    """A checkpoint names the weights that it needs."""
    write_base(base, seed=1)
    with pytest.raises(ConfigurationError, match=r"trained with other weights .* Put the original model there"):
        load_trained(run)
    write_base(base)
    load_trained(run)


def test_a_replica_weighs_as_many_tokens_as_counted(base: Path, tmp_path: Path) -> None:
    """Answers have two lengths; a checkpoint holds the weights of the replicas' contributions."""
    records = [asked(f"q{number}", "7" * (3 if number < 20 else 15)) for number in range(40)]
    data = write_records(tmp_path / "data.jsonl", records)
    plan = plan_of(base, data, data__packing="single", train__stop_after=3)
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
