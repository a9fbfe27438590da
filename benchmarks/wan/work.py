"""The model and the inner step: real parameters and a real optimizer, little computation."""

import hashlib
import time
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from benchmarks.wan.plan import Work


class Layer(nn.Module):
    """The parameters of one transformer layer: ``12 width**2 + 2 width`` values in six tensors."""

    def __init__(self, width: int, generator: torch.Generator) -> None:
        super().__init__()
        shapes = {
            "qkv": (3 * width, width),
            "out": (width, width),
            "up": (4 * width, width),
            "down": (width, 4 * width),
            "attention_norm": (width,),
            "mlp_norm": (width,),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(0.02 * torch.randn(shape, generator=generator)))


class Layers(nn.Module):
    """The model: only layers, equal on all replicas."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(Layer(work.width, generator) for _ in range(work.layers))

    def forward(self, scale: Tensor) -> Tensor:
        """Return ``scale``, ``()``, times the sum of all parameters, so that each parameter gets a gradient."""
        return scale * torch.stack([parameter.sum() for parameter in self.parameters()]).sum()


class InnerLoop:
    """Inner steps of one replica: a pause takes the place of the accelerator's work, `update` changes one layer.

    A layer's gradient is noise that differs between replicas. Updating one layer per step, in turn, needs little of
    the CPU, and still every fragment has changed by the time it is sent.
    """

    def __init__(self, work: Work, model: Layers, replica: int) -> None:
        self.work = work
        self.layers = list(model.layers)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(1 + replica)
        self._noise = [torch.randn(parameter.shape, generator=generator) for parameter in self.layers[0].parameters()]

    def compute(self) -> None:
        """Pause in place of a forward and backward pass."""
        time.sleep(self.work.step_s)

    def update(self, step: int) -> None:
        """Take an optimizer step on the layer whose turn it is; ``step`` counts from 1."""
        parameters = list(self.layers[step % len(self.layers)].parameters())
        for parameter, noise in zip(parameters, self._noise, strict=True):
            parameter.grad = noise
        self.optimizer.step()
        for parameter in parameters:
            parameter.grad = None


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a digest of the bits of float32 tensors on the CPU, in order."""
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(tensor.detach().contiguous().numpy().data)
    return hashed.hexdigest()[:16]
