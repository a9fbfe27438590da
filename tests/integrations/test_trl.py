"""TRL's `SFTTrainer` and `DPOTrainer` with PEFT, as replicas: adapters travel, what is frozen does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer

from diloco import SyncSchedule
from diloco.algorithm.outer_optimizer import Sgd
from diloco.integrations.transformers import DiLoCoCallback
from diloco.transport.base import Transport
from tests.finetuning import write_base
from tests.integrations.turns import in_turns

# what TRL and PEFT say about themselves and each other is no concern of ours
pytestmark = pytest.mark.filterwarnings("ignore")

QUIET: dict[str, Any] = {
    "use_cpu": True,
    "disable_tqdm": True,
    "report_to": "none",
    "save_strategy": "no",
    "per_device_train_batch_size": 2,
    "max_steps": 4,
    "learning_rate": 1e-2,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


def sft(base: Path, out: Path, replica: int, *, checkpointing: bool) -> Trainer:
    from trl import SFTConfig, SFTTrainer

    rows = [{"prompt": f"{replica}{number}?", "completion": str(number)} for number in range(8)]
    arguments = SFTConfig(output_dir=str(out), max_length=32, gradient_checkpointing=checkpointing, **QUIET)
    return SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(base),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(base),
        peft_config=lora(),
    )


def dpo(base: Path, out: Path, replica: int, *, checkpointing: bool) -> Trainer:
    from trl import DPOConfig, DPOTrainer

    rows = [{"prompt": f"{replica}{n}?", "chosen": str(n), "rejected": "no"} for n in range(8)]
    arguments = DPOConfig(output_dir=str(out), max_length=32, gradient_checkpointing=checkpointing, **QUIET)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = tokenizer.eos_token
    return DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(base),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=lora(),
    )


def lora() -> LoraConfig:
    return LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")


@pytest.mark.parametrize(("make", "checkpointing"), [(sft, False), (sft, True), (dpo, False)])
def test_two_replicas_end_with_the_same_adapters(make: Any, checkpointing: bool, base: Path, tmp_path: Path) -> None:
    def train(replica: int, transport: Transport) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Any]:
        torch.manual_seed(0)  # of the adapters
        trainer = make(base, tmp_path / str(replica), replica, checkpointing=checkpointing)
        before = {name: value.clone() for name, value in trainer.model.named_parameters()}
        callback = DiLoCoCallback(
            transport=transport,
            schedule=SyncSchedule(inner_steps=2),
            codec="fp4",
            outer_optimizer=Sgd(learning_rate=1.0),
        ).add_to(trainer)
        trainer.train()
        return before, {name: value.detach() for name, value in trainer.model.named_parameters()}, callback.diloco

    (before, one, diloco), (_, other, _) = in_turns(train)
    assert diloco.rounds_committed == 2
    travelled = {name for fragment in diloco.fragments for name in fragment.names}
    assert travelled
    assert all("lora_" in name for name in travelled)
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
        if name not in travelled:
            assert torch.equal(value, before[name]), name
    assert any(not torch.equal(one[name], before[name]) for name in travelled)
