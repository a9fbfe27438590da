"""Models of ``transformers`` whose ranks each read their own part of the stored weights."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diloco.algorithm import local_shard
from diloco.cli import main
from diloco.model import ModelSettings, build_language_model
from diloco.train import parallelise
from tests.finetuning import write_base
from tests.processes import Processes
from tests.runs import of_torchrun
from tests.train.ranks import CPU, Setup, open_group, whole

TOKENS = torch.arange(24).reshape(2, 12) % 11 + 40


class Peak(TorchDispatchMode):
    """Measures the bytes that exist at once of what operations made; mapped files don't count."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and not value.is_meta:
                storage = local_shard(value).untyped_storage()
                if storage.filename is None:
                    self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.live = {key: value for key, value in self.live.items() if not value[0].expired()}
        self.nbytes = max(self.nbytes, sum(size for _, size in self.live.values()))
        return result


def rank_fills(position: int, folder: Path, place: Path) -> dict[str, Any]:
    settings, setup = ModelSettings(source=f"hf:{folder}"), Setup(strategy="fsdp", size=2)
    group = open_group(setup, position, place)
    with Peak() as peak:
        model = build_language_model(settings, seed=0, device="meta")
        assert model.fits_shards()
        parallel = parallelise(model, "fsdp", group, CPU)
        model.fill(CPU, seed=0)
    parts = parallel.loss(TOKENS[:, :-1], TOKENS[:, 1:])
    torch.autograd.backward(parts.loss)
    done = {"peak": peak.nbytes, "loss": float(parts.loss.detach())}
    done |= {"values": {name: whole(value).clone() for name, value in model.state_dict().items()}}
    done |= {"gradients": {name: whole(p.grad).clone() for name, p in model.named_parameters()}}
    group.close()
    return done


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_no_rank_ever_holds_the_whole_model(name: str, tmp_path: Path) -> None:
    """Qwen3 is tied here. Values, loss and gradients are those of one rank."""
    folder = write_base(tmp_path / "base", name=name, num_hidden_layers=8)
    (tmp_path / "store").mkdir()
    with Processes() as processes:
        processes.start(2, rank_fills, folder, tmp_path / "store")
        ranks = list(processes.results(timeout_s=300).values())
    model = build_language_model(ModelSettings(source=f"hf:{folder}"), seed=0)
    parts = model.loss(TOKENS[:, :-1], TOKENS[:, 1:])
    torch.autograd.backward(parts.loss)
    size = 4 * model.num_parameters()
    for rank in ranks:
        assert size / 2 <= rank["peak"] < 0.8 * size
        assert rank["values"].keys() == model.state_dict().keys()
        assert all(torch.equal(rank["values"][key], value) for key, value in model.state_dict().items())
        assert rank["loss"] == pytest.approx(float(parts.loss.detach()), abs=1e-5)
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(rank["gradients"][key], parameter.grad, rtol=1e-4, atol=1e-6)


def test_what_is_not_stored_under_its_own_name_is_built_whole(tmp_path: Path) -> None:
    """Experts are stored one by one, and fresh weights and adapters are not stored."""
    llama, experts = write_base(tmp_path / "llama"), write_base(tmp_path / "experts", name="Mixtral")
    for source, changes, fits in (
        (llama, {}, True),
        (llama, {"lora_rank": 2}, False),
        (llama, {"arguments": {"weights": "fresh"}}, False),
        (experts, {}, False),
    ):
        settings = ModelSettings(source=f"hf:{source}", **changes)  # type: ignore[arg-type]  # varied by name
        assert build_language_model(settings, seed=0, device="meta").fits_shards() is fits


def rank_trains(position: int, ports: list[int], commands: list[str]) -> None:
    for port, command in zip(ports, commands, strict=True):
        os.environ.update(of_torchrun(position, 2, port))
        assert main(["train", *command.split(), "--monitor.console", "quiet"]) == 0


def test_a_run_on_shards_stops_and_goes_on(data: Path, tmp_path: Path) -> None:
    """The shards are filled from the stored weights at the beginning, and from the checkpoint when it is resumed."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    begin = f"--model hf:{write_base(tmp_path / 'base')} --data {data} --replicas 1 --replica-size 2 --device cpu"
    begin += " --train.parallelism fsdp --steps 4 --inner-steps 2 --batch-size 2 --sequence-length 16"
    begin += " --data-parallel-steps 0 --optimizer.warmup-steps 0 --evaluation.sample-prompts --network.silence 60s"
    commands = [f"{begin} --out {whole}", f"{begin} --out {run} --stop-after 2", f"--resume {run} --stop-after 4"]
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in commands]
    with Processes() as processes:
        processes.start(2, rank_trains, [store.port for store in stores], commands)
        processes.results(timeout_s=300)
    one, other = (json.loads((folder / "summary.json").read_text())["global_params_digest"] for folder in (whole, run))
    assert one == other
