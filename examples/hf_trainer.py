"""DiLoCo in Hugging Face's Trainer.

python examples/hf_trainer.py --steps 200
torchrun --nproc-per-node 8 examples/hf_trainer.py --replicas 2 --replica 0 --rendezvous HOST:29400 --out runs/example-0
torchrun --nproc-per-node 8 examples/hf_trainer.py --replicas 2 --replica 1 --rendezvous HOST:29400 --out runs/example-1
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from tiny import connection, parse, schedule, share
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from diloco.integrations.transformers import DiLoCoCallback
from diloco.transport.base import Transport


def make_llama(options: argparse.Namespace) -> LlamaForCausalLM:
    """The same weights on every replica; LlamaForCausalLM.from_pretrained would give them, too."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=options.width,
        intermediate_size=2 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        max_position_embeddings=options.sequence_length + 1,
    )
    return LlamaForCausalLM(config)


def collate(samples: list[tuple[Tensor, ...]]) -> dict[str, Tensor]:
    windows = torch.stack([window for (window,) in samples])
    return {"input_ids": windows, "labels": windows}


def make_arguments(options: argparse.Namespace, **others: Any) -> TrainingArguments:
    chosen = {
        "output_dir": str(options.out),
        "max_steps": options.steps,  # the same on all replicas
        "per_device_train_batch_size": options.batch_size,
        "gradient_accumulation_steps": options.accumulation,
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": "cosine",
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "train_sampling_strategy": "sequential",  # a share is in random order
        "dataloader_drop_last": True,
        "save_steps": options.save_steps,
        "logging_steps": options.inner_steps,
        "report_to": "none",
        "use_cpu": not torch.accelerator.is_available(),
    }
    return TrainingArguments(**(chosen | others))


def make_trainer(arguments: TrainingArguments, options: argparse.Namespace, transport: Transport | None) -> Trainer:
    trainer = Trainer(make_llama(options), arguments, collate, share(options))
    callback = DiLoCoCallback(
        transport=transport,
        schedule=schedule(options),
        codec=options.codec,
        resume_from_checkpoint=options.resume,  # a Trainer does not tell its callbacks
    )
    callback.add_to(trainer)  # or Trainer(callbacks=[callback])
    return trainer


if __name__ == "__main__":
    given = parse(__doc__)
    ours = make_arguments(given)  # under torchrun, this meets the other processes of the replica
    with connection(given, ranks="whole") as way_to_the_others:
        host = make_trainer(ours, given, way_to_the_others)
        host.train(resume_from_checkpoint=given.resume and str(given.resume))
        host.save_model(str(given.out / "model"))  # the global parameters: the same on all replicas
