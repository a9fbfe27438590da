"""Optimizers that keep values of the parameters: a merge moves these too, so that they don't pull it back."""

import random
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from diloco import DiLoCo, InProcessTransport, Sgd, SyncSchedule
from diloco.algorithm import AlphaMerge, RebaseMerge
from diloco.devices import uncompiled
from diloco.events import Event, Note
from diloco.outer import Copies


class ScheduleFree(Optimizer):
    """Schedule-free SGD (Defazio et al.): the parameters are y, between the state z and the mean x."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "train_mode": False, "k": 0})

    def train(self) -> None:
        self.param_groups[0]["train_mode"] = True

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # without a closure
        (group,) = self.param_groups
        assert group["train_mode"], "as the library requires"
        group["k"] += 1
        for y in group["params"]:
            z = self.state[y].setdefault("z", y.detach().clone())
            y.lerp_(z, 1 / group["k"]).add_(y.grad, alpha=group["lr"] * (0.9 * (1 - 1 / group["k"]) - 1))
            z.sub_(y.grad, alpha=group["lr"])


class Lookahead:
    """Slow weights, made when it is constructed, around another optimizer, and no `torch.optim.Optimizer`."""

    def __init__(self, optimizer: Optimizer, k: int = 2) -> None:
        self.optimizer, self.k, self.count = optimizer, k, 0
        self.state = {p: {"slow": p.detach().clone()} for g in optimizer.param_groups for p in g["params"]}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        self.count += 1
        if self.count % self.k == 0:
            for parameter, state in self.state.items():
                state["slow"].lerp_(parameter, 0.5)
                parameter.copy_(state["slow"])


class Master(SGD):
    """float32 copies in a list, of which the parameters are rounded."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr)
        self.masters = [p.detach().float().clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns nothing
        for parameter, master in zip(self.param_groups[0]["params"], self.masters, strict=True):
            master.sub_(parameter.grad.float(), alpha=self.param_groups[0]["lr"])
            parameter.copy_(master)


class Anchored(SGD):
    """Keeps where it began, in an object of its own, and goes back to it a bit in each step."""

    class Kept:
        def __init__(self) -> None:
            self.origins: dict[str, Tensor] = {}

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr)
        self.kept = Anchored.Kept()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns nothing
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            origin = self.kept.origins.setdefault(str(number), parameter.detach().clone())
            parameter.lerp_(origin, 0.1).sub_(parameter.grad, alpha=self.param_groups[0]["lr"])


class Sharp(SGD):
    """SAM, whose parameters have the memory of its copies after a step."""

    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]  # returns nothing
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["old_p"] = parameter.data.clone()
            parameter.data.add_(parameter.grad, alpha=0.01)
        closure()
        for parameter in self.param_groups[0]["params"]:
            parameter.data = self.state[parameter]["old_p"]
        super().step()


KEEPING: dict[str, Callable[[Any], Any]] = {
    "schedule-free": ScheduleFree,
    "lookahead": lambda parameters: Lookahead(AdamW(parameters, lr=0.05, weight_decay=0)),
    "masters": Master,
    "anchored": Anchored,
    "sam": partial(Sharp, lr=0.1),
}
PLAIN: dict[str, Callable[[Any], Any]] = {
    "torch's": partial(AdamW, lr=0.05),
    "a subclass": type("Mine", (Adam,), {}),
    "much decay": type("Decays", (SGD,), {"__init__": lambda s, p: SGD.__init__(s, p, 0.1, 0.9, weight_decay=1.0)}),
}


def replicas(make: Callable[[Any], Any], dtype: torch.dtype = torch.float32, **more: Any) -> list[tuple[Any, ...]]:
    """Return a model, its optimizer and its `DiLoCo` for each of two replicas."""
    hub, made = InProcessTransport(2), []
    for m in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(dtype)
        nn.init.zeros_(model[1].weight)  # a parameter that equals fresh moments
        optimizer = make(model.parameters())
        given = {"schedule": SyncSchedule(inner_steps=6), "outer_optimizer": Sgd(learning_rate=1.0), **more}
        made.append((model, optimizer, DiLoCo(model, optimizer, transport=hub.endpoint(m), **given)))
    return made


def train(made: list[tuple[Any, ...]], steps: int) -> float:
    """Train, each replica on a task of its own, and return the loss of the global parameters on both tasks."""
    inputs = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        for m, (model, optimizer, diloco) in enumerate(made):
            if hasattr(optimizer, "train"):
                optimizer.train()

            def loss(model: nn.Module = model, m: int = m, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                x = inputs[m::2].to(next(model.parameters()).dtype)
                value = (model(x) - (1 + m) * x).pow(2).mean()
                value.backward()
                return value

            loss()
            optimizer.step(*([loss] if isinstance(optimizer, Sharp) else []))
            diloco.begin()
        for *_, diloco in made:
            diloco.finish()
    with made[0][2].global_model() as model, torch.no_grad():
        wanted = torch.arange(64).remainder(2)[:, None] + 1
        return float((model(inputs.to(next(model.parameters()).dtype)) - wanted * inputs).pow(2).mean())


def still(made: list[tuple[Any, ...]], steps: int) -> None:
    """Take steps with gradients of zero, which leave the parameters of an optimizer without copies where they are."""
    for _ in range(steps):
        for model, optimizer, _ in made:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step(*([lambda: None] if isinstance(optimizer, Sharp) else []))


def distances(made: list[tuple[Any, ...]]) -> tuple[float, float]:
    """Return the largest distance of the replicas from each other, and of the first from the global parameters."""
    one, other = ([p.detach() for p in model.parameters()] for model, *_ in made)
    agreed = made[0][2].named_global_params().values()
    return tuple(float(max((a - b).abs().max() for a, b in zip(one, each, strict=True))) for each in (other, agreed))  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["schedule-free", "masters", "sam"])
def test_after_a_merge_the_optimizer_leaves_the_parameters_where_it_put_them(name: str) -> None:
    made = replicas(KEEPING[name])
    train(made, 6)
    assert distances(made) == (0, 0)
    if name == "schedule-free":
        apart = [optimizer.state[model[0].weight]["z"] - model[0].weight for model, optimizer, _ in made]
        assert not torch.equal(*apart)  # what it has averaged is its own
        return
    still(made, 4)
    assert max(distances(made)) < 1e-6


@pytest.mark.parametrize("merge", [AlphaMerge(), RebaseMerge()])
@pytest.mark.parametrize("name", KEEPING)
def test_a_merge_changes_nothing_of_what_the_optimizer_does(name: str, merge: Any) -> None:
    """Translated, it goes on as before: the steps after a merge are those without one, up to rounding."""
    inner = {"schedule": SyncSchedule(inner_steps=6, overlap_steps=0), "merge": merge}
    merged, free = replicas(KEEPING[name], **inner), replicas(KEEPING[name], **inner)
    generator = torch.Generator().manual_seed(3)
    gradients = [[torch.randn(p.shape, generator=generator) for p in merged[0][0].parameters()] for _ in range(20)]

    def steps(of: list[tuple[Any, ...]], number: int, *, synchronise: bool) -> Tensor:
        where = []
        for step in range(number):
            for m, (model, optimizer, diloco) in enumerate(of):
                for parameter, gradient in zip(model.parameters(), gradients[step], strict=True):
                    parameter.grad = gradient * (1 - 3 * m)
                if hasattr(optimizer, "train"):
                    optimizer.train()
                optimizer.step(*([lambda: None] if isinstance(optimizer, Sharp) else []))
                where.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
                if synchronise:
                    diloco.begin()
            for *_, diloco in of if synchronise else ():
                diloco.finish()
        return torch.stack(where).view(number, 2, -1)

    one, other = steps(merged, 11, synchronise=True), steps(free, 11, synchronise=False)
    moved = one[6:] - other[6:]  # by the merge after step 6, and by nothing else
    assert float((moved - moved[:1]).abs().max()) < 1e-4
    assert float(moved.abs().max()) > 0.1


@pytest.mark.parametrize("name", KEEPING)
def test_one_replica_whose_outer_step_takes_the_mean_is_plain_training(name: str) -> None:
    """Invariant 12, which setting the copies to the new parameters would break."""
    found = []
    for inner_steps in (4, 100):
        torch.manual_seed(0)
        model = nn.Linear(6, 6)
        optimizer = KEEPING[name](model.parameters())
        outer, schedule = Sgd(learning_rate=1.0), SyncSchedule(inner_steps=inner_steps)
        diloco = DiLoCo(model, optimizer, schedule=schedule, outer_optimizer=outer)
        train([(model, optimizer, diloco)], 12)
        found.append(model.weight.detach().clone())
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", sorted(KEEPING.keys() - {"anchored"}))
def test_replicas_stay_together_and_learn(name: str) -> None:
    made = replicas(KEEPING[name])
    first = train(made, 0)
    last = train(made, 96)
    assert last < 0.5 * first
    assert distances(made)[0] < 1e-5  # right after a merge


def test_copies_in_float32_of_bfloat16_parameters_move() -> None:
    made = replicas(Master, torch.bfloat16)
    train(made, 6)
    for model, optimizer, diloco in made:
        agreed = diloco.named_global_params()["0.weight"]
        assert float((optimizer.masters[0] - agreed).abs().max()) < 0.02
        assert float((optimizer.masters[0] - model[0].weight.detach()).abs().max()) < 0.004


@pytest.mark.parametrize("name", PLAIN)
def test_moments_are_never_taken_for_copies(name: str) -> None:
    """Also if they equal the parameters, as those of parameters that begin at zero, or after many steps."""
    for steps in (0, 9):
        made = replicas(PLAIN[name])
        train(made, steps)
        model, optimizer, _ = made[0]
        for parameter in model.parameters():
            for slot, value in optimizer.state.get(parameter, {}).items():
                if value is not None and value.shape == parameter.shape:
                    optimizer.state[parameter][slot] = parameter.detach().clone()
        assert all(Copies([optimizer]).of(parameter) == [] for parameter in model.parameters())


class Draws(SGD):
    """Draws from all generators of the process, as optimizers with noise or stochastic rounding may."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns nothing
        super().step()
        random.random(), np.random.rand(), torch.rand(1)


def drawn_state() -> tuple[Any, ...]:
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


@pytest.mark.parametrize("scheduled", [False, True])
def test_the_trial_leaves_the_optimizer_alone(scheduled: bool) -> None:
    """Also one whose step a scheduler of torch has replaced, with a closure on the real optimizer."""
    model = nn.Linear(4, 4)
    base = Draws(model.parameters(), lr=1.0, momentum=0.9)
    if scheduled:
        torch.optim.lr_scheduler.StepLR(base, 2)
    optimizer = Lookahead(base)
    calls: list[int] = []
    base.register_step_post_hook(lambda *_: calls.append(1))
    before, generators = [p.detach().clone() for p in model.parameters()], drawn_state()
    slow = {p: id(state["slow"]) for p, state in optimizer.state.items()}
    DiLoCo(model, optimizer)  # type: ignore[arg-type]  # has groups of parameters, which is enough
    assert all(map(torch.equal, before, model.parameters()))
    assert drawn_state() == generators
    assert slow == {p: id(state["slow"]) for p, state in optimizer.state.items()}
    assert (calls, optimizer.count, dict(base.state)) == ([], 0, {})
    assert base.param_groups[0]["lr"] == 1.0


def test_an_optimizer_of_a_gpu_is_tried_on_the_host_also_with_an_empty_parameter() -> None:
    """Torch's own checks refuse ``capturable`` there; a tensor without values is a copy of nothing."""
    model = nn.ParameterList([torch.ones(3), torch.ones(0)])
    assert Copies([type("Mine", (Adam,), {})(model, capturable=True)]).doubts == []
    copies = Copies([Biased(model, lr=0.1)])
    assert "keeps 'mean'" in copies.doubts[0]
    assert [copies.of(each) for each in model] == [[], []]


class Biased(SGD):
    """Keeps a mean of the parameters that begins at zero."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns nothing
        super().step()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["mean"] = torch.lerp(state.get("mean", torch.zeros_like(parameter)), parameter.detach(), 0.1)


class Fails(SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns nothing
        raise RuntimeError("needs the model")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Biased, r"Biased keeps 'mean', which depends on the parameters' values, so it isn't known"),
        (Fails, r"Fails could not be tried out \(RuntimeError: needs the model\), so it isn't known"),
    ],
)
def test_what_can_not_be_moved_or_tried_is_told(kind: type[Optimizer], words: str) -> None:
    model, events = nn.Linear(4, 4), list[Event]()
    DiLoCo(model, kind(model.parameters(), lr=0.1), on_event=events.append)  # type: ignore[call-arg]
    (note,) = (event for event in events if isinstance(event, Note))
    assert words.replace("\\", "") in note.text


def test_trials_in_several_threads_leave_the_process_as_it_was() -> None:
    """The stance of torch's compiler and the filters of warnings belong to the process; each trial restores them."""
    import torch._dynamo.eval_frame  # takes seconds

    before = torch._dynamo.eval_frame._stance, warnings.filters.copy()

    def try_out() -> None:
        for _ in range(5):
            Copies([ScheduleFree([nn.Parameter(torch.ones(3))])])

    threads = [threading.Thread(target=try_out) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (torch._dynamo.eval_frame._stance, warnings.filters) == before


def test_what_is_compiled_stays_so_after_two_blocks_without_the_compiler_overlap() -> None:
    import torch._dynamo.eval_frame  # takes seconds

    before = torch._dynamo.eval_frame._stance
    first, second = uncompiled(), uncompiled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    second.__exit__(None, None, None)
    assert torch._dynamo.eval_frame._stance == before
