"""Two other implementations of DiLoCo, torchft's and EXO gym's, from a checkout of their repositories.

``python -m benchmarks.real.peers --torchft CHECKOUT --exogym CHECKOUT`` writes ``tests/outer/peers.json``, with which
`tests/outer/test_peers.py` compares the package. `benchmarks.real` trains both side by side with the package.

Both import much that is not installed, so their packages get stand-ins for what DiLoCo does not need. Their replicas
are threads here, and what they send is added up at a barrier. Everything else is the code of the checkout.
"""

import argparse
import json
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Barrier, local
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.real.trying import Tries
from diloco import AlphaMerge, DiLoCo, FragmentLayout, InProcessTransport, Nesterov, SyncSchedule

Values = dict[str, Tensor]
Train = Callable[[nn.Module, torch.optim.Optimizer, int, int], None]
"""A function of (model, optimizer, replica, step from 0) that takes an inner step."""

NUM_REPLICAS = 2
FIXTURES = "test_fixtures/torchft.diloco_regression_test.DiLoCoMockedUpdateTest.test_diloco_mocked_updates_{}.json"
MOCKED = ((0, 0.0), (0, 0.5), (0, 1.0), (1, 0.0), (1, 0.5), (1, 1.0))
"""The fragment_sync_delay and fragment_update_alpha of torchft's six recorded runs."""
RECORDED = Path(__file__).parents[2] / "tests/outer/peers.json"
SHARED_MEMORY = "self.master_model.state_dict()[name].data.to(param.device)"
"""In EXO gym's DiLoCo. On a CPU `to` returns the same memory, so that the master follows rank 0's inner steps."""


class Gathering:
    """What the threads of all replicas exchange: each gives a tensor, and all get the sum or the first replica's."""

    def __init__(self) -> None:
        self._barrier, self._tensors, self._mine = Barrier(NUM_REPLICAS), [torch.empty(0)] * NUM_REPLICAS, local()

    def enter(self, replica: int) -> None:
        """Say which replica this thread is."""
        self._mine.replica = replica

    def all(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors that the replicas have given, in their order."""
        self._tensors[self._mine.replica] = tensor.clone()
        self._barrier.wait()
        tensors = list(self._tensors)
        self._barrier.wait()
        return tensors

    def in_threads(self, train: Callable[[int], Any]) -> list[Any]:
        """Return what ``train`` returns for each replica, each in a thread."""

        def one(replica: int) -> Any:
            self.enter(replica)
            try:
                return train(replica)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(NUM_REPLICAS) as pool:
            return list(pool.map(one, range(NUM_REPLICAS)))


def version(checkout: Path) -> str:
    """Return the commit of a checkout or bare repository, or "" if it is neither."""
    words = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else ""


def stand_in(name: str, folder: Path | None = None, **contents: Any) -> None:
    """Make ``import name`` return a module with these contents, or a package of a folder's files."""
    module = types.ModuleType(name)
    vars(module).update(contents)
    if folder is not None:
        module.__path__ = [str(folder)]
    sys.modules[name] = module


def values(model: nn.Module) -> Values:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def torchft(
    checkout: Path,
    models: Sequence[nn.Module],
    inner: Callable[[nn.Module], torch.optim.Optimizer],
    train: Train,
    *,
    steps: int,
    sync_every: int,
    fragments: int,
    delay: int,
    alpha: float,
    learning_rate: float,
) -> list[list[Values]]:
    """Train with torchft's DiLoCo, and return the local parameters of each replica after each step.

    Its fragments are the children of ``model.layers`` if there are several; its outer optimizer is SGD with Nesterov.
    """
    stand_in("torchft", checkout / "torchft")
    stand_in("torchft.manager", Manager=object)
    from torchft.local_sgd import DiLoCo as Torchft  # type: ignore[import-not-found]  # of the checkout

    gathering = Gathering()

    class Manager:
        """What torchft's DiLoCo asks of a manager, for replicas that all take part in every step."""

        _use_async_quorum = False

        def __init__(self) -> None:
            self.steps = 0

        def nothing(self, *_: Any) -> None:
            pass

        register_state_dict_fn = disallow_state_dict_read = allow_state_dict_read = start_quorum = nothing

        def current_step(self) -> int:
            return self.steps

        def should_commit(self) -> bool:
            self.steps += 1
            return True

        def allreduce(self, tensor: Tensor, should_quantize: bool = False) -> Any:
            class Work:
                done = False

                def wait(self) -> None:
                    if not self.done:
                        self.done = True
                        tensor.copy_(torch.stack(gathering.all(tensor)).mean(0))

            return Work()

    def one(replica: int) -> list[Values]:
        model, history = models[replica], []
        optimizer = inner(model)
        parts = list(model.get_submodule("layers").children()) if fragments > 1 else [model]
        outer = [torch.optim.SGD(p.parameters(), lr=learning_rate, momentum=0.9, nesterov=True) for p in parts]
        settings = {"sync_every": sync_every, "fragment_sync_delay": delay, "fragment_update_alpha": alpha}
        wrapped: AbstractContextManager[Any] = Torchft(Manager(), parts, optimizer, outer, **settings)
        with wrapped:
            for step in range(steps):
                train(model, optimizer, replica, step)
                history.append(values(model))
        return history

    return gathering.in_threads(one)


def exogym(
    checkout: Path, models: Sequence[nn.Module], train: Train, *, steps: int, sync_every: int, **inner: Any
) -> list[list[Values]]:
    """Train with EXO gym's `DiLoCoStrategy`, and return the local parameters of each replica after each step.

    Its outer optimizer is its default, and its inner one AdamW with the arguments ``inner``. Its master shares memory
    with rank 0's model on a CPU (`SHARED_MEMORY`), which is repaired here.

    Raises:
        LookupError: if the checkout has no such line.
    """
    gathering, sources = Gathering(), checkout / "exogym/strategy"

    def all_reduce(tensor: Tensor, op: Any = None) -> None:
        tensor.copy_(torch.stack(gathering.all(tensor)).sum(0))

    def broadcast(tensor: Tensor, src: int = 0) -> None:
        tensor.copy_(gathering.all(tensor)[src])

    stand_in("exogym", checkout / "exogym")
    stand_in("exogym.aux", checkout / "exogym/aux")
    stand_in("exogym.strategy", sources)
    stand_in("exogym.strategy.communicate", all_reduce=all_reduce, broadcast=broadcast)
    text = (sources / "diloco.py").read_text()
    if SHARED_MEMORY not in text:
        raise LookupError(f"{sources / 'diloco.py'} has no line {SHARED_MEMORY!r}. Use commit 9fa323c26364.")
    repaired = text.replace(SHARED_MEMORY, SHARED_MEMORY.replace(".data.to", ".data.clone().to"))
    strategies: dict[str, Any] = {"__name__": "exogym.strategy.diloco", "__package__": "exogym.strategy"}
    exec(compile(repaired, "diloco.py", "exec"), strategies)

    def one(replica: int) -> list[Values]:
        model, history = models[replica], []
        specification = strategies["OptimSpec"](torch.optim.AdamW, **inner)
        strategy = strategies["DiLoCoStrategy"](optim_spec=specification, H=sync_every)
        strategy._init_node(model, replica, NUM_REPLICAS)
        step_of_strategy = types.SimpleNamespace(step=strategy.step, zero_grad=strategy.zero_grad)
        for step in range(steps):
            train(model, step_of_strategy, replica, step)  # type: ignore[arg-type]  # its step also communicates
            history.append(values(model))
        return history

    return gathering.in_threads(one)


def ours(
    models: Sequence[nn.Module],
    inner: Callable[[nn.Module], torch.optim.Optimizer],
    train: Train,
    schedule: SyncSchedule,
    *,
    steps: int,
    learning_rate: float,
    alpha: float = 0.0,
    skipped: int = 0,
    by_layer: bool = False,
) -> list[list[Values]]:
    """Train with the package, and return the local parameters of each replica after each step.

    ``skipped`` steps pass without training before the first one, so that the first rounds come earlier.
    """
    transport, replicas = InProcessTransport(NUM_REPLICAS), []
    for number, model in enumerate(models):
        fragments = None
        if by_layer:
            children = model.get_submodule("layers").named_children()
            named = [{f"layers.{n}.{k}": v for k, v in child.named_parameters()} for n, child in children]
            shapes = [tuple(tuple(value.shape) for value in each.values()) for each in named]
            pairs = enumerate(zip(named, shapes, strict=True))
            fragments = [FragmentLayout(p, tuple(names), shape) for p, (names, shape) in pairs]
        optimizer = inner(model)
        diloco = DiLoCo(
            model,
            optimizer,
            transport=transport.endpoint(number),
            schedule=schedule,
            fragments=fragments,
            outer_optimizer=Nesterov(learning_rate=learning_rate, momentum=0.9),
            merge=AlphaMerge(alpha),
        )
        replicas.append((model, optimizer, diloco))
    for _ in range(skipped):
        for _, _, diloco in replicas:
            diloco.begin(0.0)
        for _, _, diloco in replicas:
            diloco.finish()
    history: list[list[Values]] = [[] for _ in replicas]
    for step in range(steps):
        for number, (model, optimizer, diloco) in enumerate(replicas):
            train(model, optimizer, number, step)
            diloco.begin()
        for _, _, diloco in replicas:
            diloco.finish()
        for number, (model, _, _) in enumerate(replicas):
            history[number].append(values(model))
    return history


def largest_difference(one: list[list[Values]], other: list[list[Values]]) -> float:
    """Return the largest difference of any parameter of any replica at any step."""
    differences = [
        (a[name] - b[name]).abs().max().item()
        for mine, theirs in zip(one, other, strict=True)
        for a, b in zip(mine, theirs, strict=True)
        for name in a
    ]
    return max(differences)


class TwoLayers(nn.Module):
    """A small network for the side-by-side runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 32), nn.Linear(32, 1)])

    def forward(self, inputs: Tensor) -> Tensor:
        first, second = self.layers
        output: Tensor = second(torch.tanh(first(inputs)))
        return output


def regression(model: nn.Module, optimizer: torch.optim.Optimizer, replica: int, step: int) -> None:
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(1000 * replica + step))
    optimizer.zero_grad()
    torch.autograd.backward(nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True).tanh()))
    optimizer.step()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def torchft_beside_ours(checkout: Path) -> str:
    """Train both with six settings of P, H, delay and alpha, and say how far any parameter was apart.

    Raises:
        AssertionError: if any was further apart than rounding explains.
    """
    worst = 0.0
    cases = [(1, 10, 0, 0.0, 0.7), (2, 10, 0, 0.0, 0.4), (2, 10, 2, 0.5, 0.4)]
    cases += [(1, 10, 3, 0.0, 0.7), (1, 10, 3, 0.5, 0.7), (2, 10, 4, 0.25, 0.4)]
    for fragments, every, delay, alpha, rate in cases:
        settings: dict[str, Any] = {"steps": 60, "alpha": alpha, "learning_rate": rate}
        sizes = {"sync_every": every, "fragments": fragments, "delay": delay}
        theirs = torchft(checkout, [TwoLayers(), TwoLayers()], adamw, regression, **sizes, **settings)
        schedule = SyncSchedule(inner_steps=every, num_fragments=fragments, overlap_steps=delay)
        skipped = every - every // fragments + delay
        models = [TwoLayers(), TwoLayers()]
        mine = ours(models, adamw, regression, schedule, skipped=skipped, by_layer=fragments > 1, **settings)
        worst = max(worst, largest_difference(mine, theirs))
    assert worst < 2e-6, f"local parameters differ by up to {worst:.1e}"
    return f"6 settings of P, delay and alpha, 60 steps: no parameter differs by more than {worst:.1e} at any step"


def exogym_beside_ours(checkout: Path) -> str:
    """Train both for 60 steps, and say how far any parameter was apart; raise AssertionError if too far."""
    theirs = exogym(checkout, [TwoLayers(), TwoLayers()], regression, steps=60, sync_every=10, lr=1e-2)
    schedule = SyncSchedule(inner_steps=10, offsets=(1,))
    mine = ours([TwoLayers(), TwoLayers()], adamw, regression, schedule, steps=60, learning_rate=0.7)
    worst = largest_difference(mine, theirs)
    assert worst < 2e-6, f"local parameters differ by up to {worst:.1e}"
    return f"60 steps, 5 rounds: no parameter differs by more than {worst:.1e} at any step"


class Vectors(nn.Module):
    """Two vectors, whose gradients need no product of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.tensor([1.0, -0.5, 0.25]))
        self.second = nn.Parameter(torch.tensor([[0.75], [-1.25]]))


def towards(targets: Tensor) -> Train:
    """Return a function that takes an inner step on ``|x - target|^2 / 2``.

    ``targets`` has a value for each replica, step and value of all parameters, in their order.
    """

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, replica: int, step: int) -> None:
        parameters = list(model.parameters())
        parts = torch.split(targets[replica, step], [each.numel() for each in parameters])
        for parameter, target in zip(parameters, parts, strict=True):
            parameter.grad = parameter.detach() - target.view_as(parameter)
        optimizer.step()

    return train


def flat(parameters: Values) -> list[float]:
    """Return all values, with enough digits for a float32."""
    return [float(f"{value:.9g}") for each in parameters.values() for value in each.flatten().tolist()]


def record(torchft_checkout: Path, exogym_checkout: Path) -> dict[str, Any]:
    """Return torchft's six fixtures, which are one float per layer, and a run of EXO gym's strategy."""
    runs = []
    for number, (delay, alpha) in enumerate(MOCKED):
        first, second = json.loads((torchft_checkout / FIXTURES.format(number)).read_text())
        assert first == second, "both replicas have the same values in torchft's fixtures"
        run: dict[str, Any] = {"fragment_sync_delay": delay, "fragment_update_alpha": alpha}
        for name, steps in (("local", first[0]["history"]), ("global", first[0]["global_parameter_history"])):
            run[name] = {step: [value[0][0] for value in layers.values()] for step, layers in steps.items()}
        runs.append(run)
    targets = torch.randint(-4, 5, (NUM_REPLICAS, 20, 5), generator=torch.Generator().manual_seed(0)) / 2
    settings = {"lr": 0.0625, "weight_decay": 0.125}
    models = [Vectors() for _ in range(NUM_REPLICAS)]
    start = flat(values(models[0]))
    histories = exogym(exogym_checkout, models, towards(targets), steps=20, sync_every=5, **settings)
    return {
        "torchft": {
            "repository": "https://github.com/meta-pytorch/torchft",
            "commit": version(torchft_checkout),
            "licence": "BSD-3-Clause, copyright Meta Platforms, Inc. and affiliates",
            "files": FIXTURES.format("[0-5]"),
            "sync_every": 6,
            "layers": ["layers.0.weight", "layers.1.weight"],
            "runs": runs,
        },
        "exogym": {
            "repository": "https://github.com/exo-explore/gym",
            "commit": version(exogym_checkout),
            "licence": "MIT, as its pyproject.toml says",
            "files": "exogym/strategy/diloco.py, with .clone() where its master shares memory with rank 0's model",
            "recorded_by": "python -m benchmarks.real.peers",
            "sync_every": 5,
            "adamw": settings,
            "outer": {"learning_rate": 0.7, "momentum": 0.9},
            "start": start,
            "targets": targets.tolist(),
            "local": [[flat(step) for step in steps] for steps in histories],
        },
    }


def try_all(tries: Tries, torchft_checkout: Path | None, exogym_checkout: Path | None) -> None:
    """Train beside the implementations whose checkouts are there."""
    command = "python -m benchmarks.real peers"
    if torchft_checkout is not None:
        thing = f"meta-pytorch/torchft {version(torchft_checkout)[:7]}"
        tries("torchft's local_sgd.py", thing, command, lambda: torchft_beside_ours(torchft_checkout))
    if exogym_checkout is not None:
        thing = f"exo-explore/gym {version(exogym_checkout)[:7]}"
        tries("EXO gym's DiLoCoStrategy", thing, command, lambda: exogym_beside_ours(exogym_checkout))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real.peers", description=__doc__)
    parser.add_argument("--torchft", type=Path, required=True, help="a checkout of meta-pytorch/torchft")
    parser.add_argument("--exogym", type=Path, required=True, help="a checkout of exo-explore/gym")
    given = parser.parse_args()
    RECORDED.write_text(json.dumps(record(given.torchft, given.exogym)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
