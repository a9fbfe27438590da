"""DiLoCo in Hugging Face's `Trainer`: a callback."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Self, Unpack

from torch import nn

from diloco.errors import CheckpointError, ConfigurationError, from_extra
from diloco.integrations.hosted_replica import (
    DiLoCoArguments,
    HostedReplica,
    Parameters,
    has_state,
    held_values,
    load_state,
    save_state,
)
from diloco.outer.diloco import DiLoCo
from diloco.transport.base import Transport

with from_extra("hf", "DiLoCoCallback needs transformers and accelerate"):
    import accelerate  # noqa: F401  # without which there is no Trainer
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

__all__ = ["DiLoCoCallback"]


class DiLoCoCallback(TrainerCallback):
    """Makes a `Trainer` one replica among others.

    After every optimizer step, however many micro-batches it took, fragments are sent and merged as the schedule says.
    DiLoCo's state is saved with the Trainer's checkpoints, and ``trainer.train(resume_from_checkpoint=...)`` resumes
    exactly. Figures of the rounds are added to the Trainer's logs, under names that begin with ``diloco/``.

    Every replica is a process, or a group of processes of `torchrun` that train it together with
    DistributedDataParallel or FSDP2, with its own ``output_dir``. All must begin with the same weights, take the same
    number of optimizer steps (``max_steps``), and see different data (`diloco.replica_share`).

    Args:
        transport: this replica's way to the others; None: alone.
        parameters: whose values are evaluated, saved as the model of a checkpoint, and left in the model at the end.
            global: those that all replicas agree on, so that a decision from an evaluation is the same on all of them;
            resuming is exact all the same, since the local ones are saved beside them.
        resume_from_checkpoint: the folder that ``trainer.train`` is told to resume from, where it is none of
            ``output_dir``.
        begin_from_checkpoint: whether a checkpoint of a Trainer without DiLoCo may be resumed from; DiLoCo then begins
            there, with the same checkpoint on all replicas.
        arguments: of `DiLoCo`: schedule, codec, outer_optimizer, merge, on_event and more.

    Attributes:
        diloco: once training has begun.

    Raises:
        ConfigurationError: for what can't work; most of it when training begins.
    """

    def __init__(
        self,
        *,
        transport: Transport | None = None,
        parameters: Parameters = "global",
        resume_from_checkpoint: str | Path | None = None,
        begin_from_checkpoint: bool = False,
        **arguments: Unpack[DiLoCoArguments],
    ) -> None:
        self.transport = transport
        self.resume_from_checkpoint = resume_from_checkpoint
        self.begin_from_checkpoint = begin_from_checkpoint
        self._replica = HostedReplica(parameters, arguments)
        self._began: TrainerState | None = None  # of the train() in which it did

    @property
    def diloco(self) -> DiLoCo | None:
        """Of this replica, once training has begun."""
        return self._replica.diloco

    def add_to(self, trainer: Trainer) -> Self:
        """Instead of ``Trainer(callbacks=[...])``: the figures then reach TensorBoard, W&B and other trackers,
        whose callbacks stand before all others."""
        trainer.callback_handler.callbacks.insert(0, _FiguresFirst(self))
        trainer.add_callback(self)
        return self

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Make the `DiLoCo`, at its beginning or where a checkpoint was saved."""
        assert model is not None, "a Trainer gives its model"
        self._refuse_unfit(args, state)
        diloco = self._replica.begin(model, optimizer, self.transport)
        self._began = state
        if state.global_step:
            self._resume(diloco, args, state)
        if args.eval_on_start:
            self._replica.show()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Training goes on with the local parameters."""
        self._replica.hide()

    on_epoch_begin = on_step_begin

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The optimizer has stepped, or a gradient scaler has skipped the step."""
        self._replica.step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Before an evaluation or a checkpoint the model takes the parameters that it is to have there."""
        if control.should_evaluate or control.should_save:
            self._replica.show()

    on_epoch_end = on_step_end

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save DiLoCo's state beside the optimizer's, unless the Trainer saves the model only."""
        assert self.diloco is not None, "training has begun"
        folder, shown = _checkpoint_of(args, state), self._replica.shows_globals
        if self._replica.parameters == "global" and not shown:
            warnings.warn(
                f"{folder} holds local parameters, because a callback after DiLoCoCallback asked for it to be saved. "
                "Give DiLoCoCallback as the last one to save the global parameters.",
                stacklevel=2,
            )
        if not args.save_only_model:
            save_state(folder, self.diloco, self._replica.local() if shown else None)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the figures to what the Trainer logs of training, and to its history."""
        if self.diloco is not None and logs is not None and {"loss", "train_loss"} & logs.keys():
            figures = self._replica.figures()
            logs.update(figures)
            state.log_history[-1].update(figures)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Merge what is in flight, and leave the model with the parameters that were asked for.

        Where the Trainer loaded the best model at the end, that is what it keeps.
        """
        assert self.diloco is not None, "training has begun"
        best = None
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            best = {name: values.clone() for name, values in held_values(self.diloco.model).items()}
        self._replica.end(best)

    def _resume(self, diloco: DiLoCo, args: TrainingArguments, state: TrainerState) -> None:
        given = self.resume_from_checkpoint or args.resume_from_checkpoint
        folder = Path(given) if isinstance(given, str | Path) and Path(given).is_dir() else _checkpoint_of(args, state)
        if has_state(folder):
            load_state(folder, diloco, check_model=True)
        elif not self.begin_from_checkpoint:
            raise CheckpointError(
                f"the Trainer resumes at step {state.global_step}, but {folder} has no state of DiLoCo. If it resumes "
                "from another folder, use DiLoCoCallback(resume_from_checkpoint=that folder); if a Trainer without "
                "DiLoCo saved it, begin_from_checkpoint=True."
            )

    def _refuse_unfit(self, args: TrainingArguments, state: TrainerState) -> None:
        refused = {
            "DeepSpeed, which keeps the parameters to itself": args.deepspeed is not None,
            "a hyperparameter search, whose trials would meet the others at other steps": state.is_hyper_param_search,
            "enable_jit_checkpoint, which saves without asking any callback": args.enable_jit_checkpoint,
            "the same DiLoCoCallback twice, where each step would count as two": self._began is state,
            "a second train() with one DiLoCoCallback, whose rounds are over": None is not self._began is not state,
        }
        for what, given in refused.items():
            if given:
                raise ConfigurationError(f"DiLoCoCallback can't serve a Trainer with {what}.")


class _FiguresFirst(TrainerCallback):
    """Stands before the trackers, so that they see what `DiLoCoCallback.on_log` adds."""

    def __init__(self, callback: DiLoCoCallback) -> None:
        self._callback = callback

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._callback.on_log(args, state, control, **kwargs)


def _checkpoint_of(args: TrainingArguments, state: TrainerState) -> Path:
    """Where the Trainer saves, and by default resumes from, at the step of ``state``."""
    assert args.output_dir is not None, "the Trainer has set it"
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
