"""Under torchrun each rank of a framework's job is a replica, and DistributedDataParallel averages no gradients."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from diloco.errors import CheckpointError
from tests.integrations.reference import options
from tests.integrations.test_frameworks import (
    accelerate,
    callback,
    example,
    fitted,
    of_accelerate,
    pl,
    pytestmark,
    trainer,
    transformers,
)
from tests.processes import Processes, free_port

__all__ = ["pytestmark"]


def by_accelerate(given: Any, folder: Path, resume: bool) -> Any:
    module, made = example("accelerate_loop"), []

    class Recorded(of_accelerate.AcceleratedDiLoCo):  # type: ignore[misc]  # imported when it is used
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            made.append(self)

        def end(self) -> None:
            super().end()
            self.last_local = {name: values.clone() for name, values in self.local_values().items()}

    given.resume = folder / "step-6" if resume else None
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "AcceleratedDiLoCo", Recorded)
        module.train(accelerator, given, None)
    accelerator.free_memory()
    return made[0]


def by_lightning(given: Any, folder: Path, resume: bool) -> Any:
    given.resume = folder / "step=6.ckpt" if resume else None
    ours = callback(given, parameters="local")
    save = pl.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=6, save_top_k=-1)
    fitted(given, callbacks=[ours, save], strategy="ddp", devices=2)
    return ours.diloco


def by_trainer(given: Any, folder: Path, resume: bool) -> Any:
    made, ours = trainer(given, {"ddp_backend": "gloo"}, parameters="local")
    made.train(resume_from_checkpoint=str(folder / "checkpoint-6") if resume else None)
    return ours.diloco


FRAMEWORKS = (by_accelerate, by_trainer, by_lightning)


def rank_of_two(rank: int, ports: list[int], top: Path) -> list[tuple[int, str, torch.Tensor]]:
    """Train with each framework, and train again from the checkpoint of step 6, which has a round in flight."""
    about = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    about |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "a", "ACCELERATE_USE_CPU": "true"}
    os.environ |= {variable: str(value) for variable, value in about.items()}
    done = []
    for train, port in zip(FRAMEWORKS, ports, strict=True):
        os.environ["MASTER_PORT"], folder = str(port), top / train.__name__
        of = "hf_trainer" if train is by_trainer else "accelerate_loop"
        given = options(folder, "--steps 12 --inner-steps 5 --overlap-steps 2 --save-steps 6", of=of)
        runs = []
        for resume in (False, True):
            diloco = train(given, folder, resume)
            named = diloco.last_local if train is by_accelerate else diloco.local_values()  # the model ends global
            runs.append(torch.cat([each.flatten() for each in named.values()]))
        assert torch.equal(*runs)
        if train is by_lightning:  # which overwrites a file, and then the states beside it
            before, after = (folder / f"step={step}.ckpt.replicas" / "diloco" / f"replica-{rank}" for step in (6, 12))
            shutil.rmtree(before)
            shutil.copytree(after, before)
            with pytest.raises(CheckpointError, match="states of step 12, but the checkpoint beside it is of step 6"):
                by_lightning(given, folder, resume=True)
        done.append((diloco.rounds_committed, diloco.digest(), runs[0]))
        dist.destroy_process_group()
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return done


def both_ranks(_: int, ports: list[int], top: Path) -> list[list[tuple[int, str, torch.Tensor]]]:
    """Fork the second rank once the frameworks are imported, which takes longer than their training."""
    imported = accelerate.Accelerator, pl.Trainer, transformers.Trainer
    assert all(imported)
    if (child := os.fork()) == 0:
        torch.save(rank_of_two(1, ports, top), top / "second.pt")
        os._exit(0)
    first = rank_of_two(0, ports, top)
    assert os.waitpid(child, 0)[1] == 0
    return [first, torch.load(top / "second.pt")]


def test_each_rank_is_a_replica(tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start(1, both_ranks, [free_port() for _ in FRAMEWORKS], tmp_path)
        both = processes.results(timeout_s=180)[0]
    for (rounds, digest, local), (other_rounds, other_digest, other) in zip(*both, strict=True):
        assert rounds == other_rounds == 2
        assert digest == other_digest
        assert not torch.equal(local, other)
