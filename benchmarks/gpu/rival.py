"""Hugging Face's ``Trainer`` with the same model, batch and precision, in the same job."""

import itertools
import tempfile
import time
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks.gpu.sessions import Measured, settle
from benchmarks.gpu.sizes import Job


class _Rows(Dataset[dict[str, torch.Tensor]]):
    """Random sequences, drawn before timing starts."""

    def __init__(self, job: Job, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        assert job.model.vocab_size is not None
        self.rows = torch.randint(job.model.vocab_size, (count, job.sequence_length), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def time_rival(
    job: Job, device: torch.device, precision: str, *, warmup_steps: int, steps: int, compiled: bool
) -> Measured:
    """Time the steps of the Trainer, each from the end of one to the end of the next, with the device synchronised.

    Raises:
        ImportError: if transformers or accelerate is not installed.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    size = job.model
    assert size.ffn == "swiglu"
    assert not size.qk_norm, "a Llama has no QK-norm"
    sizes: dict[str, Any] = {
        "vocab_size": size.vocab_size,
        "hidden_size": size.width,
        "intermediate_size": size.ffn_width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads or size.heads,
        "max_position_embeddings": size.max_sequence_length,
        "rms_norm_eps": size.norm_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": size.rope_theta},
        "tie_word_embeddings": size.tie_embeddings,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    ends_s: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            settle(device)
            ends_s.append(time.perf_counter())
            if len(ends_s) == warmup_steps and device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)

    total = warmup_steps + steps
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=job.batch_size,
            max_steps=total,
            optim="adamw_torch_fused",
            adam_beta2=0.95,
            weight_decay=0.1,
            learning_rate=4e-4,
            max_grad_norm=1.0,
            bf16=precision == "bfloat16",
            torch_compile=compiled,
            use_cpu=device.type == "cpu",
            dataloader_num_workers=0,
            dataloader_pin_memory=device.type == "cuda",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=LlamaForCausalLM(LlamaConfig(**sizes)),
            args=arguments,
            train_dataset=_Rows(job, job.batch_size * total),
            callbacks=[Clock()],
        )
        loss = float(trainer.train().training_loss)
    kept = ends_s[max(0, warmup_steps - 1) :]
    return Measured.of([after - before for before, after in itertools.pairwise(kept)], device, loss)
