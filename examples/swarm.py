"""A swarm of three replicas on one machine that find each other through libp2p. A complete example in one file.

python examples/swarm.py

On three machines, each would run `replica` with the address that the first one prints; there is no central coordinator.
`diloco train --transport swarm` does the same, and also lets replicas join and leave during training.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from multiprocessing.queues import Queue
from pathlib import Path

import torch
from torch import nn

from diloco import DiLoCo, SyncSchedule, connect_swarm, replica_share
from diloco.transport import new_secret

REPLICAS = 3


def replica(
    number: int, join_at: list[str], folder: str, secret: str, addresses: Queue[str], digests: Queue[str]
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)  # every replica starts with the same weights
    model = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mine = replica_share(torch.randn(600, 16), replica=number, num_replicas=REPLICAS)
    with connect_swarm(
        run="example",
        num_replicas=REPLICAS,
        replica=number,
        identity=Path(folder) / f"peer-{number}.key",  # created if it does not exist
        join_at=join_at,
        secret=secret,  # the text of a file that `diloco secret` has written
        on_address=addresses.put,
    ) as transport:
        schedule = SyncSchedule(inner_steps=10, num_fragments=1, overlap_steps=2)
        with DiLoCo(model, optimizer, transport=transport, schedule=schedule, codec="fp4") as diloco:
            for _ in range(100):
                loss = nn.functional.mse_loss(model(mine), mine.sin().sum(1, keepdim=True))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                diloco.step()
        digests.put(diloco.digest())
        print(f"replica {number}: loss {loss.item():.4f}, {transport.sent_bytes} bytes sent")


def main() -> list[str]:
    context = multiprocessing.get_context("spawn")
    addresses: Queue[str] = context.Queue()
    digests: Queue[str] = context.Queue()
    secret = new_secret()
    with tempfile.TemporaryDirectory() as folder:
        first = context.Process(target=replica, args=(0, [], folder, secret, addresses, digests))
        first.start()
        join_at = [addresses.get(timeout=120)]
        others = [
            context.Process(target=replica, args=(number, join_at, folder, secret, addresses, digests))
            for number in range(1, REPLICAS)
        ]
        for process in others:
            process.start()
        found = [digests.get(timeout=300) for _ in range(REPLICAS)]
        for process in (first, *others):
            process.join()
    return found


if __name__ == "__main__":
    same = len(set(main())) == 1
    print("all replicas hold the same bits" if same else "the replicas differ")
