"""`DiLoCo` in a training loop: agreement, resuming with rounds in flight, buffers, and user errors."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from diloco.algorithm import CODECS, AlphaMerge, MergeRule, RebaseMerge, RoundId, Sgd, SyncSchedule
from diloco.errors import CheckpointError
from diloco.outer import DiLoCo
from tests.faults import Fault, FaultyTransport
from tests.replicas import STREAMING, Swarm, Vectors, agree, apart, quadratic, streaming


@pytest.mark.parametrize("codec", CODECS.names)
@pytest.mark.parametrize("merge", [AlphaMerge(0.5), RebaseMerge()])
def test_global_parameters_and_outer_state_stay_bit_identical(codec: str, merge: MergeRule) -> None:
    """Invariant 1 holds after every step with different data on every replica."""
    swarm = streaming(codec=codec, merge=merge, error_feedback=0.95 if codec == "topk2" else 0.0)
    for _ in range(30):
        swarm.run(1, quadratic())
        assert agree(swarm)
    assert not torch.equal(swarm.local(0), swarm.local(1))
    assert swarm.replicas[0].rounds_committed == sum(STREAMING.rounds_of(p, 28) for p in range(STREAMING.num_fragments))


class TestState:
    @pytest.mark.parametrize("stop_at", [1, 4, 5, 6, 8, 9])
    @pytest.mark.parametrize("merge", [AlphaMerge(0.5), RebaseMerge()])
    def test_stopping_anywhere_and_going_on_is_never_stopping(self, stop_at: int, merge: MergeRule) -> None:
        """Invariant 6; at 4, 5, 8 and 9 fragments are in flight."""
        arguments = {"merge": merge, "error_feedback": True, "codec": "int8"}
        whole = streaming(**arguments)
        whole.run(20, quadratic())
        first = streaming(**arguments)
        first.run(stop_at, quadratic())
        second = streaming(**arguments)
        second.resume_from(first)
        assert [each.in_flight for each in second.replicas] == [each.in_flight for each in first.replicas]
        second.run(20 - stop_at, quadratic())
        for m in range(3):
            assert torch.equal(second.local(m), whole.local(m))
            assert torch.equal(second.global_params(m), whole.global_params(m))
            assert second.replicas[m].fragments[0].state.digest() == whole.replicas[m].fragments[0].state.digest()
        assert second.replicas[0].rounds_committed == whole.replicas[0].rounds_committed
        assert second.transport.endpoint(0).sent_bytes == whole.transport.endpoint(0).sent_bytes

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"merge": AlphaMerge(0.5)}, "merge = RebaseMerge"),
            ({"codec": "int8"}, "codec = "),
            (
                {"outer": Sgd(learning_rate=0.4)},
                "saved state has outer optimizer = Nesterov and this run has outer optimizer = Sgd",
            ),
            ({"fragments": apart(Vectors())}, "fragment 0 = "),
        ],
    )
    def test_a_state_of_another_run_is_refused_by_name(self, change: dict[str, Any], words: str) -> None:
        with pytest.raises(CheckpointError, match=words):
            streaming(**change).replicas[0].load_state_dict(streaming().replicas[0].state_dict())


@pytest.mark.parametrize("left_out", [False, True])
def test_floating_buffers_are_averaged_and_integer_ones_copied_with_the_last_fragment(left_out: bool) -> None:
    """A replica that is left out of the round takes them too."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    faults = [Fault(kind="drop", replica=2, round=RoundId(1, 0))] if left_out else []
    transport = FaultyTransport(3, faults=faults, min_contributors=2)
    swarm = Swarm(3, SyncSchedule(inner_steps=2, num_fragments=2), make_model=make, transport=transport)
    norms = [model.get_submodule("1") for model in swarm.models]
    for m, norm in enumerate(norms):
        norm.get_buffer("running_mean").fill_(float(m))
        norm.get_buffer("num_batches_tracked").fill_(10 + m)
    swarm.run(2, quadratic())  # fragment 0 only
    assert [norm.get_buffer("running_mean").tolist() for norm in norms] == [[0.0] * 2, [1.0] * 2, [2.0] * 2]
    swarm.run(1, quadratic())
    assert [norm.get_buffer("running_mean").tolist() for norm in norms] == [[0.5 if left_out else 1.0] * 2] * 3
    assert [norm.get_buffer("num_batches_tracked").item() for norm in norms] == [10] * 3


def test_outer_state_is_float32_whatever_the_model_is() -> None:
    """Invariant 9."""
    model = Vectors().to(torch.bfloat16)
    diloco = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), schedule=SyncSchedule(inner_steps=1))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    diloco.step()
    (fragment,) = diloco.fragments
    assert fragment.global_params.dtype == fragment.state.outer.slots["momentum"].dtype == torch.float32


def test_without_a_listener_void_rounds_warn_once_with_the_reason_and_what_to_do() -> None:
    faults = [Fault(kind="drop", replica=1, round=RoundId(0, outer_step)) for outer_step in range(9)]
    swarm = Swarm(2, SyncSchedule(inner_steps=1), transport=FaultyTransport(2, faults=faults), on_event=None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        swarm.run(6, quadratic())
    told = [str(each.message) for each in caught]
    assert len(told) == len(swarm.replicas), "each replica once, in six rounds"
    start = "A round failed: fragment 0, outer step 0 is void: 1 of 2 contributions are usable"
    assert all(words.startswith(start) and "remove the cause" in words and "on_event" in words for words in told)
    assert swarm.replicas[0].rounds_void == 6
