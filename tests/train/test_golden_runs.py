"""`diloco train` ends with the bits that version 0.5 computed: shared start, then Streaming DiLoCo; also over a swarm.

Over the other transports, and moved between them: `tests/train/test_state.py`.

All arithmetic of the model is elementwise, rates are powers of two, and weights are `drawn`, so that the digest does
not depend on how a processor multiplies matrices, fuses a product with a sum, or computes a logarithm.
"""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from diloco.model import LanguageModel, LossParts
from diloco.trained import load_trained
from tests.commands import Command
from tests.processes import Processes
from tests.replicas import drawn

DIGEST = "384ce15cb0ce425a"
MODEL = "tests.train.test_golden_runs:Tables"
SETTINGS = (
    f"--model.source {MODEL} --sequence-length 16 --batch-size 2 --device cpu --steps 30 "
    "--data-parallel-steps 5 --inner-steps 6 --fragments 3 --sync.fragment-strategy balanced --overlap-steps 1 "
    "--codec fp4 "
    "--learning-rate 0.125 --optimizer.name SGD --optimizer.schedule constant --optimizer.warmup-steps 2 "
    "--optimizer.clip-norm None "
    "--evaluation.every-steps 0 --evaluation.sequences 4 --evaluation.sample-prompts --checkpoint.every-steps 0"
)


class Tables(LanguageModel):
    """Five tables with a vector for each token, trained towards whole numbers that depend on the next token."""

    def __init__(self, vocab_size: int, max_sequence_length: int) -> None:
        super().__init__()
        self.vocab_size, self.max_sequence_length, self.num_layers = vocab_size, max_sequence_length, 0
        generator = torch.Generator().manual_seed(5)
        shapes = [(vocab_size, width) for width in (3, 4, 5, 6, 7)]
        self.tables = nn.ModuleList(nn.Embedding(*each, _weight=drawn(each, generator)) for each in shapes)

    def forward(self, tokens: Tensor, cache: object = None, documents: Tensor | None = None) -> Tensor:
        return torch.zeros(*tokens.shape, self.vocab_size)

    def loss(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> LossParts:
        vectors = torch.cat([table(tokens) for table in self.tables], -1)
        aims = (targets[..., None] * torch.arange(1, 26)) % 7 - 3
        loss = (vectors - aims).square().sum() / tokens.numel()
        return LossParts(loss, loss.detach())

    def new_cache(self) -> None:
        return None

    def flops_per_token(self, sequence_length: int | None = None) -> float:
        return 1.0


class Commands:
    """Starts commands in folder ``out`` and in its neighbours."""

    def __init__(self, processes: Processes, data: Path, out: Path) -> None:
        self.processes, self.data, self.out = processes, data, out

    def start(self, arguments: str, out: Path | None = None) -> Command:
        output = self.out.with_name(f"{len(self.processes.members)}.txt")
        words = f"train {SETTINGS} --data {self.data} --out {out or self.out} {arguments}"
        return Command(self.processes, words.split(), output)


def in_process(commands: Commands) -> None:
    commands.start("--replicas 2").end()


def over_the_swarm(commands: Commands) -> None:
    place = "--transport swarm --run golden --replicas 2 --network.listen 127.0.0.1:0"
    first = commands.start(f"{place} --replica 0")
    address = first.until(lambda: re.search(r"--join (/ip4/127\S+)", first.output), "an address")[1]
    second = commands.start(f"{place} --replica 1 --join {address}", commands.out.with_name("second"))
    for peer in (first, second):
        peer.end()


@pytest.mark.parametrize("run", [in_process, over_the_swarm])
def test_a_run_ends_with_the_bits_of_version_0_5(run: Callable[[Commands], None], data: Path, tmp_path: Path) -> None:
    with Processes() as processes:
        run(Commands(processes, data, tmp_path / "run"))
    for folder in filter(Path.exists, (tmp_path / "run", tmp_path / "second")):
        digest = hashlib.sha256()
        for parameter in load_trained(folder, source=MODEL).model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        assert digest.hexdigest()[:16] == DIGEST, folder
