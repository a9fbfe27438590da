"""The wire format of state, its blocks, the choice of donors, their cache and their rate limit, as values."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.errors import TransportError
from diloco.transport import (
    MAX_DEPTH,
    Assembly,
    Description,
    Snapshot,
    SnapshotCache,
    TokenBucket,
    block_bytes,
    choose,
    describe,
    donors_in_turn,
)
from tests.same import same_values

numbers = st.integers() | st.floats(allow_nan=True) | st.booleans() | st.none()
scraps = st.sampled_from(["skeleton", "tensors", "tensor", "dict", "float", "torch.float32", "torch.bool", "bytes", ""])
anything = st.recursive(
    numbers | scraps | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(scraps | st.text(max_size=3), inner, max_size=4),
    max_leaves=30,
)
tensors = st.tuples(
    st.sampled_from([torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8]),
    st.lists(st.integers(0, 4), max_size=3),
).map(lambda made: torch.arange(torch.Size(made[1]).numel(), dtype=made[0]).reshape(made[1]))
plain = st.integers(-(2**62), 2**62) | st.floats(allow_nan=False, allow_infinity=False) | st.text() | st.booleans()
states = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        tensors | plain | st.none(),
        lambda inner: st.dictionaries(st.text(max_size=5), inner, max_size=4),
        max_leaves=12,
    ),
    max_size=5,
)


@given(anything, anything)
@settings(max_examples=100, deadline=None)
def test_whatever_is_offered_is_taken_or_refused_and_never_more(message: Any, tensors: Any) -> None:
    for offered in ({"skeleton": message, "tensors": tensors}, {"skeleton": {"dict": {"a": message}}}, message):
        if not isinstance(offered, dict):
            continue
        try:
            found = Description.from_message(offered, 1000)
        except TransportError:
            continue
        assert found.size_bytes <= 1000
        found.allocate()


@given(states, st.integers(1, 100), st.randoms())
@settings(max_examples=80, deadline=None)
def test_a_state_arrives_as_it_was_in_whatever_pieces(state: dict[str, Any], piece: int, random: Any) -> None:
    said, values = describe(state)
    heard = Description.from_message(json.loads(json.dumps(said.to_message())), values.size_bytes)
    assert heard == said
    assembly = Assembly(heard)
    asked = []
    while (block := assembly.take([], 1)) is not None:
        asked.append(block)
    random.shuffle(asked)
    for block in asked:
        assert not assembly.complete
        while block.missing_bytes:
            assembly.put(block, values.read(block.offset, min(piece, block.missing_bytes)), 0)
    assert assembly.complete
    assert same_values(assembly.state, state)


@pytest.mark.parametrize("sharers", [1, 2, 3])
def test_nobody_is_asked_for_more_ahead_than_a_part_of_its_share(sharers: int) -> None:
    said, _ = describe({"a": torch.zeros(30 << 20, dtype=torch.uint8)})
    assembly, asked, count = Assembly(said), [], len(said.blocks)
    while (block := assembly.take(asked, sharers)) is not None:
        asked.append(block)
    assert count // (5 * sharers) <= len(asked) <= count // (4 * sharers)
    assembly.give_back(asked)
    assert [each.index for each in assembly.waiting] == list(range(count))


def test_a_donor_is_asked_for_what_a_usual_link_holds_however_little_its_share_is() -> None:
    said, _ = describe({"a": torch.zeros(3 << 20, dtype=torch.uint8)})
    assembly, asked = Assembly(said), []
    while (block := assembly.take(asked, 3)) is not None:
        asked.append(block)
    ahead = sum(each.missing_bytes for each in asked)
    assert (2 << 20) - asked[0].missing_bytes < ahead <= 2 << 20


def of_one(*entry: Any) -> dict[str, Any]:
    """Return an offer of one tensor."""
    return {"skeleton": {"dict": {"a": {"tensor": "a"}}}, "tensors": {"a": list(entry)}}


TWO = {"dict": {"a": {"tensor": "a"}, "b": {"tensor": "b"}}}


@pytest.mark.parametrize(
    ("offer", "words"),
    [
        ({"skeleton": 1}, "not a dictionary"),
        ({"skeleton": {"tensor": "a"}, "tensors": {"a": ["torch.uint8", [1]]}}, "not a dictionary"),
        (of_one("torch.bool", [1]), "a tensor of 'torch.bool'"),
        (of_one("torch.float32", [-1]), "shape"),
        (of_one("torch.float32", [True]), "shape"),
        (of_one("torch.float32", [0, 1 << 62]), "shape"),
        ({"skeleton": TWO, "tensors": {"a": ["torch.uint8", [501]], "b": ["torch.uint8", [500]]}},
         "at least 1001 bytes, but at most 1000"),
        (of_one("torch.uint8", [1] * 9), "shape"),
        (of_one("torch.uint8"), "malformed"),
        ({"skeleton": {"dict": {str(n): 0 for n in range(5000)}}}, "more than 4096 entries"),
        ({"skeleton": {"dict": {"a" * 1001: 0}}}, "an invalid name"),
        ({"skeleton": {"dict": {"a": float("inf")}}}, "malformed"),
        ({"skeleton": {"dict": {"a": 1 << 64}}}, "malformed"),
        ({"skeleton": {"dict": {"a": [1]}}}, "malformed"),
        ({"skeleton": {"dict": {"a": {"float": "inf"}}}}, "malformed"),
        ({"skeleton": {"dict": {"a": {"array": "a"}}}, "tensors": {"a": ["torch.uint8", [1]]}}, "malformed"),
        ({"skeleton": {"dict": {"a": {"tensor": "a", "dict": {}}}}}, "malformed"),
        ({"skeleton": {"dict": []}}, "malformed"),
        ({"skeleton": {"dict": {}}}, "each of its tensors exactly once"),
        ({"skeleton": {"dict": {}}, "tensors": {"a": ["torch.uint8", [1]]}}, "each of its tensors exactly once"),
        ({"skeleton": TWO, "tensors": {"a": ["torch.uint8", [1]]}}, "each of its tensors exactly once"),
        ({"skeleton": {"dict": {"a": {"tensor": "a"}, "b": {"tensor": "a"}}}, "tensors": {"a": ["torch.uint8", [1]]}},
         "each of its tensors exactly once"),
        ({}, "not a dictionary"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_a_malformed_offer_is_refused(offer: Any, words: str) -> None:
    with pytest.raises(TransportError, match=words):
        Description.from_message(offer, 1000)


@pytest.mark.parametrize(("levels", "fine"), [(MAX_DEPTH, True), (MAX_DEPTH + 1, False)])
def test_how_deep_a_state_may_be(levels: int, fine: bool) -> None:
    state: Any = 1
    skeleton: Any = 1
    for _ in range(levels):
        state, skeleton = {"a": state}, {"dict": {"a": skeleton}}
    if fine:
        assert Description.from_message(describe(state)[0].to_message()).size_bytes == 0
    else:
        with pytest.raises(TransportError, match="8 levels"):
            describe(state)
        with pytest.raises(TransportError, match="8 levels"):
            Description.from_message({"skeleton": skeleton, "tensors": {}})


@pytest.mark.parametrize("value", [{1}, torch.ones(1, dtype=torch.bool), float("nan"), 1 << 70, [1]], ids=str)
def test_what_no_receiver_would_take_is_not_offered(value: Any) -> None:
    with pytest.raises(TransportError):
        describe({"a": value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bytes": 401}, "announces 401 bytes, but its tensors have 400"),
        ({"blocks": []}, "does not give the checksums of the 1 blocks"),
        ({"blocks": ["x"]}, "does not give the checksums"),
        ({"blocks": [16 * "0", 16 * "0"]}, "does not give the checksums"),
        ({"blocks": [16 * "0"]}, "names its snapshot"),
        ({"snapshot": None}, "names its snapshot 'None'"),
    ],
)
def test_an_offer_that_contradicts_itself_is_refused(change: dict[str, Any], words: str) -> None:
    message = describe({"a": torch.zeros(100)})[0].to_message()
    with pytest.raises(TransportError, match=words):
        Description.from_message({**message, **change})


@given(st.integers(1, 10**13))
def test_blocks_are_neither_too_many_nor_too_large(size_bytes: int) -> None:
    step = block_bytes(size_bytes)
    assert -(-size_bytes // step) <= 1 << 14
    assert step % 4096 == 0
    assert step <= max(1 << 22, size_bytes / (1 << 14) + 4096)


def test_order_of_names_is_no_difference() -> None:
    one, other = torch.arange(3), torch.arange(5.0)
    assert describe({"a": one, "b": other})[0].digest == describe({"b": other, "a": one})[0].digest
    assert describe({"a": one, "b": other})[0].digest != describe({"a": one, "c": other})[0].digest


sendings = st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5000)), min_size=1, max_size=50)


@given(sendings, st.floats(1, 1e6), st.integers(1, 10_000))
def test_no_more_leaves_than_the_bucket_allows(given_: list[tuple[float, int]], rate: float, burst: int) -> None:
    """Between any two departures, whenever they were requested."""
    bucket, now_s, left = TokenBucket(rate, burst), 0.0, []
    for pause_s, size in given_:
        now_s += pause_s
        left.append((now_s + bucket.take(now_s, size), size))
    for first in range(len(left)):
        total = 0
        for last in range(first, len(left)):
            total += left[last][1]
            span_s = left[last][0] - left[first][0]
            assert total <= (burst + left[first][1] + rate * span_s) * (1 + 1e-6) + 1e-3
    assert [when for when, _ in left] == sorted(when for when, _ in left), "first come, first served"


def test_without_a_limit_nobody_waits() -> None:
    bucket = TokenBucket(None, 1)
    assert [bucket.take(1.0, 1 << 40) for _ in range(3)] == [0.0, 0.0, 0.0]


def offer(finished: int | None, content: int) -> Description:
    more = {} if finished is None else {"finished_rounds": finished}
    return describe({"global_params": torch.tensor([content]), **more})[0]


@pytest.mark.parametrize(
    ("held", "needed", "taken"),
    [
        ({0: (1, 0)}, 1, 0),
        ({0: (1, 0), 1: (1, 9), 2: (1, 9)}, 1, 1),
        ({0: (1, 0), 1: (1, 0), 2: (2, 9)}, 1, 2),
        ({2: (1, 0), 1: (1, 9)}, 1, 1),
        ({0: (1, 0), 1: (2, 8), 2: (2, 9), 3: (2, 9)}, 1, 2),
        ({0: (1, 0), 1: (1, 0), 2: (2, 9)}, 2, 0),
        ({0: (1 << 50, 9), 1: (2, 0), 2: (1, 0)}, 2, None),
        ({0: (None, 0), 1: (3, 1), 2: (4, 2)}, 1, 0),
    ],
)
def test_whose_snapshot_is_taken(held: dict[int, tuple[int | None, int]], needed: int, taken: int | None) -> None:
    offers = {replica: offer(*each) for replica, each in held.items()}
    assert choose(offers, 5, needed) == (None if taken is None else offers[taken])
    assert choose({}, 0) is None


@given(st.lists(st.integers(0, 100), unique=True), st.integers(0, 50), st.integers(0, 20), st.integers(1, 5))
def test_every_donor_has_its_turn_once(donors: list[int], asker: int, fragment: int, together: int) -> None:
    groups = list(donors_in_turn(donors, asker, fragment, together))
    assert sorted(donor for group in groups for donor in group) == sorted(donors)
    assert all(len(group) == together for group in groups[:-1])


def snapshot(version: int = 0, content: int = 0, fragment: int = 0) -> Snapshot:
    return Snapshot(fragment, version, *describe({"a": torch.tensor([fragment, content])}))


def test_the_cache_lets_go_of_what_nobody_needs_and_of_nothing_else() -> None:
    cache = SnapshotCache(held_s=10, kept_s=30)
    used, broken = cache.add(snapshot(), 0.0), cache.add(snapshot(1, content=1), 0.0)
    used.users = broken.users = 1
    assert not cache.make_room(0, 100.0)
    assert cache.make_room(1, 100.0), "each fragment has its own room"
    cache.leave(broken, 100.0, broken=True)
    assert not cache.make_room(0, 109.0), "it is reserved, as it may be requested again"
    assert cache.named(0, broken.description.digest) is broken
    assert cache.make_room(0, 110.0)
    assert cache.snapshots == [used]
    cache.sweep(1000.0)
    assert cache.snapshots == [used]
    cache.leave(used, 1000.0, broken=False)
    cache.sweep(1029.0)
    assert cache.snapshots == [used]
    cache.sweep(1030.0)
    assert not cache.snapshots


def test_the_cache_knows_a_state_that_did_not_change_after_all() -> None:
    cache = SnapshotCache()
    first = cache.add(snapshot(1), 0.0)
    assert cache.add(snapshot(2), 1.0) is first
    assert cache.current(0, 2) is first
    assert cache.current(0, 1) is None
    assert cache.add(snapshot(3, content=1), 2.0) is not first
    assert cache.make_room(0, 3.0)
    assert [each.version for each in cache.snapshots] == [3], "the one that has been unused for longest is dropped"
