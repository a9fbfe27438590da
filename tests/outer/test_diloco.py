"""`DiLoCo` in a training loop: agreement, resuming with rounds in flight, buffers, merges, and a fragment's state."""

import hashlib
import threading
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco.algorithm import CODECS, AlphaMerge, MergeRule, OuterState, RebaseMerge, RoundId, Sgd, SyncSchedule
from diloco.errors import CheckpointError
from diloco.outer import DiLoCo, Fragment
from tests.faults import Fault, FaultyTransport
from tests.replicas import STREAMING, Swarm, Vectors, agree, apart, quadratic, streaming
from tests.same import same


@pytest.mark.parametrize(
    ("merge", "codec"), [*((AlphaMerge(0.5), name) for name in CODECS.names), (RebaseMerge(), "fp4")]
)
def test_global_parameters_and_outer_state_stay_bit_identical(merge: MergeRule, codec: str) -> None:
    """Invariant 1 holds after every step with different data on every replica."""
    swarm = streaming(codec=codec, merge=merge, error_feedback=0.95 if codec in ("sign", "topk2") else 0.0)
    for _ in range(30):
        swarm.run(1, quadratic())
        assert agree(swarm)
    assert not torch.equal(swarm.local(0), swarm.local(1))
    assert swarm.replicas[0].rounds_committed == sum(STREAMING.rounds_of(p, 28) for p in range(STREAMING.num_fragments))


@pytest.mark.parametrize("stop_at", [1, 4, 6, 9])
@pytest.mark.parametrize("merge", [AlphaMerge(0.5), RebaseMerge()])
def test_a_run_stopped_anywhere_ends_as_if_it_had_not_stopped(stop_at: int, merge: MergeRule) -> None:
    """Invariant 6; at 4 and 9 fragments are in flight."""
    whole, first, second = (streaming(merge=merge, error_feedback=True, codec="int8") for _ in range(3))
    whole.run(20, quadratic())
    first.run(stop_at, quadratic())
    second.resume_from(first)
    assert all(same(a.state_dict(), b.state_dict()) for a, b in zip(second.replicas, first.replicas, strict=True))
    second.run(20 - stop_at, quadratic())
    for m in range(3):
        assert torch.equal(second.local(m), whole.local(m))
        assert torch.equal(second.global_params(m), whole.global_params(m))
        assert second.replicas[m].digest() == whole.replicas[m].digest()
    assert second.replicas[0].rounds_committed == whole.replicas[0].rounds_committed
    assert second.transport.endpoint(0).sent_bytes == whole.transport.endpoint(0).sent_bytes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"merge": AlphaMerge(0.5)}, "merge = RebaseMerge"),
        ({"codec": "int8"}, "codec = "),
        ({"outer": Sgd()}, "saved state has outer optimizer = Nesterov and this run has outer optimizer = Sgd"),
        ({"fragments": apart(Vectors())}, "fragment 0 = "),
    ],
)
def test_a_state_of_another_run_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        streaming(**change).replicas[0].load_state_dict(streaming().replicas[0].state_dict())


def test_floating_buffers_are_averaged_and_integer_ones_copied_with_the_last_fragment() -> None:
    """A replica that is left out of the round takes them too."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    transport = FaultyTransport(3, faults=[Fault(kind="drop", replica=2, round=RoundId(1, 0))], min_contributors=2)
    swarm = Swarm(3, SyncSchedule(inner_steps=2, num_fragments=2), make_model=make, transport=transport)
    norms = [model.get_submodule("1") for model in swarm.models]
    for m, norm in enumerate(norms):
        norm.get_buffer("running_mean").fill_(float(m))
        norm.get_buffer("num_batches_tracked").fill_(10 + m)
    swarm.run(2, quadratic())  # fragment 0 only
    assert [norm.get_buffer("running_mean").tolist() for norm in norms] == [[0.0] * 2, [1.0] * 2, [2.0] * 2]
    swarm.run(1, quadratic())
    assert [norm.get_buffer("running_mean").tolist() for norm in norms] == [[0.5] * 2] * 3
    assert [norm.get_buffer("num_batches_tracked").item() for norm in norms] == [10] * 3


def test_without_a_listener_void_rounds_warn_once_with_the_reason_and_what_to_do() -> None:
    faults = [Fault(kind="drop", replica=1, round=RoundId(0, outer_step)) for outer_step in range(9)]
    swarm = Swarm(2, SyncSchedule(inner_steps=1), transport=FaultyTransport(2, faults=faults), on_event=None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        swarm.run(6, quadratic())
    told = [str(each.message) for each in caught]
    assert len(told) == len(swarm.replicas), "each replica once, in six rounds"
    start = "The round of fragment 0, outer step 0, failed: 1 of 2 contributions are usable"
    assert all(words.startswith(start) and "remove the cause" in words and "on_event" in words for words in told)
    assert swarm.replicas[0].rounds_void == 6


def fragment_of(model: nn.Module) -> Fragment:
    (fragment,) = DiLoCo(model, torch.optim.SGD(model.parameters()), compare_arguments=False).fragments
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
    """Against the rule on the whole vector, rounded to the type of the parameters. The global state is float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(700, 500), nn.Linear(5, 3))  # the first one is longer than one piece
    make(model)
    fragment = fragment_of(model)
    assert fragment.global_params.dtype == fragment.state.outer.slots["momentum"].dtype == torch.float32, "invariant 9"
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


def share(swarm: Swarm) -> None:
    """Let replicas of one process use one global state."""
    for fragments in zip(*(diloco.fragments for diloco in swarm.replicas), strict=True):
        for fragment in fragments:
            fragment.state = fragments[0].state
        fragments[0].state.users = len(fragments)


@pytest.mark.parametrize("fault", [None, "drop"])
@pytest.mark.parametrize("merge", [AlphaMerge(0.5), RebaseMerge()])
def test_replicas_that_share_their_global_state_train_to_the_same_bits(fault: Any, merge: MergeRule) -> None:
    """Also if a round excludes one: its work stays in its local parameters."""
    faults = [Fault(kind=fault, replica=2, round=RoundId(0, 1))] if fault else []
    apart, sharing = (streaming(faults=faults, least=2, merge=merge, error_feedback=True) for _ in range(2))
    share(sharing)
    for swarm in (apart, sharing):
        swarm.run(20, quadratic())
    assert agree(apart)
    for m in range(3):
        assert torch.equal(apart.local(m), sharing.local(m))
        assert torch.equal(apart.global_params(m), sharing.global_params(m))
        assert apart.replicas[m].rounds_committed == sharing.replicas[m].rounds_committed
        assert apart.replicas[m].digest() == sharing.replicas[m].digest()


def test_the_digest_of_a_large_state_is_computed_in_a_thread_after_each_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither `send` nor the training thread hashes it, and an error is raised where the digest is asked for."""
    threads, blake2b = [], hashlib.blake2b

    def hashing(**arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        if len(threads) == 3:
            raise RuntimeError("a broken device")
        return blake2b(**arguments)

    state = fragment_of(nn.Linear(2048, 512)).state
    assert state.digest() == state.digest_of(state.tensors())
    monkeypatch.setattr(hashlib, "blake2b", hashing)
    for change in range(3):
        with state.changing():
            assert threads == ["digest"] * change, "the change waits for the digest of what is to change"
            state.values[0] += 1
    with pytest.raises(RuntimeError, match="a broken device"):
        state.digest()


def test_a_snapshot_waits_for_the_gpu_whose_state_it_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread takes it, and the training may use a stream of its own."""
    log: list[str] = []

    def copies() -> tuple[Tensor, OuterState]:
        log.append("copied")
        return torch.zeros(1), OuterState()

    state = fragment_of(nn.Linear(1, 1)).state
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append(str(device)))
    monkeypatch.setattr(state, "values", SimpleNamespace(device=torch.device("cuda", 1)))
    monkeypatch.setattr(state, "_copies", copies)
    state.snapshot()
    assert log == ["cuda:1", "copied", "cuda:1"]


@pytest.mark.parametrize("codec", ["float16", "bfloat16", "int8", "fp4", "sign", "topk2"])
def test_work_of_void_rounds_is_sent_once_and_nothing_is_lost(codec: str) -> None:
    """With outer SGD(lr=1): what was applied, the residual and what waits for the next round add up to all work."""
    faults = [Fault(kind="drop", replica=0, round=RoundId(0, outer_step)) for outer_step in range(1, 30, 3)]
    transport = FaultyTransport(1, faults=faults)
    swarm = Swarm(1, SyncSchedule(inner_steps=1), transport=transport, codec=codec, error_feedback=True)
    (diloco,), (model,) = swarm.replicas, swarm.models
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
