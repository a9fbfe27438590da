"""Arguments of `DiLoCo` and of transports that can't work are refused at the call, with what would work."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from diloco import (
    Adam,
    AlphaMerge,
    Codec,
    ConfigurationError,
    DiLoCo,
    InProcessTransport,
    Nesterov,
    RebaseMerge,
    SendersMean,
    SyncSchedule,
    connect_peer,
    connect_replica,
    make_codec,
    partition,
    register,
)
from diloco.errors import CheckpointError, ContractError, TransportError
from tests.replicas import Vectors, quadratic, streaming


def made(**arguments: Any) -> DiLoCo:
    model = Vectors()
    given = {"model": model, "inner_optimizer": torch.optim.SGD(model.parameters(), lr=0.1)} | arguments
    return DiLoCo(given.pop("model"), given.pop("inner_optimizer"), **given)


def inner(kind: Any = torch.optim.SGD) -> Any:
    return kind(Vectors().parameters(), lr=0.1)


HUB = InProcessTransport(2)
CONNECT = {"replica": 0, "num_replicas": 1, "rendezvous": "127.0.0.1:0"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"outer_optimizer": inner()},
            "outer_optimizer must be an outer optimizer, such as Nesterov.*, got a torch.*SGD",
        ),
        ({"outer_optimizer": torch.optim.SGD}, "such as Nesterov.*got the class SGD"),
        ({"outer_optimizer": Nesterov}, r"got the class Nesterov\. Create one: Nesterov\(\.\.\.\)"),
        ({"outer_optimizer": "nesterov"}, r"such as Nesterov\(learning_rate=0.7\).*got 'nesterov'"),
        ({"outer_optimizer": 0.7}, "got 0.7"),
        (
            {"transport": connect_replica(**CONNECT)},
            "transport must be .*_GeneratorContextManager.*with connect_replica",
        ),
        (
            {"transport": HUB},
            r"got a .*InProcessTransport\. Pass one of its endpoints, such as transport.endpoint\(0\)",
        ),
        ({"transport": "tcp"}, "transport must be a connected diloco transport, got 'tcp'"),
        ({"codec": max}, "codec must be a codec or its name.*got the function max"),
        ({"codec": type(make_codec("int8"))}, r"got the class Int8\. Create one: Int8\(\.\.\.\)"),
        ({"codec": "fp5"}, "There is no codec 'fp5'; did you mean 'fp4'"),
        ({"codec": None}, "codec must be a codec or its name, such as 'fp4', got None"),
        ({"mean_codec": torch.float16}, "mean_codec must be .* or 'auto', got a torch.dtype"),
        ({"mean_codec": "in8"}, "did you mean 'int8'"),
        (
            {"codec": "topk2"},
            "codec='topk2' drops most of the values.*error_feedback is False. Use error_feedback=0.95",
        ),
        ({"codec": make_codec("topk2"), "error_feedback": 0}, "codec='topk2' drops"),
        ({"mean_codec": "topk2"}, "mean_codec='topk2' drops .*Use another codec"),
        ({"merge": "rebase"}, r"merge must be a merge rule, such as .*RebaseMerge\(\), got 'rebase'"),
        ({"merge": RebaseMerge}, r"Create one: RebaseMerge\(\.\.\.\)"),
        ({"merge": 0.5}, "got 0.5"),
        ({"schedule": 100}, r"schedule must be a schedule, such as SyncSchedule\(inner_steps=100\), got 100"),
        ({"schedule": SyncSchedule}, "got the class SyncSchedule. Create one"),
        ({"average": "senders"}, r"average must be an average rule, such as SendersMean\(\).*got 'senders'"),
        ({"average": SendersMean}, "Create one: SendersMean"),
        ({"max_norm": 0}, "max_norm must be a finite number above 0, got 0"),
        ({"max_norm": float("inf")}, "max_norm must be a finite number above 0, got inf"),
        ({"fragments": 3}, r"fragments must be the result of diloco.partition\(model, ...\), got 3"),
        ({"fragments": ["first"]}, "fragments must be"),
        ({"model": [Vectors()]}, "model must be a torch.nn.Module, got a builtins.list"),
        ({"model": Vectors}, "model must be a torch.nn.Module, got the class Vectors"),
        ({"inner_optimizer": torch.optim.AdamW}, "inner_optimizer must be a torch optimizer.*got the class AdamW\\.$"),
        ({"inner_optimizer": []}, "inner_optimizer must be"),
        ({"inner_optimizer": [inner(), None]}, "inner_optimizer must be"),
        ({"inner_optimizer": None}, "inner_optimizer must be .*got None"),
        ({"inner_optimizer": torch.optim.lr_scheduler.StepLR(inner(), 1)}, "inner_optimizer must be .*got a .*StepLR"),
        ({"on_event": []}, "on_event must be a function of one event, got a builtins.list"),
        ({"error_feedback": "yes"}, "error_feedback must be a number from 0 to 1, got 'yes'"),
        ({"error_feedback": 1.5}, "error_feedback must be a number from 0 to 1, got 1.5"),
        ({"error_feedback": torch.tensor(0.5)}, "must be a number from 0 to 1, got a torch.Tensor"),
        ({"telemetry": "no"}, "telemetry must be True or False, got 'no'"),
        ({"compare_arguments": 0}, "compare_arguments must be True or False, got 0"),
        ({"global_device": "gpu"}, "global_device='gpu' can't hold the global parameters.*Use 'cpu'"),
        ({"global_device": "meta"}, "global_device='meta' can't hold the global parameters"),
        ({"global_device": "cuda:99"}, "global_device='cuda:99' can't hold the global parameters"),
        ({"weight": -1.0}, "weight must be"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        made(**arguments)


class Duck:
    """An optimizer that does not inherit from torch's."""

    def __init__(self, model: nn.Module) -> None:
        self.param_groups = [{"params": list(model.parameters())}]


def test_what_has_the_methods_is_accepted() -> None:
    model = Vectors()
    for optimizer in (
        Duck(model),
        [Duck(model)],
        inner(lambda parameters, lr: torch.optim.SGD(model.parameters(), lr)),
    ):
        DiLoCo(model, optimizer, fragments=list(partition(model)), error_feedback=1, codec="topk2")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"replica": 5, "num_replicas": 2}, "replica must be from 0 to 1 with num_replicas=2, got 5"),
        ({"replica": 2, "num_replicas": 2}, "from 0 to 1 .*got 2"),
        ({"replica": -1, "num_replicas": 2}, "from 0 to 1 .*got -1"),
        ({"replica": True, "num_replicas": 2}, "replica must be a whole number, got True"),
        ({"replica": "0"}, "replica must be a whole number, got '0'"),
        ({"replica": 0.0}, "replica must be a whole number, got 0.0"),
        ({"num_replicas": 0}, "num_replicas must be a whole number of at least 1, got 0"),
        ({"num_replicas": True}, "num_replicas must be a whole number of at least 1, got True"),
        ({"num_replicas": None}, "num_replicas must be"),
        ({"rendezvous": "localhost"}, "the rendezvous must be HOST:PORT.*got 'localhost'"),
        ({"rendezvous": 29400}, "the rendezvous must be HOST:PORT.*got 29400"),
        ({"ranks": "shard"}, "ranks='shard' is unknown; did you mean 'sharded'"),
        ({"on_failure": "contine"}, "on_failure='contine' is unknown; did you mean 'continue'"),
        ({"round_timeout": 3}, "There is no argument 'round_timeout'; did you mean 'round_timeout_s'"),
        ({"round_timeout_s": "60"}, "round_timeout_s must be more than 0 s, got '60'"),
        ({"streams": -1}, "streams must be a whole number of at least 0, got -1"),
        ({"split": "maybe"}, "split='maybe' is unknown"),
        ({"facts": ["codec"]}, "facts must be a mapping of names to texts"),
        ({"facts": {"lr": 0.1}}, "facts must be a mapping of names to texts"),
    ],
)
def test_connecting_with_what_cannot_work_ends_at_once(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words), connect_replica(**(CONNECT | arguments)):
        pass


def test_a_replica_may_be_numbered_by_numpy() -> None:
    with connect_replica(**(CONNECT | {"replica": np.int64(0), "num_replicas": np.int64(1)})) as transport:
        made(transport=transport)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"replica": -1}, "replica must be a whole number of at least 0, got -1"),
        ({"replica": True}, "replica must be"),
        ({"replica": 1 << 31}, "replica must be at most 2147483647"),
        ({"num_replicas": 0}, "num_replicas must be a whole number of at least 1, got 0"),
        ({"secrets": "x"}, "There is no argument 'secrets'"),
    ],
)
def test_so_does_joining_a_swarm(arguments: dict[str, Any], words: str, tmp_path: Any) -> None:
    given: dict[str, Any] = {"run": "r", "num_replicas": 2, "identity": tmp_path / "key"} | arguments
    with pytest.raises(ConfigurationError, match=words), connect_peer(**given):
        pass


@pytest.mark.parametrize("replica", [2, -1, True, "0"])
def test_a_process_has_no_endpoint_of_a_replica_that_is_not_there(replica: Any) -> None:
    with pytest.raises(ConfigurationError, match="replica must be"):
        HUB.endpoint(replica)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: make_codec(4), "'fp4', got 4"),
        (lambda: make_codec(None), "'fp4', got None"),
        (lambda: register(int), "must be a subclass of Codec, got <class 'int'>"),
        (lambda: register(make_codec("int8")), "must be a subclass of Codec, got"),
        (lambda: Adam(betas=0.9), "outer betas must be two numbers, got 0.9"),
        (lambda: Adam(betas=("a", 0.9)), "outer betas must be two numbers from 0 to less than 1, got .'a', 0.9"),
        (lambda: SyncSchedule(inner_steps=4, offsets=3), "offsets must be 1 whole numbers.*got 3"),
        (lambda: partition("model"), "model must be a torch.nn.Module, got 'model'"),
        (lambda: InProcessTransport(2, round_timeout_s="60"), "round_timeout_s must be a number of seconds, got '60'"),
        (lambda: InProcessTransport(2, faults=["drop"]), r"each of faults must be a Fault\(...\), got 'drop'"),
        (lambda: InProcessTransport(2, network=5), "network must be a VirtualNetwork, got 5"),
        (lambda: InProcessTransport(True), "num_replicas must be a whole number of at least 1, got True"),
        (lambda: InProcessTransport(2, min_contributors=1.5), "min_contributors must be a whole number, got 1.5"),
    ],
)
def test_so_are_the_arguments_of_what_is_passed(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()


@pytest.mark.parametrize("patterns", [["first", "*"], "ab", 5, [5]])
def test_patterns_that_are_not_one_list_for_each_fragment_are_refused(patterns: Any) -> None:
    with pytest.raises(ConfigurationError, match="patterns must be a list of patterns for each fragment"):
        partition(Vectors(), strategy="patterns", patterns=patterns)


@pytest.mark.parametrize("state", [{}, None, Vectors().state_dict()])
def test_what_is_no_state_is_not_loaded(state: Any) -> None:
    with pytest.raises(CheckpointError, match="This is no state of DiLoCo"):
        made().load_state_dict(state)


class Halved(Codec):
    """Encodes half of each value, so that two halves are added instead of one value."""

    name = "halved"

    def payload_bytes(self, numel: int) -> int:
        return 4 * numel

    def _encode(self, values: Tensor, payload: Tensor) -> None:
        payload.copy_((values / 2).view(torch.uint8))

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        out.copy_(payload.clone().view(torch.float32) * 3)


class Growing:
    """An outer optimizer that counts in itself instead of in the state."""

    def __init__(self) -> None:
        self.count = 0.0

    def init(self, values: Tensor) -> Any:
        return Nesterov().init(values)

    def update(self, mean: Tensor, state: Any, values: Tensor) -> None:
        self.count += 1.0
        values.sub_(mean * self.count)
        state.step += 1


class NoMerge:
    keeps_sent = False

    def merge(self, local: Tensor, global_params: Tensor, sent: Tensor | None) -> None:
        local.fill_(float("nan"))


class Loose:
    elementwise = "yes"

    def combine(self, contributions: Any, tensors: Any) -> Tensor:
        return next(iter(contributions))[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"codec": Halved()}, "codec can't be used: codec Halved: .* values up to 3.4e\\+38"),
        ({"mean_codec": Halved()}, "mean_codec can't be used: codec Halved"),
        ({"outer_optimizer": Growing()}, "outer_optimizer can't be used: outer optimizer Growing: it continues diff"),
        ({"merge": NoMerge()}, "merge can't be used: merge rule NoMerge: .*not finite"),
        ({"average": Loose()}, "average can't be used: average Loose: elementwise is 'yes'"),
    ],
)
def test_code_of_ones_own_is_checked_in_a_loop_of_ones_own(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ContractError, match=words):
        made(**arguments)


@pytest.mark.parametrize(
    "act",
    [
        lambda swarm: swarm.replicas[0].change_transport(InProcessTransport(2).endpoint(0)),
        lambda swarm: swarm.replicas[0].load_state_dict(swarm.replicas[0].state_dict()),
        lambda swarm: swarm.replicas[0].take_over([1]),
        lambda swarm: swarm.replicas[0].begin_from_global(),
    ],
    ids=["change_transport", "load_state_dict", "take_over", "begin_from_global"],
)
def test_what_needs_every_round_merged_is_refused_with_one_in_flight(act: Callable[[Any], None]) -> None:
    swarm = streaming(2, error_feedback=True)
    while not swarm.replicas[0].in_flight:
        swarm.run(1, quadratic())
    (flying,) = swarm.replicas[0].in_flight
    before, transport = swarm.replicas[0].digest(), swarm.replicas[0].transport
    with pytest.raises(ConfigurationError, match=f"{re.escape(str(flying))} is in flight. Call drain"):
        act(swarm)
    assert (swarm.replicas[0].digest(), swarm.replicas[0].transport) == (before, transport)
    for replica in swarm.replicas:
        replica.drain()
    act(swarm)


@pytest.mark.parametrize("transport", [InProcessTransport(1), None])
def test_only_a_transport_can_follow_another(transport: Any) -> None:
    with pytest.raises(ConfigurationError, match="transport must be a connected diloco transport"):
        made().change_transport(transport)


def test_a_transport_whose_replicas_have_other_arguments_is_not_taken() -> None:
    others = InProcessTransport(2)
    made(transport=others.endpoint(1), codec="int8")
    replica = made(schedule=SyncSchedule(inner_steps=1))
    with pytest.raises(ConfigurationError, match=r"schedule = H 1, .* schedule = H 100"):
        replica.change_transport(others.endpoint(0))
    replica.step()
    assert replica.rounds_committed == 1


def test_after_a_closed_transport_the_loop_goes_on_over_another() -> None:
    with connect_replica(**CONNECT) as transport:
        replica = made(
            transport=transport,
            schedule=SyncSchedule(inner_steps=1),
            codec="fp4",
            error_feedback=True,
            merge=AlphaMerge(),
        )
        replica.step()
    with pytest.raises(TransportError, match=r"has closed its transport\. Its contribution to"):
        replica.step()
    replica.drain()
    replica.change_transport(InProcessTransport(1).endpoint(0))
    replica.step()
    assert replica.rounds_committed == 2


def test_the_facts_of_many_fragments_fit_into_the_message_to_register() -> None:
    """Regression: with 250 fragments no replica could register. Which parameters are in which still counts."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(260)))
    names = [name for name, _ in model.named_parameters()]

    def facts(patterns: list[list[str]]) -> dict[str, str]:
        fragments = partition(model, num_fragments=len(patterns), strategy="patterns", patterns=patterns)
        schedule = SyncSchedule(inner_steps=len(patterns), num_fragments=len(patterns))
        inner_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return made(model=model, inner_optimizer=inner_optimizer, fragments=fragments, schedule=schedule)._facts

    pairs = [[f"{number}.*"] for number in range(260)]
    whole = facts(pairs)
    assert sum(len(name) + len(text) for name, text in whole.items()) < 1 << 13
    assert len(whole) < 1 << 8
    assert whole != facts([*pairs[:-2], [names[-1], names[-3]], [names[-2], names[-4]]])
