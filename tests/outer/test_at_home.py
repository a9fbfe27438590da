"""What stays at home: each replica trains its own, no message carries it, and everything else goes on as without it."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco import DiLoCo, FragmentLayout, InProcessTransport, Sgd, SyncSchedule, partition
from diloco.algorithm import Contribution
from diloco.errors import CheckpointError, ConfigurationError
from diloco.events import RoundVoid
from diloco.transport import Pending
from tests.outer.test_buffers import SCHEDULE, H, Odd, gradient
from tests.replicas import STREAMING, Swarm, Vectors, agree, quadratic
from tests.same import raw, same


class WithoutSecond(nn.Module):
    """`Vectors` without its second parameter, whose gradients don't depend on the others'."""

    def __init__(self) -> None:
        super().__init__()
        whole = Vectors()
        self.first, self.third = whole.first, whole.third


def by_name(replica: int, step: int, model: nn.Module) -> None:
    """Set gradients of a parameter that depend on its name, its values, the replica and the step only."""
    for name, parameter in model.named_parameters():
        target = len(name) * (1 + replica) + step / 8
        parameter.grad = parameter.detach() - target


def test_it_is_trained_as_by_each_replica_alone_and_the_others_as_if_it_were_not_there() -> None:
    schedule = SyncSchedule(inner_steps=4, num_fragments=2, overlap_steps=1)
    at_home: dict[str, Any] = {"at_home": ["second"]}
    cut: dict[str, Any] = {"num_fragments": 2, "strategy": "balanced"}
    given: dict[str, Any] = {"codec": "fp4", "outer": Sgd(learning_rate=0.5)}
    swarm = Swarm(2, schedule, fragments=partition(Vectors(), **cut, **at_home), **at_home, **given)
    fragments = partition(WithoutSecond(), **cut)
    others = Swarm(2, schedule, make_model=WithoutSecond, fragments=fragments, **given)
    alone = [Vectors() for _ in range(2)]
    for number, model in enumerate(alone):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(11):
            by_name(number, step, model)
            optimizer.step()
    for each in (swarm, others):
        each.run(11, by_name)
    for number in range(2):
        mine, theirs = dict(swarm.models[number].named_parameters()), dict(others.models[number].named_parameters())
        assert raw(mine["second"].detach()) == raw(dict(alone[number].named_parameters())["second"].detach())
        assert all(raw(mine[name].detach()) == raw(each.detach()) for name, each in theirs.items())
        assert same(swarm.replicas[number].named_global_params(), others.replicas[number].named_global_params())
    assert swarm.replicas[0].digest() == swarm.replicas[1].digest() == others.replicas[0].digest()
    assert swarm.replicas[0].rounds_committed > 2


def watched(transport: InProcessTransport, sent: list[Contribution]) -> None:
    for number in range(2):
        endpoint: Any = transport.endpoint(number)
        average = endpoint.average

        def seen(contribution: Contribution, average: Any = average) -> Pending:
            sent.append(contribution)
            answer: Pending = average(contribution)
            return answer

        endpoint.average = seen


@pytest.mark.parametrize("overlap_steps", [0, 1])
def test_no_contribution_or_published_state_has_a_byte_of_it(overlap_steps: int) -> None:
    """Parameters and buffers, where the changes of all others are found."""
    transport, sent = InProcessTransport(2), list[Contribution]()
    watched(transport, sent)
    schedule = SyncSchedule(inner_steps=H, num_fragments=1, overlap_steps=overlap_steps)
    swarm = Swarm(2, schedule, make_model=Odd, at_home=["norm", "holder", "second.bias"], transport=transport)
    kept = ("norm.weight", "norm.bias", "second.bias", "norm.running_mean", "norm.running_var")
    values = list[dict[str, Tensor]]()  # after each step of both
    for _ in range(2 * H + 1):
        swarm.run(1, gradient)
        values += [copy.deepcopy({**dict(m.named_parameters()), **dict(m.named_buffers())}) for m in swarm.models]
    begin = dict(Odd().named_parameters())
    published = [
        raw(each) for d in swarm.replicas for f in d.fragments for each in tensors(d.recovery.snapshot(f.index))
    ]
    messages = b"".join([raw(t) for c in sent for t in (c.payload, c.buffers, c.integers) if t is not None] + published)
    assert len(sent) == 4
    for now in values:
        for name in kept:
            assert raw(now[name].detach()[:2]) not in messages, name
        assert raw((begin["second.bias"] - now["second.bias"]).detach()) not in messages
    for number in range(2):
        change = begin["second.weight"] - values[2 * (H - 1) + number]["second.weight"]
        assert not overlap_steps or raw(change.detach()) in messages, "what is not at home is found"
    assert agree(swarm)


def tensors(state: Any) -> list[Tensor]:
    parts = state.values() if isinstance(state, dict) else [state]
    return [
        each
        for part in parts
        for each in (tensors(part) if isinstance(part, dict) else [part])
        if torch.is_tensor(each)
    ]


def test_buffers_at_home_stay_as_the_replica_has_them_in_its_global_model_as_well() -> None:
    """Local normalisation: the statistics of a site go with its own weights."""
    at_home = ["norm", "holder"]
    fragments = partition(Odd(), num_fragments=2, strategy="balanced", at_home=at_home)
    swarm = Swarm(2, SCHEDULE, make_model=Odd, fragments=fragments, at_home=at_home)
    swarm.run(3 * H, gradient)
    means = [model.get_buffer("norm.running_mean").clone() for model in swarm.models]
    assert not torch.equal(*means)
    for diloco, mean in zip(swarm.replicas, means, strict=True):
        diloco.drain()
        with diloco.global_model() as model:
            assert torch.equal(model.get_buffer("norm.running_mean"), mean)
            assert torch.equal(model.get_parameter("norm.weight"), diloco.model.get_parameter("norm.weight"))
            assert torch.equal(model.get_buffer("scale"), swarm.replicas[0].global_values()["scale"])
        assert torch.equal(diloco.model.get_buffer("norm.running_mean"), mean)
    assert swarm.replicas[0].digest() == swarm.replicas[1].digest()


@pytest.mark.parametrize("steps", [3, 6, 9])
def test_stopped_and_resumed_in_flight_it_is_as_if_it_had_never_stopped(steps: int) -> None:
    at_home: dict[str, Any] = {"fragments": None, "at_home": ["second", "first"]}
    schedule = SyncSchedule(inner_steps=4, overlap_steps=2)
    swarm, whole, resumed = (Swarm(2, schedule, codec="fp4", **at_home) for _ in range(3))
    whole.run(17, quadratic())
    swarm.run(steps, quadratic())
    resumed.resume_from(swarm)
    resumed.run(17 - steps, quadratic())
    assert all(torch.equal(whole.local(number), resumed.local(number)) for number in range(2))
    assert whole.replicas[0].digest() == resumed.replicas[0].digest()


def kept(at_home: Sequence[str]) -> Swarm:
    return Swarm(2, SyncSchedule(inner_steps=4), at_home=at_home)


def test_a_state_in_which_others_stay_at_home_is_refused_by_name() -> None:
    for there, here in ((["second"], []), ([], ["second"]), (["second"], ["first"])):
        saved, other = (kept(names) for names in (there, here))
        with pytest.raises(CheckpointError, match=r"at home = (first|second|none) and this run has at home = "):
            other.replicas[0].load_state_dict(saved.replicas[0].state_dict())


def made(transport: InProcessTransport, number: int, at_home: Sequence[str], changed: str = "") -> DiLoCo:
    model = Vectors()
    if changed:
        with torch.no_grad():
            model.get_parameter(changed).add_(number)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = SyncSchedule(inner_steps=4)
    return DiLoCo(model, inner, transport=transport.endpoint(number), schedule=schedule, at_home=at_home)


@pytest.mark.parametrize("other", ["first", ""])
def test_replicas_that_keep_other_parameters_at_home_are_refused_by_name(other: str) -> None:
    transport = InProcessTransport(2)
    made(transport, 0, ["second"])
    words = rf"has at home = second and replica 1 .*has at home = {other or 'none'}"
    with pytest.raises(ConfigurationError, match=words):
        made(transport, 1, [other] if other else [])


def test_heads_may_begin_apart_where_all_else_must_begin_alike() -> None:
    transport = InProcessTransport(2)
    for number in range(2):
        made(transport, number, ["second"], changed="second")
    transport = InProcessTransport(2)
    made(transport, 0, ["second"])
    with pytest.raises(ConfigurationError, match="first weights"):
        made(transport, 1, ["second"], changed="first")


def test_a_joiner_adopts_what_all_agree_on_and_keeps_its_own_head() -> None:
    swarm = Swarm(3, STREAMING, at_home=["third"], fragments=None, make_model=Deep)
    swarm.run(9, quadratic())
    for diloco in swarm.replicas:
        diloco.drain()
    late = swarm.replicas[2]
    head = late.model.get_parameter("third").detach().clone()
    with torch.no_grad():
        for fragment in late.fragments:
            fragment.state.values.add_(1.0)
    late.take_over([0])
    assert torch.equal(late.model.get_parameter("third"), head)
    assert agree(swarm)


def test_a_diverged_replica_is_brought_back_and_keeps_its_own_head() -> None:
    swarm = Swarm(3, STREAMING, at_home=["third"], fragments=None, make_model=Deep)
    swarm.run(9, quadratic())
    with torch.no_grad():
        swarm.replicas[2].fragments[0].state.values.add_(1.0)
    swarm.run(12, quadratic())
    assert [event for event in swarm.events if isinstance(event, RoundVoid)]
    other = Swarm(3, STREAMING, at_home=["third"], fragments=None, make_model=Deep)
    other.run(21, quadratic())
    assert agree(swarm)
    for mine, undisturbed in zip(swarm.models, other.models, strict=True):
        assert torch.equal(mine.get_parameter("third"), undisturbed.get_parameter("third"))


class Deep(nn.Module):
    """Two layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)])
        self.first, self.third = Vectors().first, Vectors().third
        for number, layer in enumerate(self.layers):
            layer.weight = nn.Parameter(torch.arange(9.0).view(3, 3) / 8 + number)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.lm_head = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False)
        self.lm_head.weight = self.embedding.weight


def frozen(model: nn.Module) -> nn.Module:
    model.get_parameter("first").requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("model", "at_home", "words"),
    [
        (Vectors(), ["lm_head"], "'lm_head' can't stay at home, because it is no part of .* use one of: first, second"),
        (Vectors(), ["secnd"], "did you mean 'second'?"),
        (Vectors(), ["sec"], "did you mean 'second'?"),
        (Vectors(), ["second", "fourth"], "'fourth' can't stay at home"),
        (Vectors(), [""], "'' can't stay at home"),
        (frozen(Vectors()), ["first"], "'first' can't stay at home, because it is no part of the name of a trained"),
        (Vectors(), ["first", "second", "third"], "first, second, third at home leaves nothing to synchronise"),
        (Tied(), ["embedding", "lm_head", "body"], "embedding, lm_head, body at home leaves nothing to synchronise"),
        (Tied(), ["lm_head"], r"lm_head.weight can't stay at home without embedding.weight, because the two are tied"),
        (Tied(), ["embedding"], r"embedding.weight can't stay at home without lm_head.weight"),
        (Odd(), ["norm.running_mean"], r"norm.running_mean can't stay at home without holder.shared"),
        (Vectors(), ["a", 3, None, 1.5], r"at_home must be Sequence.str., got \['a', 3, None, \.\.\.\]"),
        (Vectors(), 3, "at_home must be Sequence.str., got 3"),
    ],
)
def test_what_can_not_stay_at_home_is_refused_by_name(model: nn.Module, at_home: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), at_home=at_home)


def test_tied_weights_stay_at_home_under_all_their_names() -> None:
    model = Tied()
    diloco = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), at_home=["lm_head", "embedding"])
    assert diloco.at_home == ("embedding.weight",)
    assert {*diloco.named_global_params()} == {"body.weight", "body.bias"}


@pytest.mark.parametrize(
    ("part", "names"), [("1", "1.weight 1.bias"), ("0.weight", "0.weight"), ("bias", "0.bias 1.bias")]
)
def test_a_part_of_a_name_is_whole_words_between_dots(part: str, names: str) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 11), nn.Linear(11, 1, bias=False))
    wrapped = nn.DataParallel(model)  # names stay those of the plain model
    for each in (model, wrapped):
        diloco = DiLoCo(each, torch.optim.SGD(each.parameters(), lr=0.1), at_home=part)
        assert diloco.at_home == tuple(names.split())
        kept = {name for layout in partition(each, at_home=[part]) for name in layout.names}
        assert kept == {*diloco.named_global_params()} == {n for n, _ in model.named_parameters()} - {*names.split()}


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((("first",), ("second", "third")), "'second' is in fragment 1 and stays at home"),
        ((("first",),), "No fragment holds third, .* name them in at_home"),
    ],
)
def test_fragments_of_your_own_hold_each_parameter_once_or_it_is_at_home(
    names: Sequence[tuple[str, ...]], words: str
) -> None:
    """Invariant 4."""
    model = Vectors()
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    layouts = [FragmentLayout(p, of, tuple(shapes[name] for name in of)) for p, of in enumerate(names)]
    schedule = SyncSchedule(inner_steps=4, num_fragments=len(layouts))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=words):
        DiLoCo(model, inner, fragments=layouts, schedule=schedule, at_home=["second"])
    whole = [FragmentLayout(0, ("first", "third"), (shapes["first"], shapes["third"]))]
    DiLoCo(model, inner, fragments=whole, at_home=["second"])


def test_isotropic_means_need_a_hidden_matrix_that_is_sent() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    DiLoCo(model, inner, isotropic=True, at_home=["1"])
    with pytest.raises(ConfigurationError, match="what is sent of this model has none"):
        DiLoCo(model, inner, isotropic=True, at_home=["weight"])


def test_one_that_is_frozen_later_is_still_known_and_one_that_is_replaced_is_found() -> None:
    model = Vectors()
    diloco = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), at_home=["second"])
    model.second.requires_grad_(False)
    diloco.check_model()
    model.second = nn.Parameter(torch.zeros(2, 3))
    with pytest.raises(ConfigurationError, match=r"parameter second \(2, 3\) is gone or new"):
        diloco.check_model()
