"""How integrations unwrap models and optimizers of a framework, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from diloco import SyncSchedule
from diloco.errors import CheckpointError, ConfigurationError
from diloco.integrations import HostedReplica, StepWatch, replica_share, unwrapped


def a_class_of(module: str, name: str, base: type = nn.Module) -> Any:
    return type(name, (base,), {"__module__": module})


def test_a_compiled_model_is_unwrapped_and_fragments_have_its_names() -> None:
    inner = nn.Linear(1, 1)
    compiled = a_class_of("torch._dynamo.eval_frame", "OptimizedModule")()
    compiled._orig_mod = inner
    optimizer = torch.optim.SGD(inner.parameters())
    assert unwrapped(nn.DataParallel(compiled), optimizer, None) == (inner, optimizer)


@pytest.mark.parametrize(
    ("module", "name", "why"),
    [
        ("deepspeed.runtime.engine", "DeepSpeedEngine", "DeepSpeed keeps the parameters"),
        ("accelerate.utils.megatron_lm", "MegatronEngine", "Megatron shards its parameters"),
        (
            "torch.distributed.fsdp.fully_sharded_data_parallel",
            "FullyShardedDataParallel",
            "FSDP1 shards its parameters",
        ),
    ],
)
def test_models_that_keep_their_parameters_to_themselves_are_refused(module: str, name: str, why: str) -> None:
    kept = a_class_of(module, name)()
    for model in (kept, nn.Sequential(nn.Linear(1, 1), kept)):
        with pytest.raises(ConfigurationError, match=rf"A model with a {name} was given, but {why}"):
            unwrapped(model, torch.optim.SGD([nn.Parameter(torch.zeros(1))]), None)


def test_what_is_no_optimizer_of_torch_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"got a builtins\.dict"):
        unwrapped(nn.Linear(1, 1), {}, None)
    wrapped = a_class_of("accelerate.utils.deepspeed", "DeepSpeedOptimizerWrapper", object)()
    with pytest.raises(ConfigurationError, match="DeepSpeed keeps the parameters"):
        unwrapped(nn.Linear(1, 1), wrapped, None)


def test_a_fused_optimizer_that_skips_the_step_itself_has_not_trained() -> None:
    """`GradScaler.step` still calls it, with ``found_inf`` as an attribute, and its kernel skips the step."""
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([parameter], fused=True)
    watch, scaler = StepWatch(optimizer), torch.amp.GradScaler("cpu", init_scale=2.0)
    for factor, trained in ((1.0, 1.0), (float("inf"), 0.0), (1.0, 1.0)):
        optimizer.zero_grad()
        scaler.scale(factor * parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert watch.trained() == trained
    watch.close()
    optimizer.step()
    assert watch.trained() == 0.0


@pytest.mark.parametrize("freezes", [False, True])
def test_globals_are_shown_and_hidden_and_kept(freezes: bool) -> None:
    model = nn.Linear(1, 1, bias=False)
    began = model.weight.item()
    replica = HostedReplica("global", {"schedule": SyncSchedule(inner_steps=2)})
    replica.begin(model, torch.optim.SGD(model.parameters()), None)
    with torch.no_grad():
        model.weight.add_(1.0)
    model.requires_grad_(not freezes)
    for _ in range(2):
        replica.show()
        replica.show()  # a second call must not overwrite the saved local parameters
        assert model.weight.item() == began
        local = replica.local()
        assert local is not None
        assert local["weight"].item() == began + 1
        replica.hide()
        replica.hide()
        assert model.weight.item() == began + 1
    replica.end()
    replica.hide()
    assert model.weight.item() == began


@pytest.mark.parametrize("wrong", ["schedule", "local"])
def test_a_refused_state_leaves_the_local_parameters_alone(wrong: str) -> None:
    def hosted(inner_steps: int) -> tuple[HostedReplica, nn.Module]:
        model, replica = nn.Linear(1, 1), HostedReplica("global", {"schedule": SyncSchedule(inner_steps=inner_steps)})
        replica.begin(model, torch.optim.SGD(model.parameters()), None)
        return replica, model

    state = hosted(2)[0].state_dict()
    if wrong == "local":
        state["local"] = {"weight": torch.zeros(2, 1)}
    replica, model = hosted(3 if wrong == "schedule" else 2)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(CheckpointError, match="Nothing was loaded"):
        replica.load_state_dict(state)
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("seed", [None, 0, 5])
@pytest.mark.parametrize(("samples", "replicas"), [(7, 1), (7, 2), (8, 4), (11, 4), (4, 4)])
def test_shares_are_of_one_size_and_have_nothing_in_common(seed: int | None, samples: int, replicas: int) -> None:
    shares = [list(replica_share(range(samples), replica=m, num_replicas=replicas, seed=seed)) for m in range(replicas)]
    dealt = [sample for share in shares for sample in share]
    assert {len(share) for share in shares} == {samples // replicas}
    assert len(set(dealt)) == len(dealt)
    assert set(dealt) <= set(range(samples))


def test_what_can_not_be_shared_out_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="replica must be from 0 to 1 with num_replicas=2, got 2"):
        replica_share(range(5), replica=2, num_replicas=2)
    with pytest.raises(ConfigurationError, match="got 1 for 2 replicas"):
        replica_share(range(1), replica=0, num_replicas=2)
    with pytest.raises(ConfigurationError, match=r"split_dataset_by_node\(dataset, rank=1, world_size=2\)"):
        replica_share(iter(range(5)), replica=1, num_replicas=2)
