"""DiLoCo in the Hugging Face `Trainer`, as a callback."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Self

from diloco.errors import ConfigurationError, from_extra
from diloco.integrations.host import HostedReplica, Parameters, replace_method, save_state
from diloco.outer import DiLoCo
from diloco.transport import Transport

with from_extra("hf", "DiLoCoCallback needs transformers and accelerate"):
    import accelerate  # noqa: F401  # the Trainer needs it
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class DiLoCoCallback(TrainerCallback):
    """Makes a `Trainer` one of several replicas.

    After every optimizer step, however many micro-batches it took, fragments are sent and merged according to the
    schedule. DiLoCo's state is saved with the Trainer's checkpoints, and ``trainer.train(resume_from_checkpoint=...)``
    resumes exactly. Figures of the rounds are added to the Trainer's logs, under names that start with ``diloco/``.

    A replica is one process, or a group of processes started by `torchrun` that train it together with
    DistributedDataParallel or FSDP2, with its own ``output_dir``. All replicas must start with the same weights, take
    the same number of optimizer steps (``max_steps``), and see different data (`diloco.replica_share`).

    Args:
        transport: the connection to the other replicas. None: each rank of torch.distributed is a replica, and
            DistributedDataParallel averages no gradients (`connect_process_group`). A single rank, or the ranks of a
            sharded model (FSDP2), train alone.
        parameters: the parameters that are evaluated, saved as the model of a checkpoint, and left in the model at the
            end. With "global", which all replicas agree on, a decision based on an evaluation is the same on all of
            them (unless some stay ``at_home``). Resuming is still exact, because the local ones are saved as well.
        resume_from_checkpoint: the folder that ``trainer.train`` resumes from, if it is not in ``output_dir``.
        arguments: further arguments of `DiLoCo`: schedule, codec, outer_optimizer, merge, on_event and more.

    Raises:
        ConfigurationError: if something can't work; in most cases only when training starts.
    """

    def __init__(
        self,
        *,
        transport: Transport | None = None,
        parameters: Parameters = "global",
        resume_from_checkpoint: str | Path | None = None,
        **arguments: Any,
    ) -> None:
        self.transport = transport
        self.resume_from_checkpoint = resume_from_checkpoint
        self._replica = HostedReplica(parameters, arguments)

    @property
    def diloco(self) -> DiLoCo | None:
        """The `DiLoCo` of this replica; None until training starts."""
        return self._replica.diloco

    def add_to(self, trainer: Trainer) -> Self:
        """Add this callback to ``trainer``, and its figures to what ``trainer`` logs while it trains."""
        trainer.add_callback(self)
        replace_method(self._replica.at_end, trainer, "log", self._log)
        return self

    def _log(self, logging: Any, logs: dict[str, Any], *given: Any, **more: Any) -> None:
        if "train_runtime" in logs:  # the last line, which the Trainer logs before `on_train_end`
            self._end()
        if self.diloco is not None and {"loss", "train_loss"} & logs.keys():
            logs = logs | self.diloco.figures()
        logging(logs, *given, **more)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **given: Any) -> None:
        if self.diloco is not None:
            raise ConfigurationError("A DiLoCoCallback serves one train() of one Trainer, which has it once.")
        self._replica.begin(given["model"], given["optimizer"], self.transport, goes_on=bool(state.global_step))
        self._trainer = args, state
        if state.global_step:
            place = self.resume_from_checkpoint or args.resume_from_checkpoint
            folder = Path(place) if isinstance(place, str | Path) and Path(place).is_dir() else None
            self._replica.resume(folder or _checkpoint_of(args, state), check_model=True)
        if args.eval_on_start:
            self._replica.show()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._replica.hide()

    on_epoch_begin = on_step_begin

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._replica.step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Put the parameters to evaluate or save into the model, if an evaluation or a checkpoint follows."""
        if control.should_evaluate or control.should_save:
            self._replica.show()

    on_epoch_end = on_step_end

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        folder = _checkpoint_of(args, state)
        if self._replica.parameters == "global" and self._replica.hidden is None:
            warnings.warn(
                f"{folder} contains the local parameters, because a callback after DiLoCoCallback requested this "
                "checkpoint. To save the global parameters, pass DiLoCoCallback as the last callback.",
                stacklevel=2,
            )
        if not args.save_only_model:
            save_state(folder, self._replica.begun, self._replica.hidden, self._replica.inner)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._end()

    def _end(self) -> None:
        """Merge what is in flight, and leave the model with the chosen parameters, or the best that were loaded."""
        if not self._replica.training:
            return
        (args, state), best = self._trainer, None
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            best = {name: values.clone() for name, values in self._replica.begun.local_values().items()}
        self._replica.end(best)


def _checkpoint_of(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the folder that the Trainer saves to, and by default resumes from, at the step of ``state``."""
    assert args.output_dir is not None, "the Trainer sets output_dir"
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
