"""Muon against torch's implementation, and the properties of one optimizer with two kinds of parameter groups."""

import copy
import functools

import pytest
import torch
from torch import nn

from diloco.algorithm import Muon, muon, newton_schulz
from diloco.errors import ConfigurationError
from diloco.testing import check_inner_optimizer

HIDDEN = ("layers.0.weight", "layers.1.weight", "layers.2.weight", "down.weight")


class Model(nn.Module):
    """A model with an embedding, two hidden matrices of one shape and one of another, a norm and a head."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 24)])
        self.down = nn.Linear(24, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 20, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


@pytest.mark.parametrize(("nesterov", "tied"), [(True, False), (False, True)])
def test_matrices_move_as_with_torchs_muon_and_the_rest_as_with_adamw(nesterov: bool, tied: bool) -> None:
    model, other = Model(tied=tied), Model(tied=tied)
    named = dict(other.named_parameters())
    matrices, rest = [named[name] for name in HIDDEN], [p for name, p in named.items() if name not in HIDDEN]
    theirs = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, momentum=0.95, nesterov=nesterov)
    vectors, tables = [p for p in rest if p.dim() < 2], [p for p in rest if p.dim() == 2]
    groups = [{"params": tables}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, 1e-3, (0.9, 0.95), weight_decay=0.1)
    mine = muon(model, lr=1e-3, nesterov=nesterov)
    ids = {id(p) for group in mine.param_groups if group["orthogonalise"] for p in group["params"]}
    assert tuple(name for name, parameter in model.named_parameters() if id(parameter) in ids) == HIDDEN
    before = copy.deepcopy(model.state_dict())
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    for optimizer in (mine, theirs, adamw):
        optimizer.step()
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        if name in HIDDEN:  # torch iterates in bfloat16
            assert bool((a - b).norm() < 0.05 * (b - before[name]).norm()), name
        else:
            assert torch.equal(a, b), name


@pytest.mark.parametrize("shape", [(1, 1, 5), (3, 8, 8), (2, 4, 64), (2, 64, 4)])
def test_orthogonalised_has_the_singular_vectors_and_values_near_one(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    made = newton_schulz(matrices, steps=10)
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    assert ((torch.linalg.svdvals(made) - 1).abs() < 0.35).all()
    rotated = left.mT @ made @ right.mT  # diagonal, if the singular vectors are the same
    off = rotated - torch.diag_embed(rotated.diagonal(dim1=1, dim2=2))
    assert off.abs().max() < 0.02


def test_it_holds_everything_and_goes_on_from_its_state() -> None:
    check_inner_optimizer(lambda model: muon(model, lr=1e-2))
    second = muon(Model(), lr=1.0)
    second.load_state_dict(muon(Model()).state_dict())
    assert second.param_groups[0]["lr"] == pytest.approx(4e-3)


def test_the_compiled_iteration_is_the_same_for_any_number_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few graphs serve all: past torch's limit the iteration would run uncompiled."""
    import torch._dynamo.testing  # takes seconds

    graphs = torch._dynamo.testing.CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=graphs))
    shapes = [(8, 8)] * 3 + [(12, 12)] + [(8, 24)] * 2 + [(12, 33)] + [(24, 8)] * 4 + [(33, 12)]
    moved = []
    for compiled in (False, True):
        random = torch.Generator().manual_seed(0)
        matrices = [nn.Parameter(torch.randn(shape, generator=random)) for shape in shapes]
        for matrix in matrices:
            matrix.grad = torch.randn(matrix.shape, generator=random)
        Muon([{"params": matrices, "orthogonalise": True}], compile=compiled).step()
        moved.append(matrices)
    assert all(torch.equal(one, other) for one, other in zip(*moved, strict=True))
    assert 0 < graphs.frame_count <= torch._dynamo.config.recompile_limit - 2


def test_matrices_with_inputs_first_move_as_much_as_their_transposes() -> None:
    values, gradient = torch.zeros(4, 16), torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    moved = []
    for inputs_first in (True, False):
        matrix = nn.Parameter(values.clone() if inputs_first else values.T.clone())
        matrix.grad = gradient if inputs_first else gradient.T.clone()
        Muon([{"params": [matrix], "orthogonalise": True, "inputs_first": inputs_first}], lr=0.1).step()
        moved.append(matrix.detach() if inputs_first else matrix.detach().T)
    assert torch.allclose(*moved, atol=1e-6)
    assert float(torch.linalg.svdvals(moved[0]).max()) > 0.1 * 2 * 0.6  # sqrt(16 / 4) times the learning rate


def test_a_parameter_without_a_gradient_stays() -> None:
    model = Model()
    optimizer, before = muon(model), copy.deepcopy(model.state_dict())
    model.down.weight.grad = torch.ones_like(model.down.weight)
    optimizer.step()
    moved = [name for name, values in model.state_dict().items() if not torch.equal(values, before[name])]
    assert moved == ["down.weight"]


def test_what_can_not_work_is_refused() -> None:
    for arguments in ({"momentum": 1.0}, {"newton_schulz_steps": 0}):
        with pytest.raises(ConfigurationError, match="".join(arguments)):
            muon(Model(), **arguments)
    with pytest.raises(ConfigurationError, match="has none besides its embeddings and head"):
        muon(nn.Embedding(3, 2))
    with pytest.raises(ConfigurationError, match=r"shape \(3,\)"):
        Muon([{"params": [nn.Parameter(torch.zeros(3))], "orthogonalise": True}])
