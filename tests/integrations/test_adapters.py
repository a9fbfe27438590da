"""PEFT in TRL's `SFTTrainer`, in Accelerate with FSDP2; and models with `device_map`.

Each trainer is a replica that sends its adapters but not its frozen parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from diloco import DiLoCo, SyncSchedule
from diloco.algorithm import Sgd, local_shard
from diloco.errors import ConfigurationError
from diloco.transport import Transport
from tests.finetuning import write_base
from tests.integrations.turns import in_turns
from tests.lazy import Lazy

accelerate, ours_of_accelerate = Lazy("accelerate"), Lazy("diloco.integrations.accelerate")
datasets, peft, trl = Lazy("datasets"), Lazy("peft"), Lazy("trl")
transformers, ours_of_transformers = Lazy("transformers"), Lazy("diloco.integrations.transformers")

# ignore warnings of these libraries about themselves and each other
pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 4
OURS: dict[str, Any] = {
    "schedule": SyncSchedule(inner_steps=2),
    "codec": "fp4",
    "outer_optimizer": Sgd(learning_rate=1.0),
}
QUIET: dict[str, Any] = {
    "use_cpu": True,
    "disable_tqdm": True,
    "report_to": "none",
    "save_strategy": "no",
    "per_device_train_batch_size": 2,
    "max_steps": STEPS,
    "learning_rate": 1e-2,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


def lora(targets: str | list[str] = "all-linear") -> Any:
    return peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM")


def adapted(base: Path, adapters: Any, **how: Any) -> Any:
    return peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base, **how), adapters)


def fit(model: nn.Module, optimizer: Any, diloco: DiLoCo, replica: int = 0, backward: Any = Tensor.backward) -> None:
    for tokens in torch.randint(60, 90, (STEPS, 2, 8), generator=torch.Generator().manual_seed(replica)):
        backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()
        diloco.step()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: local_shard(value).clone() for name, value in model.named_parameters()}


Trained = tuple[dict[str, Tensor], dict[str, Tensor], DiLoCo]
"""The parameters of a replica before and after training, and how it has synchronised them."""


def sft(base: Path, out: Path, transport: Transport) -> Trained:
    rows = [{"prompt": f"{transport.replica}{number}?", "completion": str(number)} for number in range(8)]
    trainer = trl.SFTTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(base),
        args=trl.SFTConfig(output_dir=str(out), max_length=32, gradient_checkpointing=False, **QUIET),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(base),
        peft_config=lora(),
    )
    before = values(trainer.model)
    callback = ours_of_transformers.DiLoCoCallback(transport=transport, **OURS).add_to(trainer)
    trainer.train()
    return before, values(trainer.model), callback.diloco


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Create a process group of one rank. Accelerate supports FSDP only on GPUs, so the rank pretends to have one."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    accelerate.PartialState(cpu=True)
    accelerate.PartialState._shared_state["distributed_type"] = accelerate.DistributedType.MULTI_GPU
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    dist.destroy_process_group()


def by_accelerate(base: Path, out: Path, transport: Transport) -> Trained:
    """With parameters sharded by FSDP2."""
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    accelerator = accelerate.Accelerator(fsdp_plugin=plugin)
    assert accelerator.is_fsdp2
    model = adapted(base, lora())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    before = values(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    with ours_of_accelerate.AcceleratedDiLoCo(accelerator, model, optimizer, transport=transport, **OURS) as diloco:
        fit(model, optimizer, diloco, transport.replica, accelerator.backward)
    assert all(hasattr(parameter, "to_local") for parameter in model.parameters())
    with diloco.global_model():
        return before, values(model), diloco


@pytest.mark.parametrize("train", [sft, by_accelerate])
def test_two_replicas_end_with_the_same_adapters(
    train: Any, base: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Nothing else changes."""
    if train is by_accelerate:
        request.getfixturevalue("one_rank")

    def run(replica: int, transport: Transport) -> Trained:
        torch.manual_seed(0)  # seeds the adapters
        return train(base, tmp_path / str(replica), transport)

    (before, after, diloco), (_, other, _) = in_turns(run)
    assert diloco.rounds_committed == 2
    travelled = {name for fragment in diloco.fragments for name in fragment.names}
    assert travelled
    assert all("lora_" in name for name in travelled)
    for name, value in after.items():
        assert torch.equal(value, other[name]), name
        if name.removeprefix("model.") not in travelled and name not in travelled:
            assert torch.equal(value, before[name]), name
    assert any(not torch.equal(after[name], before[name]) for name in travelled)


def test_what_is_frozen_may_lie_where_a_device_map_says_and_what_is_trained_may_not(base: Path, tmp_path: Path) -> None:
    """Frozen weights on the disk are read on demand, but trained ones would be on the meta device."""
    places = {name: "cpu" for name in ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head")}
    places |= {f"model.layers.{layer}": ("cpu", "disk", "cpu")[layer] for layer in range(3)}
    spread = {"device_map": places, "offload_folder": tmp_path}

    def trained(*layers: int, **how: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = adapted(base, lora([f"layers.{layer}.self_attn.q_proj" for layer in layers]), **how)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        with DiLoCo(model, optimizer, **OURS) as diloco:
            fit(model, optimizer, diloco)
        return diloco.named_global_params()

    here, away = trained(0, 2), trained(0, 2, **spread)
    assert all(torch.equal(away[name], value) for name, value in here.items())
    with pytest.raises(ConfigurationError, match=r"must be on one device, but .*layers\.1.* on meta .* a device_map"):
        trained(0, 1, **spread)
