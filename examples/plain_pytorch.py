"""DiLoCo in a loop of plain PyTorch.

python examples/plain_pytorch.py --steps 200
python examples/plain_pytorch.py --replicas 2 --replica 0 --out runs/example-0 &
python examples/plain_pytorch.py --replicas 2 --replica 1 --out runs/example-1
"""

from __future__ import annotations

import argparse
import itertools

import torch
from tiny import connection, cosine, make_model, next_byte_loss, parameter_groups, parse, schedule, share
from torch import nn
from torch.utils.data import DataLoader

from diloco import DiLoCo
from diloco.transport.base import Transport


def train(options: argparse.Namespace, transport: Transport | None) -> nn.Module:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(options).to(device)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=options.learning_rate, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, options.steps))
    loader = DataLoader(share(options), batch_size=options.batch_size, drop_last=True)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    options.out.mkdir(parents=True, exist_ok=True)

    with DiLoCo(
        model, optimizer, transport=transport, schedule=schedule(options), codec=options.codec, on_event=print
    ) as diloco:
        first = 0
        if options.resume is not None:
            # what DiLoCo keeps, beside what every loop keeps; plain values and tensors, so weights_only is enough
            state = torch.load(options.resume, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            scheduler.load_state_dict(state["scheduler"])
            diloco.load_state_dict(state["diloco"])
            first = state["step"]
            batches = itertools.islice(batches, first * options.accumulation, None)

        for step in range(first, options.steps):
            for _ in range(options.accumulation):
                (windows,) = next(batches)
                (next_byte_loss(model, windows.to(device)) / options.accumulation).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            diloco.step()  # once for each step of the optimizer

            if (step + 1) % options.save_steps == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                state |= {"scheduler": scheduler.state_dict(), "diloco": diloco.state_dict(), "step": step + 1}
                torch.save(state, options.out / f"step-{step + 1}.pt")

    with diloco.global_model() as agreed:  # the same on all replicas
        torch.save(agreed.state_dict(), options.out / "model.pt")
    return model


if __name__ == "__main__":
    given = parse(__doc__)
    with connection(given) as way_to_the_others:
        train(given, way_to_the_others)
