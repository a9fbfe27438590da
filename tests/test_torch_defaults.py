"""Nothing depends on torch's global defaults: types, devices, and modes that a user or a plug-in may have set."""

import ast
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._device import _device_constructors

import diloco
from diloco import testing
from diloco.algorithm import AlphaMerge, Codec, Nesterov, SyncSchedule, collect_buffers
from diloco.outer import DiLoCo
from diloco.transport import InProcessTransport
from tests.algorithm.codecs import BOUNDED, COARSE
from tests.same import same

ROOT = Path(diloco.__file__).parent
FACTORIES = {f"torch.{function.__name__}" for function in _device_constructors()}
FOLLOW_THE_CALLER = {"model/modules.py", "model/transformer.py"}  # a module is built on the device of `torch.device`


def test_every_new_tensor_names_its_type_and_device() -> None:
    unnamed = []
    for path in ROOT.rglob("*.py"):
        text, name = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
        wanted = {"dtype"} if name in FOLLOW_THE_CALLER else {"dtype", "device"}
        for node in ast.walk(ast.parse(text if "torch" in text else "")):
            if isinstance(node, ast.ImportFrom) and node.module == "torch":
                assert not FACTORIES & {f"torch.{alias.name}" for alias in node.names}, "call it as torch.NAME"
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in FACTORIES:
                continue
            if missing := wanted - {keyword.arg for keyword in node.keywords}:
                unnamed.append(f"{name}, line {node.lineno}: {ast.unparse(node)} does not name {missing}")
    assert not unnamed


@contextmanager
def changed(choose: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    choose(value)
    try:
        yield
    finally:
        choose(before)


DEFAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "bfloat16": lambda: changed(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "float16": lambda: changed(torch.set_default_dtype, torch.float16, torch.float32),
    "float64": lambda: changed(torch.set_default_dtype, torch.float64, torch.float32),
    # also fills every new tensor with NaN or the largest integer
    "deterministic": lambda: changed(torch.use_deterministic_algorithms, True, False),
    "matmul-precision": lambda: changed(torch.set_float32_matmul_precision, "medium", "highest"),
    "default-device": lambda: changed(torch.set_default_device, "meta", None),
    "device-context": lambda: torch.device("meta"),
    "no-grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


class Model(nn.Module):
    """Has float32 and bfloat16 parameters, and floating-point and integer buffers."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.wide = nn.Parameter(torch.randn(300, 7, generator=generator))
        self.narrow = nn.Parameter(torch.randn(501, generator=generator).bfloat16())
        self.norm = nn.BatchNorm1d(3)


def histories(make: Callable[[], Codec], feedback: float, around: Callable[[], AbstractContextManager[Any]]) -> Any:
    """Train two replicas by drawn updates, with everything of ours inside ``around``, and return what they hold."""
    generator = torch.Generator().manual_seed(1)
    models = [Model(), Model()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in models]
    updates = [[torch.randn(p.shape, generator=generator) * 0.01 for p in models[0].parameters()] for _ in range(16)]
    with around():
        hub = InProcessTransport(2)
        replicas = [
            DiLoCo(
                model,
                optimizer,
                transport=hub.endpoint(number),
                schedule=SyncSchedule(inner_steps=3, num_fragments=2, overlap_steps=1),
                fragments=diloco.partition(model, num_fragments=2, strategy="balanced"),
                outer_optimizer=Nesterov(learning_rate=0.4),
                merge=AlphaMerge(0.5),
                codec=make(),
                error_feedback=feedback,
            )
            for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True))
        ]
        for step in range(8):
            for number, model in enumerate(models):
                for parameter, update in zip(model.parameters(), updates[2 * step + number], strict=True):
                    parameter.detach().add_(update)
                model.norm.running_mean.add_(number)
            for replica in replicas:
                replica.begin()
            for replica in replicas:
                replica.finish()
            if step == 4:
                for replica in replicas:
                    replica.load_state_dict(replica.state_dict())
        for replica in replicas:
            replica.drain()
        with replicas[0].global_model() as model:
            of_global = {name: value.clone() for name, value in model.state_dict().items()}
        held = [replica.state_dict() for replica in replicas]
        digests = [replica.digest() for replica in replicas]
    assert digests[0] == digests[1]
    assert replicas[0].rounds_committed == 4, "a void round compares nothing"
    return held, of_global, [model.state_dict() for model in models], [collect_buffers(model) for model in models]


@pytest.mark.parametrize("codec", ["bfloat16", "int8", "fp4-built", "sign", "topk2"])
def test_a_global_default_of_torch_changes_no_bit(codec: str) -> None:
    make = (BOUNDED | COARSE)[codec]
    feedback = 0.95 if make().needs_error_feedback else 0.0
    plain = histories(make, feedback, torch.enable_grad)
    for name, default in DEFAULTS.items():
        assert same(histories(make, feedback, default), plain), name


@pytest.mark.parametrize("default", ["float16", "deterministic", "default-device", "autocast"])
def test_the_checks_of_plug_ins_judge_alike(default: str) -> None:
    with DEFAULTS[default]():
        testing.check_codec((BOUNDED | COARSE)["fp4"])
        testing.check_outer_optimizer(Nesterov())
        testing.check_merge_rule(AlphaMerge(0.5))
        testing.check_average_rule(diloco.SendersMean())
