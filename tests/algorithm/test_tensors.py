"""Conversion of buffers to flat vectors and back, for every dtype that a model may have."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from diloco.algorithm import collect_buffers, restore_buffers_

VALUES: dict[str, Tensor] = {
    "float32_values": torch.tensor([[1.5, -0.1], [1e-30, 3e38]]),
    "float16_values": torch.tensor([0.1, 65504.0], dtype=torch.float16),
    "bfloat16_values": torch.tensor([0.1, 3e38], dtype=torch.bfloat16),
    "int64_values": torch.tensor([2**62 + 1, -1]),
    "int32_values": torch.tensor([[2**31 - 1], [-(2**31)]], dtype=torch.int32),
    "int16_values": torch.tensor([-3, 300], dtype=torch.int16),
    "bool_values": torch.tensor([True, False, True]),
    "uint8_values": torch.tensor([0, 255], dtype=torch.uint8),
    "scalar": torch.tensor(2.5),
    "count": torch.tensor(7),
    "flag": torch.tensor(True),
    "nothing": torch.empty(0, 3),
    "no_integers": torch.empty(0, dtype=torch.int64),
}


class Holder(nn.Module):
    def __init__(self, values: Mapping[str, Tensor], *, fill: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        for name, value in values.items():
            self.register_buffer(name, value.clone() if fill is None else torch.full_like(value, fill))


@pytest.mark.parametrize("name", [*VALUES, "all of them"])
def test_what_is_collected_is_restored(name: str) -> None:
    """A wider type may follow an odd number of bytes."""
    values = dict(VALUES) if name == "all of them" else {name: VALUES[name]}
    source, target = Holder(values), Holder(values, fill=1)
    restore_buffers_(target, *collect_buffers(source))
    for each, value in values.items():
        restored = target.get_buffer(each)
        assert torch.equal(restored, value)
        assert (restored.dtype, restored.shape) == (value.dtype, value.shape)


def test_what_is_collected_is_a_copy() -> None:
    """The buffers keep changing while the contribution is in flight."""
    values = {"x": torch.ones(3), "n": torch.tensor([1])}
    model = Holder(values)
    floats, integers = collect_buffers(model)
    model.get_buffer("x").fill_(9)
    model.get_buffer("n").fill_(9)
    assert floats is not None
    assert integers is not None
    assert floats.tolist() == [1, 1, 1]
    assert integers[0] == 1


def test_those_that_are_not_persistent_are_left_alone() -> None:
    model = Holder({"x": torch.ones(2)})
    model.register_buffer("table", torch.ones(3), persistent=False)
    model.register_buffer("index", torch.ones(3, dtype=torch.int64), persistent=False)
    model.register_buffer("cos", torch.ones(2, dtype=torch.complex64), persistent=False)
    floats, integers = collect_buffers(model)
    assert floats is not None
    assert floats.tolist() == [1, 1]
    assert integers is None
    restore_buffers_(model, torch.tensor([5.0, 6.0]), None)
    assert model.get_buffer("x").tolist() == [5, 6]
    assert model.get_buffer("table").tolist() == [1, 1, 1]
