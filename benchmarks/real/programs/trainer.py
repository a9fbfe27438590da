"""Hugging Face's Trainer as run_clm.py uses it, with README's lines."""

from transformers import Trainer, TrainingArguments

from benchmarks.real.programs.common import arguments, connect, finish, llama, rows
from diloco import SyncSchedule, replica_share
from diloco.integrations.transformers import DiLoCoCallback

given = arguments(__doc__)
lines = rows(given.text)
settings = TrainingArguments(
    str(given.out), max_steps=24, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=1e-2,
    eval_strategy="steps", eval_steps=8, save_steps=9, logging_steps=8, report_to="none", use_cpu=True, seed=0,
    disable_tqdm=True,
)  # fmt: skip
with connect(given) as transport:
    trainer = Trainer(
        llama(), settings, train_dataset=replica_share(lines[:300], replica=given.replica, num_replicas=2),
        eval_dataset=lines[300:],
    )  # fmt: skip
    callback = DiLoCoCallback(transport=transport, schedule=SyncSchedule(inner_steps=5, overlap_steps=3), codec="fp4")
    callback.add_to(trainer)
    trainer.train(resume_from_checkpoint=str(given.out / given.resume) if given.resume else None)
    losses = [round(line["eval_loss"], 6) for line in trainer.state.log_history if "eval_loss" in line]
    finish(callback.diloco, trainer.model, losses=losses)
