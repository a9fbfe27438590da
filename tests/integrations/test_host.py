"""How integrations unwrap models and optimizers of a framework, and what they refuse."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from diloco import SyncSchedule
from diloco.errors import CheckpointError, ConfigurationError, DiLoCoError
from diloco.events import Event, RoundSent
from diloco.integrations import HostedReplica, StepWatch, replica_share, unwrapped
from tests.integrations.turns import alone_of_two
from tests.same import same


def a_class_of(module: str, name: str, base: type = nn.Module) -> Any:
    return type(name, (base,), {"__module__": module})


def test_a_compiled_model_is_unwrapped_and_fragments_have_its_names() -> None:
    inner = nn.Linear(1, 1)
    compiled = a_class_of("torch._dynamo.eval_frame", "OptimizedModule")()
    compiled._orig_mod = inner
    optimizer = torch.optim.SGD(inner.parameters())
    assert unwrapped(nn.DataParallel(compiled), optimizer) == (inner, optimizer)


def test_what_keeps_its_parameters_to_itself_is_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    for module, name, why in (
        ("deepspeed.runtime.engine", "DeepSpeedEngine", "DeepSpeed keeps the parameters"),
        ("accelerate.utils.megatron_lm", "MegatronEngine", "Megatron shards its parameters"),
    ):
        model = a_class_of(module, name)()
        for holder in (model, nn.Sequential(nn.Linear(1, 1), model)):
            with pytest.raises(ConfigurationError, match=rf"can't work with {name}: {why}"):
                unwrapped(holder, optimizer)
    wrapped = a_class_of("accelerate.utils.deepspeed", "DeepSpeedOptimizerWrapper", object)()
    with pytest.raises(ConfigurationError, match="DeepSpeed keeps the parameters"):
        unwrapped(nn.Linear(1, 1), wrapped)


def hosted(optimizer_of: Any = torch.optim.SGD, inner_steps: int = 3, **more: Any) -> tuple[HostedReplica, nn.Module]:
    model = nn.Linear(1, 1)
    replica = HostedReplica("global", {"schedule": SyncSchedule(inner_steps=inner_steps), **more})
    replica.begin(model, optimizer_of(model.parameters()), None)
    return replica, model


def test_a_fused_optimizer_that_skips_the_step_itself_has_not_trained() -> None:
    """`GradScaler.step` still calls it, with ``found_inf`` as an attribute, and its kernel skips the step."""
    events: list[Event] = []
    replica, model = hosted(partial(torch.optim.Adam, fused=True), on_event=events.append)
    watch, scaler = StepWatch(replica.inner), torch.amp.GradScaler("cpu", init_scale=2.0)
    for factor, trained in ((1.0, 1.0), (float("inf"), 0.0), (1.0, 1.0)):
        replica.inner.zero_grad()
        scaler.scale(factor * model(torch.ones(1)).sum()).backward()
        scaler.step(replica.inner)
        scaler.update()
        replica.step()
        assert watch.trained() == trained
    replica.end()
    (sent,) = (event for event in events if isinstance(event, RoundSent))
    assert sent.weight == 2 / 3


@pytest.mark.parametrize("at", ["begin", "end"])
def test_the_connection_ends_with_the_error_of_what_failed(at: str) -> None:
    """Else the other ranks wait for this one, and DistributedDataParallel goes on without averages."""
    ended: list[BaseException] = []
    model = nn.Linear(1, 1)
    held = list(model.parameters())[: 1 if at == "begin" else 2]

    def train() -> None:
        replica = HostedReplica("global", {"schedule": SyncSchedule(inner_steps=1, overlap_steps=1)})
        replica.begin(model, torch.optim.SGD(held), alone_of_two(ended))
        replica.step()
        replica.end()

    with pytest.raises(DiLoCoError) as raised:
        train()
    assert ended == [raised.value]


@pytest.mark.parametrize("wrong", ["schedule", "local"])
def test_a_refused_state_leaves_the_local_parameters_alone(wrong: str) -> None:
    state = hosted()[0].state_dict()
    if wrong == "local":
        state["local"] = {"weight": torch.zeros(2, 1)}
    replica, model = hosted(inner_steps=2 if wrong == "schedule" else 3)
    before = [parameter.clone() for parameter in model.parameters()]
    replica.load_state_dict(state)
    with pytest.raises(CheckpointError, match="Nothing was loaded"):
        replica.resume(None)
    assert all(map(torch.equal, model.parameters(), before))


def test_a_state_saved_beside_the_global_model_gives_back_the_local_buffers() -> None:
    def begun() -> tuple[HostedReplica, nn.Module]:
        model = nn.BatchNorm1d(2)
        replica = HostedReplica("global", {"schedule": SyncSchedule(inner_steps=3)})
        replica.begin(model, torch.optim.SGD(model.parameters()), None)
        return replica, model

    first, model = begun()
    model(torch.ones(2, 2))
    local = copy.deepcopy(model.state_dict())
    with first.shown():
        assert not same(dict(model.state_dict()), dict(local))
        state = copy.deepcopy(first.state_dict())
    second, again = begun()
    second.load_state_dict(state)
    second.resume(None)
    assert same(dict(again.state_dict()), dict(local))


@pytest.mark.parametrize("seed", [None, 0, 5])
def test_shares_are_of_one_size_and_have_nothing_in_common(seed: int | None) -> None:
    for samples, replicas in ((7, 1), (7, 2), (8, 4), (11, 4), (4, 4)):
        shares = [replica_share(range(samples), replica=m, num_replicas=replicas, seed=seed) for m in range(replicas)]
        dealt = [sample for share in shares for sample in share]
        assert {len(share) for share in shares} == {samples // replicas}
        assert len(set(dealt)) == len(dealt)
        assert set(dealt) <= set(range(samples))


@pytest.mark.parametrize(
    ("dataset", "replica", "words"),
    [
        (range(5), 2, "replica with num_replicas=2 must be a whole number from 0 to 1, got 2"),
        (range(1), 0, "got 1 for 2 replicas"),
        (iter(range(5)), 1, r"split_dataset_by_node\(dataset, rank=1, world_size=2\)"),
    ],
)
def test_what_can_not_be_shared_out_is_refused(dataset: Any, replica: int, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        replica_share(dataset, replica=replica, num_replicas=2)


def test_what_stays_at_home_is_the_replicas_own_in_what_is_shown_and_comes_back_with_its_state() -> None:
    """A framework may have loaded the model that another replica of the job saved, with its parameters at home."""
    replica, model = hosted(at_home=["bias"])
    with torch.no_grad():
        model.get_parameter("bias").fill_(0.25)
        model.get_parameter("weight").add_(1.0)
    with replica.shown():
        assert model.get_parameter("bias").item() == 0.25
        state = copy.deepcopy(replica.state_dict())
    weight = model.get_parameter("weight").item()
    again, loaded = hosted(at_home=["bias"])
    again.load_state_dict(state)
    with torch.no_grad():
        loaded.get_parameter("bias").fill_(7.0)
    again.resume(None)
    assert (loaded.get_parameter("bias").item(), loaded.get_parameter("weight").item()) == (0.25, weight)
    replica.end()
    again.end()
    assert loaded.get_parameter("bias").item() == 0.25
