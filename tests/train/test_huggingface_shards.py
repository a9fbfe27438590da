"""Models of ``transformers`` whose ranks each read their own part of the stored weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diloco.algorithm import local_shard
from diloco.model import ModelSettings, build_language_model
from diloco.train import parallelise
from tests.finetuning import write_base
from tests.processes import Processes
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


def rank_fills(position: int, settings: ModelSettings, place: Path) -> dict[str, Any]:
    setup = Setup(strategy="fsdp", size=2)
    group = open_group(setup, position, place)
    with Peak() as peak:
        model = build_language_model(settings, seed=0, device="meta")
        parallel = parallelise(model, "fsdp", group, CPU)
        model.fill(CPU, seed=0, group=group)
    parts = parallel.loss(TOKENS[:, :-1], TOKENS[:, 1:])
    torch.autograd.backward(parts.loss)
    done = {"peak": peak.nbytes, "loss": float(parts.loss.detach())}
    done |= {"values": {name: whole(value).clone() for name, value in model.state_dict().items()}}
    done |= {"gradients": {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.requires_grad}}
    group.close()
    return done


@pytest.mark.parametrize(
    ("name", "changes", "peaks"),
    [
        ("Llama", {}, (0.8, 0.8)),
        ("Qwen3", {}, (0.8, 0.8)),  # tied
        ("Llama", {"lora_rank": 2, "arguments": {"base_dtype": "bfloat16"}}, (3, 0.8)),
        ("Llama", {"arguments": {"weights": "fresh"}}, (3, 0.8)),
        ("Mixtral", {}, (3, 0.8)),  # experts are stored one by one
    ],
)
def test_no_rank_but_the_first_ever_holds_a_whole_model(
    name: str, changes: dict[str, Any], peaks: tuple[float, float], tmp_path: Path
) -> None:
    """Nor does the first if all values are stored under their names. All numbers are those of one rank."""
    settings = ModelSettings(source=f"hf:{write_base(tmp_path / 'base', name=name, num_hidden_layers=8)}", **changes)
    (tmp_path / "store").mkdir()
    with Processes() as processes:
        processes.start(2, rank_fills, settings, tmp_path / "store")
        ranks = list(processes.results(timeout_s=300).values())
    model = build_language_model(settings, seed=0)
    parts = model.loss(TOKENS[:, :-1], TOKENS[:, 1:])
    torch.autograd.backward(parts.loss)
    size = sum(value.nbytes for value in model.state_dict().values())
    for rank, most in zip(ranks, peaks, strict=True):
        assert size / 2 <= rank["peak"] < most * size
        assert rank["values"].keys() == model.state_dict().keys()
        assert all(torch.equal(rank["values"][key], value) for key, value in model.state_dict().items())
        assert rank["loss"] == pytest.approx(float(parts.loss.detach()), abs=1e-5)
        for key, gradient in rank["gradients"].items():
            torch.testing.assert_close(gradient, model.get_parameter(key).grad, rtol=1e-4, atol=1e-6)
