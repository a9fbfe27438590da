"""Muon against torch's implementation, and the properties of one optimizer with two kinds of parameter groups."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from diloco.algorithm import Muon, hidden_matrices, muon, orthogonalised
from diloco.errors import ConfigurationError
from diloco.testing import check_inner_optimizer


class Model(nn.Module):
    """A model with an embedding, two hidden matrices of one shape and one of another, a norm and a head."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 24)])
        self.down = nn.Linear(24, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 20, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.head(self.norm(self.down(hidden)))  # type: ignore[no-any-return]


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.mark.parametrize("nesterov", [True, False])
def test_matrices_move_as_with_torchs_muon_and_the_rest_as_with_adamw(model: Model, nesterov: bool) -> None:
    other = copy.deepcopy(model)
    hidden = hidden_matrices(other)
    rest = [p for p in other.parameters() if id(p) not in set(map(id, hidden.values()))]
    theirs = torch.optim.Muon(hidden.values(), lr=0.01, weight_decay=0.1, momentum=0.95, nesterov=nesterov)
    vectors, tables = [p for p in rest if p.dim() < 2], [p for p in rest if p.dim() == 2]
    groups = [{"params": tables}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, 1e-3, (0.9, 0.95), weight_decay=0.1)
    mine = muon(model, lr=1e-3, nesterov=nesterov)
    before = copy.deepcopy(model.state_dict())
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    mine.step()
    theirs.step()
    adamw.step()
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        if name in hidden:  # torch iterates in bfloat16
            assert bool((a - b).norm() < 0.05 * (b - before[name]).norm()), name
        else:
            assert torch.equal(a, b), name


@pytest.mark.parametrize("shape", [(1, 1, 5), (3, 8, 8), (2, 4, 64), (2, 64, 4)])
def test_orthogonalised_has_the_singular_vectors_and_values_near_one(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    made = orthogonalised(matrices, steps=10)
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    assert ((torch.linalg.svdvals(made) - 1).abs() < 0.35).all()
    rotated = left.mT @ made @ right.mT  # diagonal, if the singular vectors are the same
    off = rotated - torch.diag_embed(rotated.diagonal(dim1=1, dim2=2))
    assert off.abs().max() < 0.02
    assert values.shape == rotated.shape[:2]


def test_it_holds_everything_and_goes_on_from_its_state(model: Model) -> None:
    check_inner_optimizer(lambda model: muon(model, lr=1e-2))
    second = muon(model, lr=1.0)
    second.load_state_dict(muon(model).state_dict())
    assert second.param_groups[0]["lr"] == pytest.approx(4e-3)


def test_embeddings_and_heads_are_left_to_adamw_tied_or_not() -> None:
    expected = ["layers.0.weight", "layers.1.weight", "layers.2.weight", "down.weight"]
    assert list(hidden_matrices(Model())) == list(hidden_matrices(Model(tied=True))) == expected


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


def test_patterns_name_what_adamw_shall_train(model: Model) -> None:
    assert list(hidden_matrices(model, ["layers.?.weight"])) == ["down.weight"]
    with pytest.raises(ConfigurationError, match=r"The pattern 'layer\.\*' matches no trainable matrix .* layers\.0"):
        muon(model, adamw=["layer.*"])
    with pytest.raises(ConfigurationError, match="has none besides its embeddings and head"):
        muon(model, adamw=["layers.*", "down.*"])


def test_a_parameter_without_a_gradient_stays(model: Model) -> None:
    optimizer = muon(model)
    matrices = [model.down.weight, model.layers[0].weight]
    before = [matrix.clone() for matrix in matrices]
    model.layers[0].weight.grad = torch.ones_like(model.layers[0].weight)
    optimizer.step()
    assert [torch.equal(matrix, held) for matrix, held in zip(matrices, before, strict=True)] == [True, False]


@pytest.mark.parametrize("values", [{"momentum": 1.0}, {"momentum": -0.1}, {"newton_schulz_steps": 0}])
def test_values_out_of_range_are_refused(model: Model, values: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="Muon"):
        muon(model, **values)
    with pytest.raises(ConfigurationError, match=r"shape \(3,\)"):
        Muon([{"params": [nn.Parameter(torch.zeros(3))], "orthogonalise": True}])
