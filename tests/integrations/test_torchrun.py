"""Under torchrun each rank of a framework's job is a replica, and DistributedDataParallel averages no gradients."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.algorithm import local_shard
from tests.integrations.reference import options
from tests.integrations.test_frameworks import (
    accelerate,
    callback,
    callback_of,
    example,
    fitted,
    of_accelerate,
    pl,
    pytestmark,
    schedule_of,
    trainer,
)
from tests.processes import Processes, free_port

__all__ = ["pytestmark"]


def result(diloco: Any) -> dict[str, Any]:
    local = torch.cat([local_shard(each).detach().flatten() for each in diloco.named_parameters().values()])
    return {"rounds": diloco.rounds_committed, "digest": diloco.digest(), "local": local.clone()}


def by_accelerate(given: Any, folder: Path) -> dict[str, Any]:
    """Train, and train again from the state after step 6, which has a round in flight."""
    module, runs = example("accelerate_loop"), []
    for start in (0, 6):
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=True)
        model = module.make_model(given)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = torch.utils.data.DataLoader(module.share(given), batch_size=given.batch_size, drop_last=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        with of_accelerate.AcceleratedDiLoCo(accelerator, model, optimizer, schedule=schedule_of(given)) as diloco:
            if start:
                accelerator.load_state(str(folder / "state"))
            for step, (windows,) in zip(range(12), loader, strict=False):
                if step < start:
                    continue
                loss = torch.nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                diloco.step()
                if step == 5 and not start:
                    accelerator.save_state(str(folder / "state"))
            runs.append(result(diloco))
        accelerator.free_memory()
    assert torch.equal(runs[0]["local"], runs[1]["local"])
    return runs[1]


def by_lightning(given: Any, folder: Path) -> dict[str, Any]:
    """Train, and train again from the checkpoint of step 6, which has a round in flight."""
    runs = []
    for given.resume in (None, folder / "step=6.ckpt"):
        ours = callback(given, None, parameters="local")
        save = pl.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=6, save_top_k=-1)
        fitted(given, None, callbacks=[ours, save], strategy="ddp", devices=2)
        runs.append(result(ours.diloco))
    assert torch.equal(runs[0]["local"], runs[1]["local"])
    return runs[1]


def by_trainer(given: Any, folder: Path) -> dict[str, Any]:
    """Train, and train again from the checkpoint of step 6, which has a round in flight."""
    runs = []
    for resume in (None, str(folder / "checkpoint-6")):
        more = {"output_dir": str(folder), "ddp_backend": "gloo", "save_steps": 6, "max_steps": 12}
        made = trainer(given, None, more, parameters="local")
        made.train(resume_from_checkpoint=resume)
        runs.append(result(callback_of(made).diloco))
    assert torch.equal(runs[0]["local"], runs[1]["local"])
    return runs[1]


def rank_of_two(rank: int, name: str, port: int, folder: Path) -> dict[str, Any]:
    about = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    about |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "a", "ACCELERATE_USE_CPU": "true"}
    os.environ |= {variable: str(value) for variable, value in about.items()}
    of = "hf_trainer" if name == "by_trainer" else "plain_pytorch"
    given = options(folder, "--steps 12 --inner-steps 5 --overlap-steps 2", of=of)
    found: dict[str, Any] = globals()[name](given, folder)
    return found


@pytest.mark.parametrize("name", ["by_accelerate", "by_lightning", "by_trainer"])
def test_each_rank_is_a_replica(name: str, tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start(2, rank_of_two, name, free_port(), tmp_path)
        first, second = processes.results(timeout_s=180).values()
    assert first["rounds"] == second["rounds"] == 2
    assert first["digest"] == second["digest"]
    assert not torch.equal(first["local"], second["local"])
