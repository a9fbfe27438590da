"""Streaming DiLoCo between the replicas of one torchrun, FSDP2 inside each. A complete example in one file.

torchrun --nproc-per-node 4 examples/cluster.py --replica-size 2
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from diloco import DiLoCo, SyncSchedule, connect_process_group


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--replica-size", type=int, default=1, help="ranks over which a replica is sharded (S)")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    shape = (dist.get_world_size() // options.replica_size, options.replica_size)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("replica", "shard"))

    torch.manual_seed(0)  # every replica starts with the same weights
    layers = [nn.Sequential(nn.Linear(options.width, options.width), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(256, options.width), *layers, nn.Linear(options.width, 256)).to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    schedule = SyncSchedule(inner_steps=20, num_fragments=2, overlap_steps=2)
    with (
        connect_process_group(mesh) as transport,
        DiLoCo(model, optimizer, transport=transport, schedule=schedule, codec="fp4") as diloco,
    ):
        torch.manual_seed(1 + dist.get_rank())  # every rank sees other data
        for _ in range(options.steps):
            tokens = torch.randint(256, (64,), device=device)
            loss = nn.functional.cross_entropy(model(tokens), (3 * tokens + 1) % 256)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            diloco.step()
    print(f"rank {dist.get_rank()}: loss {loss.item():.3f}, {diloco.rounds_committed} rounds, digest {diloco.digest()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
