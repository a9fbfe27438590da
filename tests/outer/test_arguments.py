"""Arguments of `DiLoCo` and of transports that can't work are refused at the call, with what would work."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from diloco import AlphaMerge, DiLoCo, InProcessTransport, Nesterov, SyncSchedule, connect_tcp, partition
from diloco.errors import CheckpointError, CodecError, ConfigurationError, FragmentError
from tests.replicas import BALANCED, Vectors, quadratic, streaming
from tests.same import same


def made(**arguments: Any) -> DiLoCo:
    model = Vectors()
    return DiLoCo(model, **{"inner_optimizer": torch.optim.SGD(model.parameters(), lr=0.1), **arguments})


def inner() -> torch.optim.Optimizer:
    return torch.optim.SGD(Vectors().parameters(), lr=0.1)


NAN = float("nan")
CONNECT = {"replica": 0, "num_replicas": 1, "rendezvous": "127.0.0.1:0"}


def tcp(**arguments: Any) -> None:
    with connect_tcp(**(CONNECT | arguments)):
        pass


@pytest.mark.parametrize(
    ("call", "arguments", "words"),
    [
        (made, {"outer_optimizer": inner()}, r"must be OuterOptimizer \| None, got a torch.*SGD"),
        (made, {"outer_optimizer": Nesterov}, r"got the class Nesterov\. Create one: Nesterov\(\.\.\.\)"),
        (made, {"transport": connect_tcp(**CONNECT)}, r"must be Transport \| None, got a .*_GeneratorContextManager"),
        (made, {"codec": "fp5"}, "There is no codec 'fp5'; did you mean 'fp4'"),
        (made, {"mean_codec": "sign"}, "'sign' leaves out much of what it encodes, and means have no error feedback"),
        (made, {"codec": "sign"}, "leaves out the magnitudes.*error_feedback is False. Use error_feedback=1.0"),
        (made, {"max_norm": 0}, "max_norm must be a finite number above 0, got 0"),
        (made, {"fragments": [3]}, r"fragments must be Sequence\[FragmentLayout\] \| None, got \[3\]"),
        (made, {"inner_optimizer": [inner(), None]}, "inner_optimizer must be"),
        (made, {"inner_optimizer": inner()}, "does not hold first, second, third of this model"),
        (made, {"on_event": []}, r"on_event must be Callable\[\[Event\], None\] \| None, got \[\]"),
        (made, {"error_feedback": 1.5}, "error_feedback must be a number from 0 to 1, got 1.5"),
        (made, {"weight": NAN}, r"weight must be a number from 1e-18 to 1e\+18"),
        (made, {"schedule": SyncSchedule(inner_steps=5, overlap_steps=5), "merge": AlphaMerge(0.5)}, "round late.*0.5"),
        (made, BALANCED, "There are 3 fragments, but the schedule has num_fragments=1"),
        (made, {"fragments": partition(torch.nn.Linear(2, 2))}, "names .weight. of shape"),
        (tcp, {"replica": 5, "num_replicas": 2}, "replica with num_replicas=2 must be .* from 0 to 1, got 5"),
        (tcp, {"rendezvous": "localhost"}, "the rendezvous must be HOST:PORT.*got 'localhost'"),
        (tcp, {"ranks": "shard"}, "ranks='shard' is unknown; did you mean 'sharded'"),
        (tcp, {"on_failure": "contine"}, "on_failure='contine' is unknown; did you mean 'continue'"),
        (tcp, {"round_timeout": 3}, "There is no argument 'round_timeout'; did you mean 'round_timeout_s'"),
        (tcp, {"round_timeout_s": "60"}, "round_timeout_s must be a finite number above 0, got '60'"),
        (tcp, {"facts": ["codec"]}, "facts must be a mapping of names to texts"),
        (tcp, {"facts": {"data": "x" * 4097}}, "The fact 'data' has 4097 characters, and at most 4096.*Give a digest"),
        (tcp, {"facts": {"y" * 5000: ""}}, "The fact 'yyy.* has 5000 characters"),
        (
            tcp,
            {"facts": {f"file {n}": "x" * 4000 for n in range(4)}},
            "There are 4 facts of 16.* at most .* 13312 bytes",
        ),
        (tcp, {"facts": dict.fromkeys(map(str, range(257)), "")}, "There are 257 facts .* at most 256 "),
    ],
)
def test_what_can_not_work_is_refused(call: Callable[..., Any], arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        call(**arguments)


def test_an_inner_step_is_trained_from_none_to_all_of_it() -> None:
    replica = made()
    for trained in (-0.1, 1.5, NAN):
        with pytest.raises(ConfigurationError, match="trained must be a number from 0 to 1, got"):
            replica.step(trained)
    assert (replica.steps, replica.fragments[0].trained) == (0, 0.0)


@pytest.mark.parametrize("state", [{}, None, Vectors().state_dict()])
def test_what_is_no_state_is_not_loaded(state: Any) -> None:
    with pytest.raises(CheckpointError, match="This is not a state of DiLoCo"):
        made().load_state_dict(state)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("steps"),
        lambda state: state.update(about=None),
        lambda state: state["fragments"].pop(),
        lambda state: state.update(steps=20),
        lambda state: state["fragments"][2]["global_params"].fill_(float("nan")),
        lambda state: state["fragments"][2].update(slots=None),
        lambda state: state["fragments"][2].pop("void"),
        lambda state: state["fragments"][2].update(residual=state["fragments"][2]["residual"][None]),
        lambda state: state["fragments"][0].update(candidate=state["fragments"][0]["candidate"].double()),
        lambda state: state["fragments"][0]["in_flight"].pop("digest"),
        lambda state: state["fragments"][0]["in_flight"].update(payload=torch.zeros(8)),
        lambda state: state["fragments"][0]["in_flight"].update(sent=None),
    ],
)
def test_a_state_that_lacks_something_or_has_something_else_is_refused_before_anything_is_loaded(
    change: Callable[[dict[str, Any]], Any],
) -> None:
    other, swarm = (streaming(1, error_feedback=True, codec="int8") for _ in range(2))
    other.run(4, quadratic())
    state = other.replicas[0].state_dict()
    change(state)
    replica = swarm.replicas[0]
    before = copy.deepcopy(replica.state_dict())
    with pytest.raises((CheckpointError, FragmentError, CodecError)):
        replica.load_state_dict(state)
    assert same(replica.state_dict(), before)


@pytest.mark.parametrize(
    "act",
    [
        lambda replica: replica.change_transport(InProcessTransport(2).endpoint(0)),
        lambda replica: replica.load_state_dict(replica.state_dict()),
        lambda replica: replica.take_over([1]),
    ],
)
def test_what_needs_every_round_merged_is_refused_with_one_in_flight(act: Callable[[DiLoCo], object]) -> None:
    swarm = streaming(2, error_feedback=True)
    swarm.run(4, quadratic())
    first = swarm.replicas[0]
    before, transport = first.digest(), first.transport
    with pytest.raises(ConfigurationError, match="fragment 0, outer step 0 is in flight"):
        act(first)
    assert (first.digest(), first.transport) == (before, transport)
    for replica in swarm.replicas:
        replica.drain()
    act(first)


def test_a_transport_whose_replicas_have_other_arguments_is_not_taken() -> None:
    others = InProcessTransport(2)
    made(transport=others.endpoint(1), codec="int8")
    replica = made(schedule=SyncSchedule(inner_steps=1))
    with pytest.raises(ConfigurationError, match=r"schedule = H 1, .* schedule = H 100"):
        replica.change_transport(others.endpoint(0))
    replica.step()
    assert replica.rounds_committed == 1


@pytest.mark.parametrize("num_blocks", [2, 31, 40])
def test_what_replicas_compare_fits_into_a_message_whatever_the_names_of_parameters(num_blocks: int) -> None:
    """Else a replica that joins would wait for an answer until its time is over."""
    block = torch.nn.ModuleDict({f"{part}_{'x' * 250}": torch.nn.Linear(1, 1) for part in "abc"})
    blocks = torch.nn.ModuleList(copy.deepcopy(block) for _ in range(num_blocks))
    inner, schedule = (
        torch.optim.SGD(blocks.parameters(), lr=0.1),
        SyncSchedule(inner_steps=500, num_fragments=num_blocks),
    )
    with connect_tcp(**CONNECT) as transport:
        DiLoCo(blocks, inner, schedule=schedule, transport=transport).step()
