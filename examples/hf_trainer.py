"""DiLoCo in the Hugging Face Trainer with LoRA adapters; only the adapters are sent. A complete example in one file.

python examples/hf_trainer.py --steps 200
torchrun --nproc-per-node 8 examples/hf_trainer.py --replicas 2 --replica 0 --join HOST:29400 --out runs/example-0
torchrun --nproc-per-node 8 examples/hf_trainer.py --replicas 2 --replica 1 --join HOST:29400 --out runs/example-1
"""

from __future__ import annotations

import argparse
import sysconfig
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from diloco import SyncSchedule, connect_tcp, replica_share
from diloco.integrations.transformers import DiLoCoCallback
from diloco.transport import Transport


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--text", type=Path, help="text file to train on; default: part of the standard library")
    parser.add_argument("--out", type=Path, default=Path("runs/example"), help="output folder of this replica")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per replica and micro-batch")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches per optimizer step")
    parser.add_argument("--sequence-length", type=int, default=64, help="bytes per sequence")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak; decays as a cosine")
    parser.add_argument("--model", help="folder or name of a causal model to adapt; by default, a new small Llama")
    parser.add_argument("--lora-rank", type=int, default=8, help="rank of the adapters, or 0 to train all parameters")
    parser.add_argument("--layers", type=int, default=2, help="layers of a new Llama")
    parser.add_argument("--width", type=int, default=64, help="width of a new Llama")
    parser.add_argument("--inner-steps", type=int, default=20, help="inner steps between two rounds (H)")
    parser.add_argument("--fragments", type=int, default=1, help="fragments of the model, which are sent in turn (P)")
    parser.add_argument("--overlap-steps", type=int, default=3, help="inner steps between sending and merging (tau)")
    parser.add_argument("--codec", default="fp4", help="float32, float16, bfloat16, int8 or fp4")
    parser.add_argument("--replicas", type=int, default=1, help="number of replicas (M)")
    parser.add_argument("--replica", type=int, default=0, help="number of this replica, from 0")
    parser.add_argument("--join", default="127.0.0.1:29400", help="HOST:PORT of replica 0, for all replicas")
    parser.add_argument("--resume", type=Path, help="checkpoint of this replica to resume from")
    parser.add_argument("--save-steps", type=int, default=100, help="steps between two checkpoints")
    return parser.parse_args(arguments)


def make_model(options: argparse.Namespace) -> nn.Module:
    """Create the model, with the same weights on every replica: from a checkpoint or from a fixed seed."""
    torch.manual_seed(0)
    if options.model is not None:
        model = AutoModelForCausalLM.from_pretrained(options.model, trust_remote_code=False)
    else:
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=options.width,
            intermediate_size=2 * options.width,
            num_hidden_layers=options.layers,
            num_attention_heads=4,
            max_position_embeddings=options.sequence_length + 1,
        )
        model = LlamaForCausalLM(config)
    if options.lora_rank == 0:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=options.lora_rank, target_modules="all-linear"))


def share(options: argparse.Namespace) -> Dataset[tuple[Tensor, ...]]:
    """Return this replica's share of the text, in random order. Shares have no sequence in common."""
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("a*.py"))
    text = b"".join(path.read_bytes() for path in ([options.text] if options.text else library))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    windows = tokens.unfold(0, options.sequence_length + 1, options.sequence_length)
    return replica_share(TensorDataset(windows), replica=options.replica, num_replicas=options.replicas)


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
        "train_sampling_strategy": "sequential",  # the share is already in random order
        "dataloader_drop_last": True,
        "save_steps": options.save_steps,
        "logging_steps": options.inner_steps,
        "report_to": "none",
        "use_cpu": not torch.accelerator.is_available(),
    }
    return TrainingArguments(**(chosen | others))


def make_trainer(arguments: TrainingArguments, options: argparse.Namespace, transport: Transport | None) -> Trainer:
    trainer = Trainer(make_model(options), arguments, collate, share(options))
    callback = DiLoCoCallback(
        transport=transport,
        schedule=SyncSchedule(
            inner_steps=options.inner_steps, num_fragments=options.fragments, overlap_steps=options.overlap_steps
        ),
        codec=options.codec,
        resume_from_checkpoint=options.resume,  # the Trainer does not pass this on to callbacks
    )
    callback.add_to(trainer)  # or Trainer(callbacks=[callback])
    return trainer


def connect(options: argparse.Namespace) -> AbstractContextManager[Transport | None]:
    """Connect to the other replicas, if there are any."""
    if options.replicas == 1:
        return nullcontext()
    return connect_tcp(replica=options.replica, num_replicas=options.replicas, rendezvous=options.join, ranks="whole")


def main() -> None:
    options = parse()
    arguments = make_arguments(options)  # under torchrun, this connects to the other processes of the replica
    with connect(options) as transport:
        trainer = make_trainer(arguments, options, transport)
        trainer.train(resume_from_checkpoint=options.resume and str(options.resume))
        trainer.save_model(str(options.out / "model"))  # global parameters or adapters: the same on all replicas


if __name__ == "__main__":
    main()
