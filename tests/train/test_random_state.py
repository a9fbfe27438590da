"""Replicas that take turns in one process draw only their own random numbers, and the process keeps its own."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from diloco.errors import CheckpointError, ConfigurationError, DiLoCoError
from diloco.model import ModelSettings, build_language_model
from diloco.state_tree import flatten, unflatten
from diloco.train import RandomState, RunSettings


def draw() -> tuple[Any, ...]:
    """Draw from every generator, with an odd number of normal numbers, so that one is left in its cache."""
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.random()),
        float(np.random.standard_normal()),
        torch.rand(3).tolist(),
        torch.randn(1).item(),
        torch.nn.functional.dropout(torch.ones(8)).tolist(),
    )


def drawn(state: RandomState, times: int = 1) -> list[tuple[Any, ...]]:
    result = []
    for _ in range(times):
        with state.active():
            result.append(draw())
    return result


@pytest.fixture(autouse=True)
def _own_generators() -> Iterator[None]:
    """Restore the generators of the process after each test, as these tests draw from them."""
    with RandomState(99, 99).active():
        yield


@pytest.mark.parametrize("cached_normals", [False, True])
@pytest.mark.parametrize("bits", [np.random.MT19937, np.random.PCG64])
def test_the_process_gets_back_exactly_what_it_had(bits: type[np.random.BitGenerator], cached_normals: bool) -> None:
    state = RandomState(0, 0)

    def history(between: Callable[[], object]) -> list[tuple[Any, ...]]:
        mine = bits(5)
        np.random.mtrand.set_bit_generator(mine)
        random.seed(6)
        torch.manual_seed(7)
        if cached_normals:
            random.gauss(0, 1)
            np.random.standard_normal()
        result = []
        for _ in range(3):
            between()
            result.append(draw())
        assert np.random.mtrand.get_bit_generator() is mine
        return result

    assert history(lambda: drawn(state)) == history(lambda: None)


def test_replicas_in_turns_draw_what_each_would_draw_alone() -> None:
    alone = [drawn(RandomState(3, replica), times=3) for replica in range(3)]
    together = [RandomState(3, replica) for replica in range(3)]
    in_turns: list[list[tuple[Any, ...]]] = [[], [], []]
    for _ in range(3):
        for replica, state in enumerate(together):
            in_turns[replica] += drawn(state)
            draw()  # the process keeps drawing too
    assert in_turns == alone


def test_turns_do_not_cut_a_stream() -> None:
    whole, pieces = RandomState(3, 0), RandomState(3, 0)
    with whole.active():
        expected = [draw() for _ in range(4)]
    assert drawn(pieces, times=4) == expected


def test_seeds_and_replicas_all_differ() -> None:
    draws = [drawn(RandomState(seed, replica))[0] for seed in (0, 1, 2**40) for replica in (0, 1, 1000)]
    for kind in zip(*draws, strict=True):
        assert len(set(map(str, kind[:6]))) == len(kind[:6])
    assert drawn(RandomState(1, 1000)) == [draws[5]]


def test_the_largest_seed_works_everywhere() -> None:
    seed = RunSettings(seed=2**63 - 1).seed
    tiny = ModelSettings(layers=1, width=8, heads=2, ffn_width=8, vocab_size=9)
    assert build_language_model(tiny, seed=seed).num_parameters() > 0
    assert len(drawn(RandomState(seed, 3))) == 1


@pytest.mark.parametrize(("seed", "replica"), [(-1, 0), (0, -1)])
def test_negative_seeds_are_refused(seed: int, replica: int) -> None:
    with pytest.raises(ConfigurationError, match=f"got seed={seed} and replica={replica}"):
        RandomState(seed, replica)


def test_an_exception_leaves_both_sides_in_order() -> None:
    state, expected = RandomState(0, 0), drawn(RandomState(0, 0), times=2)
    outside = torch.get_rng_state()

    def fail() -> None:
        with state.active():
            assert draw() == expected[0]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.equal(torch.get_rng_state(), outside)
    assert drawn(state) == expected[1:]


def test_different_states_nest() -> None:
    outer, inner = RandomState(0, 0), RandomState(0, 1)
    result = []
    with outer.active():
        result.append(draw())
        inside = drawn(inner, times=2)
        result.append(draw())
    assert result == drawn(RandomState(0, 0), times=2)
    assert inside == drawn(RandomState(0, 1), times=2)


def test_while_active_the_same_state_can_be_neither_activated_nor_saved_nor_loaded() -> None:
    state, other = RandomState(0, 0), RandomState(0, 1).state_dict()
    with state.active():
        with pytest.raises(DiLoCoError, match="activated while it is active"), state.active():
            pass
        with pytest.raises(DiLoCoError, match="while it is active"):
            state.state_dict()
        with pytest.raises(DiLoCoError, match="while it is active"):
            state.load_state_dict(other)
        first = draw()
    assert [first] == drawn(RandomState(0, 0))


def test_numpys_own_functions_work_inside() -> None:
    with RandomState(0, 0).active():
        np.random.seed(1)
        saved = np.random.get_state()
        first = np.random.standard_normal(3).tolist()
        np.random.set_state(saved)
        assert np.random.standard_normal(3).tolist() == first == np.random.RandomState(1).standard_normal(3).tolist()


def through_text(state: RandomState) -> dict[str, Any]:
    skeleton, tensors = flatten(state.state_dict())
    loaded: dict[str, Any] = unflatten(json.loads(json.dumps(skeleton, allow_nan=False)), tensors)
    return loaded


@pytest.mark.parametrize("draws", [0, 1, 2])
def test_a_saved_state_goes_on_where_it_was(draws: int) -> None:
    state, other = RandomState(0, 0), RandomState(5, 5)
    drawn(state, draws)
    saved = through_text(state)
    expected = drawn(state, times=3)  # the saved state does not change with it
    other.load_state_dict(saved)
    assert drawn(other, times=3) == expected


def damaged(path: str, value: Any) -> dict[str, Any]:
    state = RandomState(0, 0).state_dict()
    *parents, last = path.split(".")
    place = state
    for name in parents:
        place = place[name]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value
    return state


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("torch", KeyError),
        ("python", None),
        ("numpy.position", KeyError),
        ("python.words", torch.zeros(624, dtype=torch.int64)),
        ("python.words", torch.zeros(625)),
        ("python.words", torch.full((625,), 625)),
        ("python.words", torch.full((625,), -1)),
        ("python.normal", "x"),
        ("numpy.words", torch.full((624,), 2**32)),
        ("numpy.words", torch.zeros(623, dtype=torch.int64)),
        ("numpy.position", 625),
        ("numpy.position", -1),
        ("numpy.normal", "x"),
        ("torch", torch.zeros(5056)),
        ("torch", torch.zeros(5055, dtype=torch.uint8)),
        ("torch", b""),
        ("cuda", 3),
        ("cuda", [b""]),
        ("cuda_seed", -1),
    ],
)
def test_a_malformed_state_is_refused_and_changes_nothing(path: str, value: Any) -> None:
    state = RandomState(1, 1)
    with pytest.raises(CheckpointError, match=r"random state is malformed: .* Nothing was loaded"):
        state.load_state_dict(damaged(path, value))
    assert drawn(state) == drawn(RandomState(1, 1))


def playing_cuda(patch: pytest.MonkeyPatch, devices: list[torch.Generator]) -> None:
    """Simulate that CUDA is initialised, with these as the generators of its devices."""
    patch.setattr(torch.cuda, "is_initialized", lambda: True)
    patch.setattr(torch.cuda, "default_generators", devices)


class TestDevices:
    """CPU generators stand in for those of CUDA, as only the time at which they exist matters."""

    @pytest.fixture
    def devices(self, monkeypatch: pytest.MonkeyPatch) -> list[torch.Generator]:
        devices = [torch.Generator().manual_seed(11), torch.Generator().manual_seed(12)]
        playing_cuda(monkeypatch, devices)
        return devices

    @staticmethod
    def roll(devices: list[torch.Generator]) -> list[int]:
        return [int(torch.randint(10**9, (), generator=generator)) for generator in devices]

    def test_each_device_has_its_own_state_in_turns_and_over_a_save(self, devices: list[torch.Generator]) -> None:
        first, second = RandomState(0, 0), RandomState(0, 1)
        outside = [generator.get_state() for generator in devices]
        rolls: dict[str, list[list[int]]] = {"first": [], "second": []}
        for _ in range(2):
            for name, state in (("first", first), ("second", second)):
                with state.active():
                    rolls[name].append(self.roll(devices))
        assert all(torch.equal(generator.get_state(), state) for generator, state in zip(devices, outside, strict=True))
        whole = RandomState(0, 0)
        with whole.active():
            assert [self.roll(devices), self.roll(devices)] == rolls["first"] != rolls["second"]
        resumed = RandomState(7, 7)
        resumed.load_state_dict(through_text(first))
        with first.active():
            expected = self.roll(devices)
        with resumed.active():
            assert self.roll(devices) == expected

    def test_devices_started_later_begin_from_the_seed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        early, late = RandomState(0, 0), RandomState(0, 0)
        drawn(late)
        devices = [torch.Generator()]
        playing_cuda(monkeypatch, devices)
        results = []
        for state in (early, late):
            with state.active():
                results.append(self.roll(devices))
        assert results[0] == results[1]

    def test_starting_them_inside_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        state = RandomState(0, 0)
        with pytest.raises(ConfigurationError, match="CUDA was initialised while"), state.active():
            playing_cuda(monkeypatch, [torch.Generator()])
