"""A plain loop with PyPI's schedulefree, which keeps a copy of the parameters.

After the first round, at a learning rate of 0, it must move the parameters as it moves those of a twin that has not
been merged: towards its copy, which the merge has moved along.
"""

import copy

import schedulefree  # type: ignore[import-not-found]  # of PyPI
import torch

from benchmarks.real.programs.common import arguments, connect, finish, points
from diloco import SyncSchedule
from diloco.algorithm import Sgd
from diloco.outer import DiLoCo

given = arguments(__doc__)
model = torch.nn.Linear(8, 4)
torch.manual_seed(0)
torch.nn.init.normal_(model.weight), torch.nn.init.zeros_(model.bias)
optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.05)
optimizer.train()
data = points(400, 10 + given.replica)
outer = Sgd(learning_rate=1.0)
with (
    connect(given) as transport,
    DiLoCo(
        model, optimizer, transport=transport, schedule=SyncSchedule(inner_steps=10), outer_optimizer=outer
    ) as diloco,
):
    for step in range(20):
        if step == 10:
            for group in optimizer.param_groups:
                group["lr"] = 0.0
        batch = data[16 * step : 16 * step + 16]
        logits = model(torch.stack([row["x"] for row in batch]))
        loss = torch.nn.functional.cross_entropy(logits, torch.stack([row["labels"] for row in batch]))
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == 9:
            other = copy.deepcopy(model)
            follows = schedulefree.AdamWScheduleFree(other.parameters(), lr=0.05)
            follows.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            follows.train()
            before = other.weight.detach().clone()
        if 10 <= step < 19:
            for group in follows.param_groups:
                group["lr"] = 0.0
            other.weight.grad, other.bias.grad = torch.zeros_like(other.weight), torch.zeros_like(other.bias)
            follows.step()
        diloco.step()
        if step == 9:
            merged = model.weight.detach().clone()
        if step == 18:
            moved, expected = model.weight.detach() - merged, other.weight.detach() - before
finish(diloco, model, apart=(moved - expected).abs().max().item(), moved=moved.abs().max().item())
