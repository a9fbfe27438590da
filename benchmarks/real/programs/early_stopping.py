"""Trainer with EarlyStoppingCallback and a model with BatchNorm: both replicas must decide alike."""

from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

from benchmarks.real.programs.common import Normed, arguments, connect, finish, points
from diloco import SyncSchedule, replica_share
from diloco.integrations.transformers import DiLoCoCallback

given = arguments(__doc__)
settings = TrainingArguments(
    str(given.out), max_steps=120, per_device_train_batch_size=16, learning_rate=3e-2, eval_strategy="steps",
    eval_steps=7, save_strategy="steps", save_steps=7, load_best_model_at_end=True, metric_for_best_model="eval_loss",
    logging_steps=100, report_to="none", use_cpu=True, disable_tqdm=True, seed=0,
)  # fmt: skip
with connect(given) as transport:
    share = replica_share(points(2000, 1), replica=given.replica, num_replicas=2)
    stopping = EarlyStoppingCallback(early_stopping_patience=1)
    trainer = Trainer(Normed(), settings, train_dataset=share, eval_dataset=points(200, 2), callbacks=[stopping])
    callback = DiLoCoCallback(transport=transport, schedule=SyncSchedule(inner_steps=10, overlap_steps=2))
    callback.add_to(trainer)
    trainer.train()
    losses = [round(line["eval_loss"], 6) for line in trainer.state.log_history if "eval_loss" in line]
    finish(callback.diloco, trainer.model, losses=losses, stopped=trainer.state.global_step)
