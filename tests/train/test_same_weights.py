"""Replicas whose processors round otherwise, or that draw other weights, begin with the same bits."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore
from torch.optim import SGD

from diloco.algorithm import digest_tensors, model_state
from diloco.monitor import read_metrics
from diloco.train import agree_on_weights
from diloco.transport import InProcessTransport, ReplicaGroup, Transport
from tests.commands import Command
from tests.outer.test_copies import Lookahead
from tests.processes import Processes, free_port
from tests.runs import SMALL, of_torchrun, write_text
from tests.transport.wires import Wires, at_once


def net(seed: int) -> Any:
    """Return a model with zeros, infinities, tiny and integer values; all but the mask differ by seed."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2, dtype=torch.bfloat16))
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([0.0, 1e-30]) * (1 - seed) + seed)
        model[1].running_mean.add_(seed)
        model[1].num_batches_tracked.add_(1 << 40 if seed else 3)
    model.register_buffer("mask", torch.tensor([-torch.inf, 0.0]))
    return model


def digest(model: nn.Module) -> str:
    return digest_tensors(model_state(model))


@pytest.mark.parametrize("over_sockets", [True, False])
@pytest.mark.parametrize("seeds", [(0, 1), (0, 0, 1), (0, 1, 1, 1), (1, 1)])
def test_all_replicas_get_the_weights_and_buffers_of_the_first(seeds: tuple[int, ...], over_sockets: bool) -> None:
    """Even if most have others; what an optimizer keeps of the weights moves, too."""
    wires, hub = Wires(), InProcessTransport(len(seeds))
    models = [net(seed) for seed in seeds]
    optimizers = [Lookahead(SGD(model.parameters(), 0.1)) for model in models]
    try:
        transports: list[Transport] = [*(wires.meet(len(seeds)) if over_sockets else hub.endpoints)]
        said = at_once(
            [
                lambda m=m: agree_on_weights(models[m], optimizers[m], transports[m], ReplicaGroup(replica=m), 7)
                for m in range(len(seeds))
            ]
        )
        differs = len({*seeds}) > 1
        assert {digest(model) for model in models} == {digest(net(seeds[0]))}
        assert [
            f"the weights of {'another' if seed == seeds[0] else 'this'} replica" in text
            for seed, text in zip(seeds, said, strict=True)
        ] == [differs] * len(seeds)
        assert all((transport.sent_bytes > 0) == differs for transport in transports)
        for model, optimizer in zip(models, optimizers, strict=True):
            for parameter in model.parameters():
                torch.testing.assert_close(optimizer.state[parameter]["slow"], parameter.detach())
    finally:
        wires.close()


DRAWS_OTHERWISE = """
import os
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        generator = torch.Generator().manual_seed(os.getpid())
        self.embedding, self.norm, self.head = nn.Embedding(vocab_size, 8), nn.BatchNorm1d(8), nn.Linear(8, vocab_size)
        with torch.no_grad():
            self.head.weight.normal_(generator=generator)
            self.norm.running_mean.normal_(generator=generator)

    def forward(self, tokens):
        return self.head(self.norm(self.embedding(tokens).transpose(1, 2)).transpose(1, 2))
"""


DRIFTS = """
import os
import torch

class Drifts(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 + 1e-6 * (os.getpid() % 100 + 1))
"""


class Commands:
    """Starts the replicas of a run of such a model, each in a folder of its own."""

    def __init__(self, processes: Processes, tmp_path: Path, arguments: str) -> None:
        (source := tmp_path / "net.py").write_text(DRAWS_OTHERWISE)
        small = re.sub(r"--model.arguments \S+|--replicas 2", "", SMALL).replace("--fragments 3", "--fragments 1")
        self.words = f"train {small} {write_text(tmp_path)} --model {source}:Net --monitor.console quiet {arguments}"
        self.processes, self.run = processes, tmp_path / "run"

    def start(self, arguments: str, out: Path | None = None, environment: dict[str, str] | None = None) -> Command:
        words, output = f"{self.words} --out {out or self.run} {arguments}", f"{len(self.processes.members)}.txt"
        return Command(self.processes, words.split(), self.run.with_name(output), environment=environment or {})


def over_tcp(commands: Commands) -> tuple[Path, Path]:
    place = f"--transport tcp --replicas 2 --join 127.0.0.1:{free_port()}"
    for command in [commands.start(f"{place} --replica {m}") for m in range(2)]:
        command.end()
    return commands.run, commands.run / "replica-1"


def under_torchrun(commands: Commands) -> tuple[Path, Path]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for command in [commands.start("", environment=of_torchrun(rank, 2, store.port)) for rank in range(2)]:
        command.end()
    return commands.run, commands.run / "replica-1"


def over_the_swarm(commands: Commands) -> tuple[Path, Path]:
    place = "--transport swarm --run draws --replicas 2 --network.listen 127.0.0.1:0"
    first = commands.start(f"{place} --replica 0")
    address = first.until(lambda: re.search(r"--join (/ip4/127\S+)", first.output), "an address")[1]
    other = commands.run.with_name("other")
    for command in (first, commands.start(f"{place} --replica 1 --join {address}", other)):
        command.end()
    return commands.run, other


@pytest.mark.parametrize(
    ("run", "shared_start"), [(over_tcp, 0), (under_torchrun, 3), (over_the_swarm, 3), (over_the_swarm, 0)]
)
def test_processes_that_draw_other_weights_begin_together(
    run: Callable[[Commands], tuple[Path, Path]], shared_start: int, tmp_path: Path
) -> None:
    """No round is void for it, and both are told. In a swarm without a shared start the second joins the first."""
    with Processes() as processes:
        folders = run(Commands(processes, tmp_path, f"--data-parallel-steps {shared_start}"))
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    assert len({each["global_params_digest"] for each in summaries}) == 1
    assert [each["rounds_void"] for each in summaries] == [0, 0]
    if run is over_the_swarm and not shared_start:
        (joined,) = read_metrics(folders[1] / "metrics.jsonl", "RunStarted")
        assert (joined["step"], joined["resumed_from"]) == (0, "the other replicas")
        return
    for folder, whose in zip(folders, ("another replica", "this replica"), strict=True):
        notes = [each["text"] for each in read_metrics(folder / "metrics.jsonl", "Note")]
        assert [note.partition(" differed")[0] for note in notes if "the weights of" in note] == [
            f"After step 0 the weights of {whose}"
        ]


@pytest.mark.parametrize("run", [over_tcp, under_torchrun])
def test_processes_whose_optimizers_round_otherwise_end_data_parallel_training_with_the_same_bits(
    run: Callable[[Commands], tuple[Path, Path]], tmp_path: Path
) -> None:
    (source := tmp_path / "drifts.py").write_text(DRIFTS)
    own = f"--optimizer.name {source}:Drifts --optimizer.arguments {{}}"
    arguments = f"--algorithm data-parallel --overlap-steps 0 {own}"
    with Processes() as processes:
        folders = run(Commands(processes, tmp_path, arguments))
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    assert len({each["global_params_digest"] for each in summaries}) == 1
    for folder in folders:
        notes = [each["text"] for each in read_metrics(folder / "metrics.jsonl", "Note")]
        assert [note[:18] for note in notes if "the weights of" in note] == ["After step 0 the w", "After step 12 the "]
