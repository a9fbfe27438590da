"""The ranks of a replica together compute the same as one rank, and see every change of weights (invariant 10)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.algorithm import (
    FragmentLayout,
    SyncSchedule,
    bind,
    digest_tensors,
    flatten,
    local_shard,
    partition,
    unflatten_,
)
from diloco.data import build_corpus
from diloco.model import build_model
from diloco.outer import DiLoCo
from diloco.train import (
    Fleet,
    OptimizerSettings,
    Session,
    make_inner_optimizer,
    make_transport,
    parallelise,
)
from diloco.transport import ReplicaGroup
from tests.processes import Processes
from tests.runs import settings_of
from tests.train.ranks import CPU, MODEL, STEPS, Rank, Setup, largest_difference, open_group, unequal, whole

CLIPPED = {"clip_norm": 0.25, "accumulation": 2, "batch_size": 5}
"""Uneven shares of a batch in pieces, with clipping in effect."""


def ranks_do(position: int, setup: Setup, folder: Path) -> dict[str, Any]:
    """Run all jobs of a rank, one after the other."""
    done: dict[str, Any] = {}
    for number, (job, of_job) in enumerate(
        [
            (rank_trains, replace(setup, **CLIPPED)),
            (rank_overflows, replace(setup, precision="float16")),
            (rank_trains_in_bfloat16, replace(setup, precision="bfloat16")),
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
        "global held": sum(fragment.numel for fragment in rank.diloco.fragments),
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


def rank_overflows(setup: Setup, group: ReplicaGroup) -> list[tuple[bool, float]]:
    """Put an infinity into this rank's part of a gradient before the second step; with fsdp only on one rank."""
    rank = Rank(setup, group)
    outcomes = []
    for step in range(3):
        batch = torch.arange(52).view(4, 13) % 17
        rank.inner.accumulate_gradients(batch[:, :-1], batch[:, 1:])
        if step == 1 and (group.position == 1 or setup.strategy == "ddp"):  # with ddp all ranks hold the mean
            gradient = rank.model.get_parameter("model.layers.0.mlp.up_proj.weight").grad
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


def rank_trains_in_bfloat16(setup: Setup, group: ReplicaGroup) -> list[float]:
    return Rank(setup, group).train(8)[0]


def test_in_bfloat16_ranks_train_as_one(ranks: tuple[str, list[dict[str, Any]]]) -> None:
    """With fsdp the layers are gathered in bfloat16."""
    expected = Rank(Setup(precision="bfloat16"), ReplicaGroup()).train(8)[0]
    for rank in ranks[1]:
        assert rank["rank_trains_in_bfloat16"] == pytest.approx(expected, abs=2e-3)


def rank_of_a_session(position: int, data: Path, folder: Path) -> dict[str, Any]:
    """Return the global parameters of a new session of two ranks, and of one that begins from other weights."""
    group = open_group(Setup(strategy="fsdp", size=2), position, folder)
    done, other = {}, {name: value + 1 for name, value in session(data).global_params().items()}
    for name, initial in (("new", None), ("given", other)):
        ours, alone = session(data, group, initial), session(data, None, initial)
        values = {name: whole(value) for name, value in ours.global_params().items()}
        held = sum(local_shard(parameter).numel() for parameter in ours.replicas[0].model.parameters())
        step = [each.step().loss for each in (ours, alone)]
        done[name] = unequal(values, alone.global_params()), held, alone.replicas[0].model.num_parameters(), step
    group.close()
    return done


def session(data: Path, group: ReplicaGroup | None = None, initial: dict[str, torch.Tensor] | None = None) -> Session:
    settings = settings_of(data, "--replicas 1 --model.arguments.vocab-size 257")
    fleet = Fleet(make_transport(settings))
    fleet.group = group or ReplicaGroup()
    return Session(settings, build_corpus(settings.data), fleet, torch.device("cpu"), lambda event: None, initial)


def test_a_sharded_model_begins_with_the_same_bits_though_no_rank_holds_all_of_it(data: Path, tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start(2, rank_of_a_session, data, tmp_path)
        ranks = processes.results(timeout_s=300).values()
    for done in ranks:
        for odd, _, _, losses in done.values():
            assert odd == []
            assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert sum(done["new"][1] for done in ranks) == next(iter(ranks))["new"][2]


# Edge cases: empty shards, and a rank that dies.


def rank_with_an_empty_shard(position: int, folder: Path) -> dict[str, Any]:
    """A fragment consists of one norm, whose 4 values are sharded over 3 ranks as 2, 2 and none."""
    group = open_group(Setup(strategy="fsdp", size=3), position, folder)
    narrow = replace(MODEL, width=4, layers=1)
    model = parallelise(build_model(narrow, seed=0), "fsdp", group, CPU).model
    (everything,) = partition(model)
    parts: list[list[tuple[str, tuple[int, ...]]]] = [[], []]
    for name, shape in zip(everything.names, everything.shapes, strict=True):
        parts[not name.startswith("model.norm.")].append((name, shape))
    fragments = [
        FragmentLayout(index, tuple(name for name, _ in part), tuple(shape for _, shape in part))
        for index, part in enumerate(parts)
    ]
    diloco = DiLoCo(
        model,
        make_inner_optimizer(OptimizerSettings(), model),
        fragments=fragments,
        schedule=SyncSchedule(inner_steps=2, num_fragments=2),
        codec="fp4",
        error_feedback=True,
    )
    norm = bind(model, fragments[0])
    unflatten_(flatten(norm, torch.empty(fragments[0].numel)) + 1 + position, norm)
    for _ in range(4):
        diloco.step()
    with diloco.global_model():
        agreed = whole(norm[0]).tolist()
    result = {
        "numel": fragments[0].numel,
        "committed": diloco.rounds_committed,
        "agreed": agreed,
        "local": local_shard(norm[0]).tolist(),
    }
    group.close()
    return result


def test_a_rank_may_hold_nothing_of_a_fragment(tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start(3, rank_with_an_empty_shard, tmp_path)
        ranks = list(processes.results(timeout_s=300).values())
    assert [rank["numel"] for rank in ranks] == [2, 2, 0]
    assert [rank["committed"] for rank in ranks] == [3] * 3
    assert all(rank["agreed"] == ranks[0]["agreed"] for rank in ranks)
    assert [value for rank in ranks for value in rank["local"]] == ranks[0]["agreed"]
    assert min(ranks[0]["agreed"]) > 1.0, "the pseudo-gradient was applied"
