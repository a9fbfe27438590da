"""A plain loop with PyPI's schedulefree, which keeps a copy of the parameters.

With a learning rate of 0 after the first round the local parameters must stay at the global ones.
"""

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
data, apart = points(400, 10 + given.replica), 0.0
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
        diloco.step()
        if 10 <= step < 19:
            weight = diloco.named_global_params()["weight"]
            apart = max(apart, (model.weight.detach() - weight).abs().max().item())
finish(diloco, model, apart=apart)
