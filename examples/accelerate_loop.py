"""DiLoCo in a loop of Hugging Face Accelerate, with gradient accumulation.

python examples/accelerate_loop.py --accumulation 4
accelerate launch --num_processes 8 examples/accelerate_loop.py --replicas 2 --replica 0 --rendezvous HOST:29400 ...
accelerate launch --num_processes 8 examples/accelerate_loop.py --replicas 2 --replica 1 --rendezvous HOST:29400 ...
"""

from __future__ import annotations

import argparse
import itertools

import torch
from accelerate import Accelerator
from tiny import connection, cosine, make_model, next_byte_loss, parameter_groups, parse, schedule, share
from torch import nn
from torch.utils.data import DataLoader

from diloco.integrations.accelerate import AcceleratedDiLoCo
from diloco.transport.base import Transport


def train(accelerator: Accelerator, options: argparse.Namespace, transport: Transport | None) -> nn.Module:
    model = make_model(options)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=options.learning_rate, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, options.steps))
    loader = DataLoader(share(options), batch_size=options.batch_size, drop_last=True)
    # the scheduler stays as it is: prepared, it would step once for each process
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(scheduler)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))

    with AcceleratedDiLoCo(
        accelerator, model, optimizer, transport=transport, schedule=schedule(options), codec=options.codec
    ) as diloco:
        if options.resume is not None:
            accelerator.load_state(options.resume)  # DiLoCo's state, too
            batches = itertools.islice(batches, diloco.steps * options.accumulation, None)

        while diloco.steps < options.steps:
            (windows,) = next(batches)
            with accelerator.accumulate(model):
                loss = next_byte_loss(model, windows)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
                scheduler.step()
            diloco.step()  # counts where gradients were synchronised

            if accelerator.sync_gradients and diloco.steps % options.save_steps == 0:
                accelerator.print({"step": diloco.steps, "loss": loss.item(), **diloco.logs()})
                accelerator.save_state(options.out / f"step-{diloco.steps}")

    with diloco.global_model() as agreed:  # the same on all replicas
        accelerator.save_model(agreed, options.out / "model")
    return agreed


if __name__ == "__main__":
    given = parse(__doc__)
    ours = Accelerator(cpu=not torch.accelerator.is_available(), gradient_accumulation_steps=given.accumulation)
    with connection(given, ranks="sharded" if ours.is_fsdp2 else "whole") as way_to_the_others:
        train(ours, given, way_to_the_others)
