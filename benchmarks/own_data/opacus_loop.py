"""``python -m benchmarks.own_data.opacus_loop``: two replicas whose loops protect single records.

It needs `pip install opacus`. Each clips the gradient of each of its own 512 records, adds noise and counts epsilon, in
a loop of its own around `DiLoCo`. It prints the figures of the page.
"""

from typing import Any

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from diloco import DiLoCo, InProcessTransport, SyncSchedule

STEPS, RECORDS, DELTA = 100, 512, 1e-5


class Site:
    """A replica with records of its own, protected by Opacus."""

    def __init__(self, number: int, transport: InProcessTransport, noise: float) -> None:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
        generator = torch.Generator().manual_seed(number + 1)
        inputs = torch.randn(RECORDS, 8, generator=generator)
        records = TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())
        self.engine = PrivacyEngine()
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(records, batch_size=32),
            noise_multiplier=noise,
            max_grad_norm=1.0,
        )
        schedule = SyncSchedule(inner_steps=10, num_fragments=2, overlap_steps=2)
        self.diloco = DiLoCo(
            self.model,
            self.optimizer,
            transport=transport.endpoint(number),
            schedule=schedule,
            codec="fp4",
        )
        self.batches = iter(self.loader)
        self.losses: list[float] = []

    def train(self) -> None:
        batch = next(self.batches, None)
        if batch is None:
            self.batches = iter(self.loader)
            batch = next(self.batches)
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.model(inputs), targets)
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())


def main() -> None:
    torch.set_num_threads(1)
    for noise in (0.0, 1.0):
        transport = InProcessTransport(2)
        sites = [Site(number, transport, noise) for number in range(2)]
        for _ in range(STEPS):
            for site in sites:
                site.train()
                site.diloco.begin()
            for site in sites:
                site.diloco.finish()
        for site in sites:
            site.diloco.drain()
        digests = len({site.diloco.digest() for site in sites})
        first, last = (sum(sum(site.losses[part]) for site in sites) / 20 for part in (slice(10), slice(-10, None)))
        spent = ", ".join(f"{site.engine.get_epsilon(DELTA):.2f}" for site in sites) if noise else "none"
        print(
            f"noise {noise}: {sites[0].diloco.rounds_committed} rounds, digests: {digests}; mean loss of ten steps "
            f"{first:.4f} -> {last:.4f}; epsilon {spent} at delta {DELTA}"
        )


if __name__ == "__main__":
    main()
