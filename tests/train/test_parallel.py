"""The ranks of a replica together compute the same as one rank, and see every change of weights (invariant 10)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.algorithm import Float32, digest_tensors, local_shard, make_codec
from diloco.errors import ConfigurationError
from diloco.model import build_model
from diloco.train import GradientAverager, OptimizerSettings, make_inner_optimizer, parallelise
from diloco.transport import InProcessTransport, ReplicaGroup
from tests.processes import Processes
from tests.train.ranks import MODEL, STEPS, Rank, Setup, largest_difference, open_group, unequal

CLIPPED = {"clip_norm": 0.25, "accumulation": 2, "batch_size": 5}
"""Uneven shares of a batch in pieces, with clipping in effect."""

EXACT = {"clip_norm": None, "accumulation": 1, "batch_size": 2}
"""Ranks that compute the same rows have the bits of one rank: the mean of two equal numbers is that number."""


def ranks_do(position: int, setup: Setup, folder: Path) -> dict[str, Any]:
    """Run all jobs of a rank, one after the other."""
    done: dict[str, Any] = {}
    for number, (job, of_job) in enumerate(
        [
            (rank_trains, replace(setup, **CLIPPED)),
            (rank_trains_alike, replace(setup, codec="fp4", copies=2, **EXACT)),
            (rank_overflows, replace(setup, precision="float16")),
            (rank_averages_gradients, setup),
            (rank_is_refused, setup),
            (rank_trains_sparingly, replace(setup, sparing=True, **CLIPPED)),
        ]
    ):
        group = open_group(of_job, position, folder, replica=number)
        done[job.__name__] = job(of_job, group)
        group.close()
    return done


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    """The strategy, and the results of each of two ranks."""
    setup = Setup(strategy=request.param, size=2)
    with Processes() as processes:
        processes.start(2, ranks_do, setup, tmp_path_factory.mktemp("ranks"))
        return request.param, list(processes.results(timeout_s=300).values())


def rank_trains(setup: Setup, group: ReplicaGroup) -> dict[str, Any]:
    rank = Rank(setup, group)
    losses, norms, digests, evaluated = [], [], [], []
    heldout = torch.arange(26).view(2, 13) % 17
    for _ in range(STEPS):
        with rank.diloco.global_model(), torch.no_grad():  # between any two steps, including right before a merge
            evaluated.append(float(rank.model.loss(heldout[:, :-1], heldout[:, 1:]).loss))
        loss, inner = rank.step()
        losses.append(loss)
        norms.append(inner.gradient_norm)
        digests.append(digest_tensors({n: local_shard(p) for n, p in rank.model.named_parameters()}))
    return {
        "losses": losses,
        "norms": norms,
        "evaluated": evaluated,
        "digests": digests,
        "values": rank.values(),
        "held": sum(local_shard(parameter).numel() for parameter in rank.model.parameters()),
        "global held": sum(values.numel() for values in rank.diloco.outer_loop.global_params),
        "committed": rank.diloco.rounds_committed,
    }


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """Return the results of a single rank."""
    return rank_trains(Setup(**CLIPPED), ReplicaGroup())


def assert_train_as_one(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """They agree to the round-off of float32 over two merges of each of three fragments."""
    assert alone["committed"] == 6
    assert len(set(alone["evaluated"])) == 7, "global parameters move when a fragment is merged, and only then"
    assert min(alone["norms"]) > 0.25, "the gradient is clipped at every step"
    for rank in ranks:
        assert rank["losses"] == pytest.approx(alone["losses"], abs=2e-6)
        assert rank["norms"] == pytest.approx(alone["norms"], rel=2e-6)
        assert rank["evaluated"] == pytest.approx(alone["evaluated"], abs=2e-6)
        assert largest_difference(rank["values"], alone["values"]) < 2e-6
        assert rank["committed"] == 6
        assert (rank["losses"], rank["norms"]) == (ranks[0]["losses"], ranks[0]["norms"]), "the same bits on all ranks"
    assert all(unequal(rank["values"], ranks[0]["values"]) == [] for rank in ranks)


def test_two_ranks_train_as_one(ranks: tuple[str, list[dict[str, Any]]], alone: dict[str, Any]) -> None:
    strategy, done = ranks[0], [rank["rank_trains"] for rank in ranks[1]]
    assert_train_as_one(done, alone)
    if strategy == "ddp":
        assert done[1]["digests"] == done[0]["digests"], "the same bits after every step"
    else:
        assert sum(rank["held"] for rank in done) == alone["held"], "nothing is held twice"
        assert sum(rank["global held"] for rank in done) == alone["held"]


def rank_trains_in_a_group_of_one(position: int, folder: Path) -> dict[str, Any]:
    setup = Setup(strategy="fsdp", size=1, **CLIPPED)
    group = open_group(setup, position, folder)
    return rank_trains(setup, group)


def test_shards_of_one_rank_are_no_special_case(alone: dict[str, Any], tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start(1, rank_trains_in_a_group_of_one, tmp_path)
        rank = processes.results(timeout_s=300)[0]
    assert_train_as_one([rank], alone)
    assert unequal(rank["values"], alone["values"]) == []


def rank_trains_sparingly(setup: Setup, group: ReplicaGroup) -> dict[str, Any]:
    rank = Rank(setup, group)
    losses, norms = rank.train(12)
    return {"losses": losses, "norms": norms, "values": rank.values()}


def test_recomputed_blocks_and_a_loss_in_chunks_are_no_special_case(
    ranks: tuple[str, list[dict[str, Any]]],
) -> None:
    """This includes a projection whose weight is gathered only inside the loss."""
    alone = rank_trains_sparingly(Setup(**CLIPPED), ReplicaGroup())
    for rank in ranks[1]:
        done = rank["rank_trains_sparingly"]
        assert done["losses"] == pytest.approx(alone["losses"], abs=2e-6)
        assert done["norms"] == pytest.approx(alone["norms"], rel=2e-6)
        assert largest_difference(done["values"], alone["values"]) < 2e-6


class ByShard(Float32):
    """A codec that sends float32 values with the errors of fp4, encoded shard by shard."""

    def __init__(self, shapes: dict[int, list[tuple[int, ...]]], num_shards: int) -> None:
        super().__init__()
        self.places: dict[int, list[Tensor]] = {}
        for numel, of_fragment in shapes.items():
            shards: list[list[Tensor]] = [[] for _ in range(num_shards)]
            whole = torch.arange(numel)
            for piece, shape in zip(
                whole.split([torch.Size(s).numel() for s in of_fragment]), of_fragment, strict=True
            ):
                for number, shard in enumerate(piece.view(shape).chunk(num_shards)):
                    shards[number].append(shard.flatten())
            self.places[numel] = [torch.cat(shard) for shard in shards]

    def encode(self, values: Tensor) -> Tensor:
        if values.numel() not in self.places:
            return super().encode(values)
        fp4, coarse = make_codec("fp4"), torch.empty_like(values)
        for place in self.places[values.numel()]:
            coarse[place] = fp4.decode(fp4.encode(values[place]), len(place))
        return super().encode(coarse)


def rank_trains_alike(setup: Setup, group: ReplicaGroup) -> dict[str, Any]:
    rank = Rank(setup, group)
    rank.train(STEPS)
    return {"values": rank.values(), "committed": rank.diloco.rounds_committed}


def test_ranks_that_compute_the_same_rows_have_the_bits_of_one(ranks: tuple[str, list[dict[str, Any]]]) -> None:
    """Round-off can't hide quantisation here: with fp4, each rank's shard is encoded separately."""
    alone = Rank(Setup(codec="fp4", **EXACT), ReplicaGroup())
    if ranks[0] == "fsdp":
        shapes = {fragment.numel: list(fragment.shapes) for fragment in alone.diloco.fragments}
        alone = Rank(Setup(**EXACT), ReplicaGroup(), codec=ByShard(shapes, 2))
    alone.train(STEPS)
    for rank in ranks[1]:
        assert rank["rank_trains_alike"]["committed"] == alone.diloco.rounds_committed == 6
        assert unequal(rank["rank_trains_alike"]["values"], alone.values()) == []


def rank_overflows(setup: Setup, group: ReplicaGroup) -> list[tuple[bool, float]]:
    """Put an infinity into this rank's part of a gradient before the second step; with fsdp only on one rank."""
    rank = Rank(setup, group)
    outcomes = []
    for step in range(3):
        batch = torch.arange(52).view(4, 13) % 17
        rank.inner.accumulate_gradients(batch[:, :-1], batch[:, 1:])
        if step == 1 and (group.position == 1 or setup.strategy == "ddp"):  # with ddp all ranks hold the mean
            gradient = rank.model.get_parameter("layers.0.feed_forward.up.weight").grad
            assert gradient is not None
            local_shard(gradient)[0, 0] = float("inf")
        rank.inner.unscale()
        done = rank.inner.apply(step)
        outcomes.append((done.skipped, rank.inner.scaler.get_scale()))
    return outcomes


def test_in_float16_all_ranks_skip_the_same_steps(ranks: tuple[str, list[dict[str, Any]]]) -> None:
    outcomes = [rank["rank_overflows"] for rank in ranks[1]]
    assert [skipped for skipped, _ in outcomes[0]] == [False, True, False]
    scales = [scale for _, scale in outcomes[0]]
    assert scales[1] == scales[0] / 2
    assert outcomes[1] == outcomes[0]


def rank_averages_gradients(setup: Setup, group: ReplicaGroup) -> dict[str, Any]:
    """Average gradients of a single replica; then one rank has a value that is not finite."""
    rank = Rank(setup, group)
    averager = GradientAverager(rank.model, InProcessTransport(1).endpoint(0), make_codec("float32"), group)
    batch = torch.arange(52).view(4, 13) % 17
    rank.inner.accumulate_gradients(batch[:, :-1], batch[:, 1:])
    held = {name: local_shard(p.grad) for name, p in rank.model.named_parameters() if p.grad is not None}
    before = {name: gradient.clone() for name, gradient in held.items()}
    averager.begin(0)
    applied = [averager.finish() is None]
    changed = unequal(held, before)
    if group.position == 1:
        held["norm.weight"][-1] = float("nan")
    averager.begin(1)
    applied.append(averager.finish() is None)
    return {"parameters": len(held), "changed": changed, "applied": applied}


def test_ranks_average_gradients_together_or_not_at_all(ranks: tuple[str, list[dict[str, Any]]]) -> None:
    for rank in ranks[1]:
        done = rank["rank_averages_gradients"]
        assert done == {
            "parameters": len(list(build_model(MODEL, seed=0).parameters())),
            "changed": [],
            "applied": [True, False],
        }


def rank_is_refused(setup: Setup, group: ReplicaGroup) -> list[str]:
    rank = Rank(setup, group)
    one = torch.zeros((1, 4), dtype=torch.int64)
    attempts: list[Callable[[], Any]] = [
        lambda: parallelise(build_model(MODEL, seed=0), "none", group, torch.device("cpu")),
        lambda: rank.inner.accumulate_gradients(one, one),
        lambda: open_group(setup, group.position, Path()),
    ]
    if setup.strategy == "fsdp":
        attempts += [
            lambda: make_inner_optimizer(OptimizerSettings(name="Adafactor", arguments={}), rank.model),
            lambda: make_inner_optimizer(OptimizerSettings(name="SGD", arguments={"fused": True}), rank.model),
        ]
    words = []
    for attempt in attempts:
        with pytest.raises(ConfigurationError) as caught:
            attempt()
        words.append(str(caught.value))
    return words


def test_what_can_not_work_is_refused(ranks: tuple[str, list[dict[str, Any]]]) -> None:
    expected = [
        "Strategy 'none' can't be used for a replica of 2 ranks",
        "A replica of 2 ranks needs a batch of at least 2 sequences, one per rank, got 1",
        "already has a default process group of 2 ranks",
        "'Adafactor' can't step parameters that are sharded",
        "inner.arguments.fused can't be used here: the fused kernel of SGD",
    ]
    for rank in ranks[1]:
        words = rank["rank_is_refused"]
        assert len(words) == (5 if ranks[0] == "fsdp" else 3)
        for sentence, begin in zip(words, expected, strict=False):
            assert begin in sentence
