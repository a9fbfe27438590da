"""Streaming DiLoCo in one file: two replicas in one process, nothing imported but PyTorch.

Read it from top to bottom. Symbols are those of Streaming DiLoCo (arXiv 2501.18512, Algorithm 2): every replica trains
alone with AdamW; every H steps each fragment p of the parameters is sent as a pseudo-gradient of four bits per value;
tau steps later its average moves the global parameters, and the replicas merge these into their own.

    python examples/from_scratch.py

The package does the same over real networks, with votes, recovery and checkpoints. A test runs both and compares their
global parameters bit for bit.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

STEPS = 120
INNER_STEPS = 20  # H: inner steps between two rounds of the same fragment
OVERLAP_STEPS = 2  # tau: inner steps between sending a fragment and merging its average
OFFSETS = (0, 10)  # t_p: the two fragments take turns
OUTER_LR, MOMENTUM = 0.4, 0.9
INNER_LR = 0.003
BLOCK = 256  # values that share an exponent in fp4
CONTEXT, WIDTH = 8, 64
TEXT = "a replica trains alone; then the replicas average how far each one has moved. " * 40


# The model and its data: predict the next byte of a text. Each replica reads its own half.


class Model(nn.Module):
    """An embedding of the last `CONTEXT` bytes and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 16)
        self.layers = nn.ModuleList([nn.Linear(CONTEXT * 16, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, context: Tensor) -> Tensor:
        """Return logits ``(batch, 128)`` for ``context``, ``(batch, CONTEXT)`` int64."""
        hidden = self.embedding(context).flatten(1)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden)


def batch(replica: int, step: int) -> tuple[Tensor, Tensor]:
    """Return 32 contexts and their next bytes from the replica's half of the text."""
    text = torch.tensor(list(TEXT.encode()))
    half = len(text) // 2
    generator = torch.Generator().manual_seed(2 * step + replica)
    starts = replica * half + torch.randint(half - CONTEXT, (32,), generator=generator)
    return torch.stack([text[start : start + CONTEXT] for start in starts]), text[starts + CONTEXT]


def train_one_step(model: Model, optimizer: torch.optim.Optimizer, replica: int, step: int) -> float:
    """Perform an inner step, as in any training loop, and return its loss."""
    contexts, targets = batch(replica, step)
    loss = functional.cross_entropy(model(contexts), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# Fragments: every parameter is in exactly one. A fragment is handled as one flat float32 vector.


def fragments_of(model: Model) -> list[list[nn.Parameter]]:
    """Return the parameters of the two fragments: first those outside the layers, then the layers."""
    return [[*model.embedding.parameters(), *model.head.parameters()], list(model.layers.parameters())]


def flat(parameters: list[nn.Parameter]) -> Tensor:
    """Return a copy of the parameters as one vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])


def write(values: Tensor, parameters: list[nn.Parameter]) -> None:
    """Copy the vector back into the parameters."""
    sizes = [parameter.numel() for parameter in parameters]
    with torch.no_grad():
        for parameter, part in zip(parameters, values.split(sizes), strict=True):
            parameter.copy_(part.view_as(parameter))


# fp4 (E3M0): a sign and three bits of exponent for each value, an 8-bit exponent for each block of 256.


def encode(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bytes that travel: two values in each, and the exponent of each block.

    Every value becomes the nearest power of two. A block has seven of them, from its largest down to 1/64 of it;
    what is smaller becomes 0.
    """
    blocks = functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    fraction, exponent = torch.frexp(blocks)  # |value| = fraction * 2^exponent, with 0.5 <= fraction < 1
    exponent = exponent - 1 + (fraction.abs() >= 0.75).int()  # ties round up
    exponent = exponent.masked_fill(blocks == 0, -200).clamp(min=-127)
    largest = exponent.amax(dim=1, keepdim=True).clamp(-120, 127)
    code = (exponent - largest + 7).clamp(0, 7) + 8 * torch.signbit(blocks).int()
    low, high = code.chunk(2, dim=1)
    return (low + 16 * high).to(torch.uint8), (largest + 127).to(torch.uint8)


def decode(codes: Tensor, exponents: Tensor, numel: int) -> Tensor:
    """Return the values, ``(numel,)`` float32, that `encode` was given, rounded."""
    code = torch.cat([codes % 16, codes // 16], dim=1).int()
    power = exponents.int() - 127 - 7 + code % 8
    values = (power + 127).bitwise_left_shift(23).view(torch.float32)  # 2^power: the exponent field of a float32
    values = values.masked_fill(code % 8 == 0, 0.0)
    return torch.where(code >= 8, -values, values).view(-1)[:numel]


# Training. All replicas hold the same global parameters and outer momentum, so one copy of them stands for all.


def train(num_replicas: int = 2) -> tuple[list[Tensor], list[float], int]:
    """Return the global parameters by fragment, the mean loss of each step, and the bytes that a replica sent."""
    torch.manual_seed(0)
    first = Model()
    models = [first, *(copy.deepcopy(first) for _ in range(num_replicas - 1))]  # all start from the same weights
    optimizers = [torch.optim.AdamW(model.parameters(), lr=INNER_LR) for model in models]
    local = [fragments_of(model) for model in models]  # replica -> fragment -> parameters
    global_params = [flat(parameters) for parameters in local[0]]  # theta
    momentum = [torch.zeros_like(values) for values in global_params]  # v
    in_flight: dict[int, tuple[list[tuple[Tensor, Tensor]], list[Tensor]]] = {}  # fragment -> payloads, what was sent
    losses, sent_bytes = [], 0

    for step in range(1, STEPS + 1):
        some = [train_one_step(models[m], optimizers[m], m, step) for m in range(num_replicas)]
        losses.append(sum(some) / num_replicas)
        for p, offset in enumerate(OFFSETS):
            since = step - offset  # the fragment is sent at offset + H, offset + 2 H, ...
            if since >= INNER_STEPS and since % INNER_STEPS == 0:
                sent = [flat(local[m][p]) for m in range(num_replicas)]
                payloads = [encode(global_params[p] - values) for values in sent]  # Delta = global - local (line 7)
                in_flight[p] = payloads, sent
                sent_bytes += sum(tensor.numel() for tensor in payloads[0])
            if since - OVERLAP_STEPS >= INNER_STEPS and (since - OVERLAP_STEPS) % INNER_STEPS == 0:
                payloads, sent = in_flight.pop(p)
                theta, v = global_params[p], momentum[p]
                total = torch.zeros_like(theta)
                for codes, exponents in payloads:  # in replica order, in float32, so that all get the same bits
                    total += decode(codes, exponents, len(theta))
                average = total / num_replicas  # (line 8)
                v.mul_(MOMENTUM).add_(average)  # Nesterov, as in torch.optim.SGD (line 11)
                theta.sub_((MOMENTUM * v + average) * OUTER_LR)
                for m in range(num_replicas):  # rebase: keep the work of the overlapped steps, replace the rest
                    write((flat(local[m][p]) - sent[m]) + theta, local[m][p])
    return global_params, losses, sent_bytes


def main() -> None:
    global_params, losses, sent_bytes = train()
    values = sum(map(len, global_params))
    data_parallel_bytes = 4 * values * STEPS
    print(f"{values:,} parameters, 2 replicas, {STEPS} steps: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    ratio = data_parallel_bytes / sent_bytes
    print(f"sent {sent_bytes:,} bytes per replica, {ratio:.0f}x less than the gradients of {STEPS} steps")


if __name__ == "__main__":
    main()
