"""A fragment: its merges, the global state that replicas of a process share, its digest, and work in no mean yet."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import xxhash
from torch import Tensor, nn

from diloco.algorithm import AlphaMerge, MergeRule, Nesterov, RebaseMerge, RoundId, Sgd, SyncSchedule
from diloco.errors import ConfigurationError
from diloco.outer import DiLoCo, Fragment
from tests.faults import Fault, FaultyTransport
from tests.replicas import Swarm, Vectors, agree, quadratic


def fragment_of(model: nn.Module, **arguments: Any) -> Fragment:
    inner, outer = torch.optim.SGD(model.parameters()), Nesterov(learning_rate=0.5)
    (fragment,) = DiLoCo(model, inner, outer_optimizer=outer, compare_arguments=False, **arguments).fragments
    return fragment


def transpose(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()


@pytest.mark.parametrize("rule", [RebaseMerge(), AlphaMerge(0.3)])
@pytest.mark.parametrize(
    "make", [lambda model: model, transpose, lambda model: model[1].bfloat16(), lambda model: model.bfloat16()]
)
def test_parameters_merge_to_the_same_bits_in_place_and_copied(
    rule: MergeRule, make: Callable[[nn.Module], object]
) -> None:
    """Against the rule on the whole vector, rounded to the type of the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(700, 500), nn.Linear(5, 3))  # the first one is longer than one piece
    make(model)
    fragment = fragment_of(model)
    sent = fragment.local()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape).to(parameter.dtype))
    fragment.global_params.sub_(torch.randn(fragment.numel))
    expected = fragment.local()
    rule.merge(expected, fragment.global_params, sent)
    fragment.reset_local(rule, sent if rule.keeps_sent else None)
    dtypes = [parameter.dtype for parameter in fragment.parameters]
    parts = zip(torch.split(expected, fragment.layout.sizes), dtypes, strict=True)
    assert torch.equal(fragment.local(), torch.cat([part.to(dtype).float() for part, dtype in parts]))


class Sharing(Swarm):
    """Replicas of one process with one global state."""

    def __init__(self, *given: Any, **arguments: Any) -> None:
        super().__init__(*given, **arguments)
        own = self.replicas
        for fragments in zip(*(diloco.fragments for diloco in own), strict=True):
            for fragment in fragments:
                fragment.state = fragments[0].state
            fragments[0].state.users = len(fragments)


@pytest.mark.parametrize("fault", [None, "drop", "late"])
@pytest.mark.parametrize("merge", [AlphaMerge(0.5), RebaseMerge()])
def test_replicas_that_share_their_global_state_train_to_the_same_bits(fault: Any, merge: MergeRule) -> None:
    """Also if a round excludes one: its work stays in its local parameters."""
    faults = [Fault(kind=fault, replica=2, round=RoundId(0, 1))] if fault else []
    swarms = []
    for kind in (Swarm, Sharing):
        transport = FaultyTransport(3, faults=faults, min_contributors=2)
        schedule = SyncSchedule(inner_steps=4, overlap_steps=3)
        outer = Nesterov(learning_rate=0.4)
        swarm = kind(3, schedule, outer=outer, merge=merge, codec="int8", error_feedback=True, transport=transport)
        swarm.run(20, quadratic())
        swarms.append(swarm)
    apart, sharing = swarms
    assert agree(apart)
    for m in range(3):
        assert torch.equal(apart.local(m), sharing.local(m))
        assert torch.equal(apart.global_params(m), sharing.global_params(m))
        assert apart.replicas[m].rounds_committed == sharing.replicas[m].rounds_committed
    assert apart.replicas[0].fragments[0].state.digest() == sharing.replicas[0].fragments[0].state.digest()


def test_the_digest_of_a_large_state_is_computed_in_a_thread_after_each_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither `send` nor the training thread hashes it, and an error is raised where the digest is asked for."""
    threads, xxh3_128 = [], xxhash.xxh3_128

    def hashing() -> Any:
        threads.append(threading.current_thread().name)
        if len(threads) == 3:
            raise RuntimeError("a broken device")
        return xxh3_128()

    state = fragment_of(nn.Linear(2048, 512)).state
    assert state.digest() == state.digest_of(state.tensors())
    monkeypatch.setattr(xxhash, "xxh3_128", hashing)
    for change in range(3):
        with state.changing():
            assert threads == ["digest"] * change, "the change waits for the digest of what is to change"
            state.values[0] += 1
    with pytest.raises(RuntimeError, match="a broken device"):
        state.digest()


def test_a_snapshot_waits_for_the_gpu_whose_state_it_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread takes it, and the training may use a stream of its own."""
    log: list[str] = []

    class Copied:
        device = torch.device("cuda", 1)

        def clone(self) -> Tensor:
            log.append("copied")
            return torch.zeros(1)

    state = fragment_of(nn.Linear(1, 1)).state
    state.outer.slots.clear()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append(str(device)))
    monkeypatch.setattr(state, "values", Copied())
    state.snapshot()
    assert log == ["cuda:1", "copied", "cuda:1"]


@pytest.mark.parametrize("codec", ["float16", "bfloat16", "int8", "fp4", "topk2"])
def test_work_of_void_rounds_is_sent_once_and_nothing_is_lost(codec: str) -> None:
    """With outer SGD(lr=1): what was applied, the residual and what waits for the next round add up to all work."""
    model = Vectors()
    fragment_faults = [Fault(kind="drop", replica=0, round=RoundId(0, outer_step)) for outer_step in range(1, 30, 3)]
    diloco = DiLoCo(
        model,
        torch.optim.SGD(model.parameters()),
        transport=FaultyTransport(1, faults=fragment_faults).endpoint(0),
        schedule=SyncSchedule(inner_steps=1),
        outer_optimizer=Sgd(learning_rate=1.0),
        codec=codec,
        error_feedback=True,
        on_event=lambda _: None,
    )
    (fragment,) = diloco.fragments
    expected = fragment.local().double()
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        before = fragment.local().double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator))
        expected += fragment.local().double() - before
        diloco.step()
    assert (diloco.rounds_committed, diloco.rounds_void) == (20, 10)
    assert fragment.residual is not None
    assert float(fragment.residual.abs().max()) > 0
    torch.testing.assert_close(fragment.local().double() - fragment.residual, expected, rtol=0, atol=1e-4)


def test_an_inner_step_is_trained_from_none_to_all_of_it() -> None:
    model = nn.Linear(1, 1)
    diloco = DiLoCo(model, torch.optim.SGD(model.parameters()))
    for trained in (-0.1, 1.5, float("nan")):
        with pytest.raises(ConfigurationError, match=r"trained must be a number from 0 to 1, got .*\."):
            diloco.step(trained)
    assert (diloco.steps, diloco.fragments[0].trained) == (0, 0.0)
