"""The state of an optimizer is loaded as it is."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from diloco.algorithm import load_optimizer_state, slots_on_host
from tests.same import same

STATES: dict[str, Any] = {
    "bfloat16": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    "float64": torch.tensor([1.0 + 2**-40, 2.0], dtype=torch.float64),
    "a count too large for float32": torch.tensor(2**53 + 1),
    "a mask": torch.tensor([True, False]),
    "quantised": torch.tensor([0, 255], dtype=torch.uint8),
    "float8": torch.tensor([1.0, 2.0]).to(torch.float8_e5m2),
    "text": "normal",
    "lists of tuples": [({"sum": torch.tensor([1, 2], dtype=torch.int16)}, None, 3)],
    "float32": torch.tensor([1.0, 2.0]),
}


def state_dict_of(value: Any) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0)
    return optimizer, {"state": {0: {"slot": value}}, "param_groups": optimizer.state_dict()["param_groups"]}


@pytest.mark.parametrize("name", STATES)
def test_every_value_keeps_its_type_and_bits(name: str) -> None:
    optimizer, state = state_dict_of(copy.deepcopy(STATES[name]))
    load_optimizer_state(optimizer, state)
    assert same(optimizer.state_dict()["state"][0]["slot"], STATES[name])


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_complex_moments_keep_their_imaginary_part() -> None:
    optimizer, state = state_dict_of(torch.tensor([1 + 2j, 3j]))
    load_optimizer_state(optimizer, state)
    assert optimizer.state_dict()["state"][0]["slot"].tolist() == [1 + 2j, 3j]


def test_what_an_optimizer_changes_while_it_loads_stays_changed() -> None:
    class Doubling(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            for slots in self.state.values():
                slots["slot"] = slots["slot"] * 2

    optimizer = Doubling([nn.Parameter(torch.zeros(2))], lr=1.0)
    groups = optimizer.state_dict()["param_groups"]
    load_optimizer_state(optimizer, {"state": {0: {"slot": torch.ones(2)}}, "param_groups": groups})
    assert optimizer.state_dict()["state"][0]["slot"].tolist() == [2.0, 2.0]


def test_moments_on_the_host_stay_there_and_others_beside_their_parameter() -> None:
    """A parameter without memory stands for one on a GPU."""
    optimizers = [torch.optim.SGD([nn.Parameter(torch.zeros(2, device="meta"))], lr=1.0) for _ in range(2)]
    (parameter,), (other,) = (each.param_groups[0]["params"] for each in optimizers)
    host, beside = torch.ones(2, dtype=torch.bfloat16), torch.ones(2, device="meta")
    optimizers[0].state[parameter] = {"host": host, "nested": {"too": [host]}, "beside": beside}
    on_host = slots_on_host(optimizers[0])
    assert on_host == ["host", "nested"]
    load_optimizer_state(optimizers[1], optimizers[0].state_dict(), on_host=on_host)
    loaded = optimizers[1].state[other]
    placed = loaded["host"], loaded["nested"]["too"][0], loaded["beside"]
    assert [(each.device.type, each.dtype) for each in placed] == [
        ("cpu", torch.bfloat16),
        ("cpu", torch.bfloat16),
        ("meta", torch.float32),
    ]
