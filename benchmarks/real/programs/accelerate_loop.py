"""A loop of Accelerate, as run_clm_no_trainer.py has it, with README's lines, which ends in mid-round.

The model is saved after the block.
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from benchmarks.real.programs.common import arguments, connect, finish, llama, rows
from diloco import SyncSchedule, replica_share
from diloco.integrations.accelerate import AcceleratedDiLoCo

given = arguments(__doc__)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
share = replica_share(rows(given.text)[:368], replica=given.replica, num_replicas=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(share, 4))
schedule = SyncSchedule(inner_steps=5, overlap_steps=2)
with (
    connect(given) as transport,
    AcceleratedDiLoCo(accelerator, model, optimizer, transport=transport, schedule=schedule, codec="fp4") as diloco,
):
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        diloco.step()
unwrapped = accelerator.unwrap_model(model)
unwrapped.save_pretrained(given.out / "saved")
finish(diloco, unwrapped)
