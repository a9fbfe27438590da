"""The digest of what replicas agree on: a plain reference, and the kinds of differences that it finds."""

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diloco.algorithm import OuterState, digest_state, digest_tensors
from tests.transport.wires import at_once

BLOCK = 2048  # lanes of four bytes
PIECE = 1 << 16  # lanes that torch sums at once
KEYS = struct.unpack(f"<{2 * BLOCK}i", hashlib.shake_128(b"diloco digest").digest(8 * BLOCK))
IMPLEMENTATIONS = (None, "torch")  # None: the C kernel if a compiler was found, else torch


def plain_digest(name: str, data: bytes) -> str:
    """Return what the module's docstring says, in plain Python."""
    digest = hashlib.blake2b(name.encode() + b"\0" + struct.pack("<q", len(data)), digest_size=16)
    whole = len(data) // 4
    lanes = struct.unpack(f"<{whole}i", data[: 4 * whole])
    for start in range(0, whole, BLOCK):
        block = lanes[start : start + BLOCK]
        for keys in (KEYS[:BLOCK], KEYS[BLOCK:]):
            total = sum(key * lane for key, lane in zip(keys, block, strict=False))
            digest.update(struct.pack("<Q", total % 2**64))
    digest.update(data[4 * whole :])
    return digest.hexdigest()


def tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_implementation_gives_the_digest_of_the_plain_one(implementation: str | None) -> None:
    generator = torch.Generator().manual_seed(3)
    edges = [4 * lanes + rest for lanes in (0, 1, 15, 16, 17, BLOCK, 2 * BLOCK + 33) for rest in (-3, -1, 0, 2)]
    for size in (*(size for size in edges if size >= 0), 4 * (PIECE + BLOCK) + 7, 8 * PIECE):
        values = torch.randint(256, (size + 1,), dtype=torch.uint8, generator=generator)
        for data in (values[:-1], values[1:], torch.full_like(values, 255)):  # at an odd address, and with carries
            assert digest_tensors({"é": data}, implementation) == plain_digest("é", bytes(data.tolist())), size


@given(st.binary(max_size=99), st.text(max_size=3))
def test_any_bytes_and_names_have_the_digest_of_the_plain_one(data: bytes, name: str) -> None:
    assert {digest_tensors({name: tensor_of(data)}, how) for how in IMPLEMENTATIONS} == {plain_digest(name, data)}


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Compute with this number of torch's threads inside a ``with`` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_it_is_the_same_with_any_number_of_threads(implementation: str | None) -> None:
    values = torch.randn(3 * PIECE + 5, generator=torch.Generator().manual_seed(0))
    expected = plain_digest("x", values.numpy().tobytes())
    for number in (1, 3):
        with threads(number):
            assert at_once([lambda: digest_tensors({"x": values}, implementation)] * 3) == [expected] * 3


SIZE = 67


def flipped(values: Tensor, index: int, bit: int) -> Tensor:
    copy = values.clone()
    copy.view(torch.int32)[index] ^= -(1 << 31) if bit == 31 else 1 << bit
    return copy


@given(index=st.integers(0, SIZE - 1), bit=st.integers(0, 31))
def test_any_one_bit_of_parameters_or_momentum_changes_it(index: int, bit: int) -> None:
    """Property: this includes the sign of a zero and the payload of a NaN."""
    params, momentum = torch.zeros(SIZE), torch.full((SIZE,), float("nan"))
    digest = digest_state(params, OuterState(3, {"momentum": momentum}))
    assert digest_state(flipped(params, index, bit), OuterState(3, {"momentum": momentum})) != digest
    assert digest_state(params, OuterState(3, {"momentum": flipped(momentum, index, bit)})) != digest
    assert digest_state(params.clone(), OuterState(3, {"momentum": momentum.clone()})) == digest


LONG = 3 * BLOCK + 11
PLACES = st.integers(0, LONG - 1)
BITS = st.integers(-(2**31), 2**31 - 1)


def lanes() -> Tensor:
    return torch.randint(-(2**31), 2**31, (LONG,), dtype=torch.int32, generator=torch.Generator().manual_seed(8))


def digest(values: Tensor) -> str:
    (found,) = {digest_tensors({"x": values}, how) for how in IMPLEMENTATIONS}
    return found


@given(PLACES, BITS, BITS)
def test_any_difference_within_one_value_changes_it(place: int, one: int, other: int) -> None:
    values, changed = lanes(), lanes()
    values[place], changed[place] = one, other
    assert (digest(values) == digest(changed)) == (one == other)


@given(PLACES, PLACES)
def test_two_values_that_are_swapped_change_it(one: int, other: int) -> None:
    values, changed = lanes(), lanes()
    changed[one], changed[other] = values[other], values[one]
    assert (digest(values) == digest(changed)) == torch.equal(values, changed)


@given(st.sets(PLACES, min_size=1, max_size=40), st.sampled_from([1 << 30, -(1 << 31), 1, 0x00FF00FF]))
def test_the_same_bits_flipped_in_several_values_change_it(places: set[int], mask: int) -> None:
    """Property: among them the signs of many values, each of which is a difference of 2^31."""
    changed = lanes()
    changed[sorted(places)] ^= mask
    assert digest(changed) != digest(lanes())


@given(st.permutations([*range(6)]))
def test_any_other_order_of_blocks_changes_it(order: list[int]) -> None:
    blocks = torch.arange(6 * BLOCK, dtype=torch.int32).view(6, BLOCK)
    assert (digest(blocks[order].view(-1)) == digest(blocks.view(-1))) == (order == sorted(order))


@given(st.integers(1, LONG - 1))
def test_values_that_are_moved_on_or_left_out_change_it(distance: int) -> None:
    values = lanes()
    assert len({digest(each) for each in (values, values.roll(distance), values[distance:], values[:-distance])}) == 4


def test_what_sums_without_places_would_miss_changes_it() -> None:
    values = torch.linspace(-1.0, 1.0, LONG)
    zeros = torch.zeros(LONG)
    different = [values, values.flip(0), -values, values.abs(), values.sort(descending=True).values.roll(1)]
    different += [zeros, -zeros, torch.zeros(LONG + 1), torch.zeros(LONG - 1), torch.zeros(2 * LONG)]
    assert len({digest(each) for each in different}) == len(different)


def test_the_outer_step_the_slots_and_their_names_are_in_it() -> None:
    params, one, two = torch.ones(4), torch.zeros(4), torch.full((4,), 2.0)
    states = [
        *(OuterState(step) for step in (1, 2, 12)),
        OuterState(1, {"mean": one, "square": two}),
        OuterState(1, {"mean": two, "square": one}),
        OuterState(1, {"first": one, "square": two}),
        OuterState(1, {"mean": one}),
    ]
    assert len({digest_state(params, state) for state in states}) == len(states)


def test_it_is_the_same_on_every_machine_and_for_every_layout_in_memory() -> None:
    """A change here makes old and new replicas diverge, so it needs another version of the protocol."""
    values = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    same = [
        values.view(-1),
        values.t().contiguous().t(),  # columns first
        torch.stack([values, -values], dim=2)[..., 0],  # every other value
        torch.cat([torch.zeros(1), values.view(-1)])[1:],  # at an offset in its memory
        torch.cat([torch.zeros(1), values.view(-1)]).bfloat16()[1:].float(),
        values.clone().requires_grad_(),
    ]
    assert {digest_tensors({"x": each}) for each in same} == {digest_tensors({"x": values})}
    assert digest_tensors({"x": values.t()}) != digest_tensors({"x": values})
    halves = torch.cat([torch.zeros(1), values.view(-1)]).bfloat16()[1:]  # at an address that no lane has
    assert digest_tensors({"x": halves}) == digest_tensors({"x": halves.clone()}) != digest_tensors({"x": values})
    assert digest_tensors({"x": values[0]}) == "9f570fe863a00a0bb236315548177e42"
