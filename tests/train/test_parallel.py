"""The ranks of a replica together compute the same as one rank, and see every change of weights (invariant 10)."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diloco.algorithm import (
    FragmentLayout,
    Muon,
    SyncSchedule,
    bind,
    digest_tensors,
    flatten,
    local_shard,
    muon,
    partition,
    unflatten_,
)
from diloco.errors import ConfigurationError
from diloco.model import ModelSettings, build_language_model, build_model
from diloco.outer import DiLoCo
from diloco.train import Fleet, OptimizerSettings, make_inner_optimizer, parallelise
from diloco.transport import InProcessTransport, ReplicaGroup
from tests.finetuning import write_base
from tests.processes import Processes
from tests.train.ranks import CPU, MODEL, STEPS, Rank, Setup, largest_difference, open_group, unequal, whole
from tests.train.source_runs import session_of

Ranks = tuple[str, list[dict[str, Any]]]
SHAPES = [(8, 16), (33, 8), (8, 16), (3, 5), (8, 16), (1, 5), (8, 16), (33, 8), (8, 16)]
"""Matrices for Muon: numbers of a shape that two ranks can't divide, uneven rows, and a shard without rows."""


def ranks_do(position: int, setup: Setup, folder: Path) -> dict[str, Any]:
    """Run all jobs of a rank, one after the other."""
    done: dict[str, Any] = {}
    for number, (name, (job, changes)) in enumerate(JOBS.items()):
        of_job = replace(setup, **changes)
        group = open_group(of_job, position, folder, replica=number)
        done[name] = job(of_job, group)
        group.close()
    return done


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """The strategy, and the results of each of two ranks."""
    setup = Setup(strategy=request.param, size=2)
    with Processes() as processes:
        processes.start(2, ranks_do, setup, tmp_path_factory.mktemp("ranks"))
        return request.param, list(processes.results(timeout_s=300).values())


def rank_trains(setup: Setup, group: ReplicaGroup) -> dict[str, Any]:
    rank = Rank(setup, group)
    losses, norms, digests, evaluated = [], [], [], []
    heldout = torch.arange(26).view(2, 13) % 17
    for _ in range(STEPS if setup.optimizer == "AdamW" else 13):  # each fragment is merged twice, or once
        if setup.optimizer == "AdamW":
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
        "momentum held": sum(local_shard(m).numel() for m in momenta_of(rank.inner.optimizer)),
        "committed": rank.diloco.rounds_committed,
    }


def momenta_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return what Muon keeps of the matrices that it orthogonalises; of all others it keeps more."""
    return [slots["momentum_buffer"] for slots in optimizer.state.values() if len(slots) == 1]


def rank_trains_by_muon(setup: Setup, group: ReplicaGroup) -> dict[str, Any]:
    if setup.strategy == "fsdp":
        for ranks in (None, ReplicaGroup()):
            with pytest.raises(ConfigurationError, match=r"Muon on 1 ranks can't gather .* pass muon.*ranks="):
                muon(Rank(setup, group).model, ranks=ranks)
    return rank_trains(setup, group) | {"steps": steps_of_muon(setup, group)}


def steps_of_muon(setup: Setup, group: ReplicaGroup) -> dict[str, Tensor]:
    """Take three steps with the same gradients on any number of ranks. The second has none for the last matrix."""
    from torch.distributed.tensor import Shard, distribute_tensor

    def placed(value: Tensor) -> Tensor:
        sharded = setup.strategy == "fsdp"
        return distribute_tensor(value, group.mesh(value.device), [Shard(0)]) if sharded else value

    random = torch.Generator().manual_seed(0)
    matrices = [nn.Parameter(placed(torch.randn(shape, generator=random))) for shape in SHAPES]
    optimizer = Muon([{"params": matrices, "orthogonalise": True}], lr=0.1, ranks=group)
    for step in range(3):
        for matrix in matrices:
            matrix.grad = placed(torch.randn(matrix.shape, generator=random))
        if step == 1:
            matrices[-1].grad = None
        optimizer.step()
    values = [*matrices, *momenta_of(optimizer)]
    return {str(number): whole(value.detach()) for number, value in enumerate(values)}


def rank_overflows(setup: Setup, group: ReplicaGroup) -> list[tuple[bool, float]]:
    """Put an infinity into this rank's part of a gradient before the second step; with fsdp only on one rank."""
    rank = Rank(setup, group)
    outcomes = []
    for step in range(3):
        batch = torch.arange(52).view(4, 13) % 17
        rank.inner.accumulate_gradients(batch[:, :-1], batch[:, 1:])
        if step == 1 and (group.position == 1 or setup.strategy != "fsdp"):  # else all ranks hold the mean
            gradient = rank.model.get_parameter("model.layers.0.mlp.up_proj.weight").grad
            assert gradient is not None
            local_shard(gradient)[0, 0] = float("inf")
        rank.inner.unscale()
        done = rank.inner.apply(step)
        outcomes.append((done.skipped, rank.inner.scaler.get_scale()))
    return outcomes


JOBS: dict[str, tuple[Callable[[Setup, ReplicaGroup], Any], dict[str, Any]]] = {
    "float32": (rank_trains, {}),
    "float16": (rank_overflows, {"precision": "float16"}),
    "bfloat16": (lambda setup, group: Rank(setup, group).train(4)[0], {"precision": "bfloat16"}),
    "Muon": (rank_trains_by_muon, {"optimizer": "Muon"}),
}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """Return the results of a single rank."""
    return {name: job(Setup(**changes), ReplicaGroup()) for name, (job, changes) in JOBS.items()}


def assert_train_as_one(ranks: list[dict[str, Any]], alone: dict[str, Any], tolerance: float = 2e-6) -> None:
    """They agree to the round-off of float32 over merges of each of three fragments."""
    assert min(alone["norms"]) > 0.25, "the gradient is clipped at every step"
    for rank in ranks:
        assert rank["losses"] == pytest.approx(alone["losses"], abs=tolerance)
        assert rank["norms"] == pytest.approx(alone["norms"], rel=tolerance)
        assert rank["evaluated"] == pytest.approx(alone["evaluated"], abs=tolerance)
        assert largest_difference(rank["values"], alone["values"]) < tolerance
        assert rank["committed"] == alone["committed"]
        assert (rank["losses"], rank["norms"]) == (ranks[0]["losses"], ranks[0]["norms"]), "the same bits on all ranks"
    assert all(unequal(rank["values"], ranks[0]["values"]) == [] for rank in ranks)


def test_two_ranks_train_as_one(ranks: Ranks, alone: dict[str, Any]) -> None:
    strategy, done, one = ranks[0], [rank["float32"] for rank in ranks[1]], alone["float32"]
    assert_train_as_one(done, one)
    assert one["committed"] == 6
    assert len(set(one["evaluated"])) == 7, "global parameters move when a fragment is merged, and only then"
    if strategy == "ddp":
        assert done[1]["digests"] == done[0]["digests"], "the same bits after every step"
    else:
        assert sum(rank["held"] for rank in done) == one["held"], "nothing is held twice"
        assert sum(rank["global held"] for rank in done) == one["held"]


def test_ranks_share_the_work_of_muon(ranks: Ranks, alone: dict[str, Any]) -> None:
    """From the same gradients ranks make the same bits as one; in training they differ as their gradients do.

    Sums of gradients over ranks differ in the last bits, as with any optimizer. The largest difference of a value was
    1.3e-6 after 19 steps. The iteration multiplies that of a gradient by up to 3.4445^5 = 485 where a singular value
    is next to zero.
    """
    strategy, done, one = ranks[0], [rank["Muon"] for rank in ranks[1]], alone["Muon"]
    assert_train_as_one(done, one, tolerance=1e-5)
    assert one["committed"] == 3
    assert [unequal(rank["steps"], one["steps"]) for rank in done] == [[], []]
    assert sum(rank["momentum held"] for rank in done) == one["momentum held"] * (1 if strategy == "fsdp" else 2) > 0


def test_in_half_precision_ranks_train_and_skip_steps_as_one(ranks: Ranks, alone: dict[str, Any]) -> None:
    """With fsdp the layers are gathered in bfloat16."""
    assert [skipped for skipped, _ in alone["float16"]] == [False, True, False]
    for rank in ranks[1]:
        assert rank["bfloat16"] == pytest.approx(alone["bfloat16"], abs=2e-3)
        assert rank["float16"] == alone["float16"]


def rank_of_a_session(position: int, data: Path, folder: Path) -> dict[str, Any]:
    """Return the global parameters of a new session of two ranks, and of one that begins from other weights."""
    fleet, one = Fleet(InProcessTransport(1).endpoints), "--replicas 1"
    group = fleet.group = open_group(Setup(strategy="fsdp", size=2), position, folder)
    done, other = {}, {name: value + 1 for name, value in session_of(data, one).global_params().items()}
    for name, initial in (("new", None), ("given", other)):
        ours, alone = session_of(data, one, fleet, initial=initial), session_of(data, one, initial=initial)
        values = {name: whole(value) for name, value in ours.global_params().items()}
        held = sum(local_shard(parameter).numel() for parameter in ours.replicas[0].model.parameters())
        step = [each.step().loss for each in (ours, alone)]
        done[name] = unequal(values, alone.global_params()), held, alone.replicas[0].model.num_parameters(), step
    group.close()
    return done


def test_a_sharded_model_begins_with_the_same_bits_though_no_rank_holds_all_of_it(data: Path, tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start(2, rank_of_a_session, data, tmp_path)
        ranks = processes.results(timeout_s=300).values()
    for done in ranks:
        for odd, _, _, losses in done.values():
            assert odd == []
            assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert sum(done["new"][1] for done in ranks) == next(iter(ranks))["new"][2]


def rank_with_an_empty_shard(position: int, folder: Path) -> dict[str, Any]:
    """A fragment consists of one norm, whose 4 values are sharded over 3 ranks as 2, 2 and none."""
    group = open_group(Setup(strategy="fsdp", size=3), position, folder)
    model = parallelise(build_model(replace(MODEL, width=4, layers=1), seed=0), "fsdp", group, CPU).model
    (everything,) = partition(model)
    named = dict(zip(everything.names, everything.shapes, strict=True))
    parts = {"model.norm.weight": named.pop("model.norm.weight")}, named
    fragments = [FragmentLayout(index, tuple(part), tuple(part.values())) for index, part in enumerate(parts)]
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
    done = {"numel": fragments[0].numel, "committed": diloco.rounds_committed, "local": local_shard(norm[0]).tolist()}
    with diloco.global_model():
        done["agreed"] = whole(norm[0]).tolist()
    group.close()
    return done


def test_a_rank_may_hold_nothing_of_a_fragment(tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start(3, rank_with_an_empty_shard, tmp_path)
        ranks = list(processes.results(timeout_s=300).values())
    assert [rank["numel"] for rank in ranks] == [2, 2, 0]
    assert [rank["committed"] for rank in ranks] == [3] * 3
    assert all(rank["agreed"] == ranks[0]["agreed"] for rank in ranks)
    assert [value for rank in ranks for value in rank["local"]] == ranks[0]["agreed"]
    assert min(ranks[0]["agreed"]) > 1.0, "the pseudo-gradient was applied"


TOKENS = torch.arange(24).reshape(2, 12) % 11 + 40


class Peak(TorchDispatchMode):
    """Measures the bytes that exist at once of what operations made; mapped files don't count."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, made = func(*args, **(kwargs or {})), False
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and not value.is_meta:
                storage = local_shard(value).untyped_storage()
                known = self.live.get(storage._cdata)
                if storage.filename is None and (known is None or known[0].expired()):
                    self.live[storage._cdata], made = (StorageWeakRef(storage), storage.nbytes()), True
        if made:
            self.live = {key: value for key, value in self.live.items() if not value[0].expired()}
            self.nbytes = max(self.nbytes, sum(size for _, size in self.live.values()))
        return result


def rank_fills(position: int, place: Path, *models: ModelSettings) -> list[dict[str, Any]]:
    """Fill the models one after the other: processes of their own would each import transformers."""
    setup = Setup(strategy="fsdp", size=2)
    return [fill(each, open_group(setup, position, place, replica=number)) for number, each in enumerate(models)]


def fill(settings: ModelSettings, group: ReplicaGroup) -> dict[str, Any]:
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


# what is filled -> the architecture, other settings, and the largest peaks of both ranks, in sizes of the model
FILLED: dict[str, tuple[str, dict[str, Any], tuple[float, float]]] = {
    "weights": ("Llama", {}, (0.8, 0.8)),
    "tied weights": ("Qwen3", {}, (0.8, 0.8)),
    "adapters": ("Llama", {"lora_rank": 2, "arguments": {"base_dtype": "bfloat16"}}, (3, 0.8)),
    "experts, which are stored one by one": ("Mixtral", {}, (3, 0.8)),
}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ModelSettings, list[dict[str, Any]]]]:
    """For each of `FILLED`, the settings of the model and the results of two ranks."""
    folder = tmp_path_factory.mktemp("filled")
    models = [
        ModelSettings(source=f"hf:{write_base(folder / what, name=name, num_hidden_layers=8)}", **changes)
        for what, (name, changes, _) in FILLED.items()
    ]
    with Processes() as processes:
        processes.start(2, rank_fills, folder, *models)
        results = zip(*processes.results(timeout_s=300).values(), strict=True)
    return {what: (settings, [*ranks]) for what, settings, ranks in zip(FILLED, models, results, strict=True)}


@pytest.mark.parametrize("what", FILLED)
def test_no_rank_but_the_first_ever_holds_a_whole_model(what: str, filled: Any) -> None:
    """Nor does the first if all values are stored under their names. All numbers are those of one rank."""
    (settings, ranks), peaks = filled[what], FILLED[what][2]
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
