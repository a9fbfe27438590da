"""``python -m benchmarks.own_data.privacy WHEELS``: what a contribution reveals, and what noise on it costs.

It prints how many of the bytes of a site's text the rows of its first contribution for the embedding tell, and the
losses of runs whose sites clip their contributions (their norm, for each fragment) and add Gaussian noise.
"""

import sys
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.own_data.__main__ import Sites, of_sites, train
from benchmarks.own_data.runs import SiteRun
from benchmarks.own_data.text import SITES, Texts, texts
from benchmarks.parity.stacked import decoder
from diloco.algorithm import Codec, make_codec
from diloco.data import Sampler

NOISE = (0.001, 0.01, 0.1, 6.0)  # standard deviation divided by the norm to which contributions are clipped


class NoisyCodec:
    """Clips the ``(SITES, n)`` values of all sites and adds noise before it encodes them as float32."""

    def __init__(self, max_norm: float, noise: float) -> None:
        self.codec: Codec = make_codec("float32")
        self.max_norm, self.noise = max_norm, noise
        self.norms: list[float] = []  # of contributions, before they are clipped

    def payload_bytes(self, numel: int) -> int:
        return self.codec.payload_bytes(numel)

    def encode(self, values: Tensor) -> Tensor:
        rows = values.view(SITES, -1)
        norms = rows.norm(dim=1, keepdim=True)
        self.norms += norms.flatten().tolist()
        clipped = rows * (self.max_norm / norms).clamp(max=1.0)
        noise = torch.randn_like(rows) * (self.noise * self.max_norm) if self.noise else 0.0
        return self.codec.encode((clipped + noise).flatten())

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        return self.codec.decode(payload, numel)


def noisy(text: Texts, max_norm: float, noise: float) -> tuple[float, list[float]]:
    """Return the loss of the global parameters on the sites' text, and the norms of their contributions."""
    codec = NoisyCodec(max_norm, noise)

    def prepare(sites: Sites) -> None:
        sites.codec = codec  # type: ignore[assignment]  # has what is used of one

    return of_sites(train(SiteRun(codec="float32"), text, prepare), "global"), codec.norms


def revealed(text: Texts, codec: Codec) -> tuple[int, int]:
    """Return how many bytes occur in ten steps of a site, and how many of as many longest rows are theirs."""
    model = decoder(SiteRun())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    embedding = dict(model.named_parameters())["model.embed_tokens.weight"]
    before, occurring = embedding.detach().clone(), set[int]()
    sampler = Sampler(text.sites[0], replica=0, num_replicas=1, sequence_length=128, batch_size=4, seed=0)
    for _ in range(10):
        tokens, targets = sampler.next_batch()
        occurring |= set(tokens.flatten().tolist())
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    sent = (before - embedding.detach()).flatten()
    received = codec.decode(codec.encode(sent), sent.numel()).view_as(before)
    decay = before * (1 - (1 - 3e-4) ** 10)  # which moves all rows, and which everybody can compute
    longest = (received - decay).norm(dim=1).argsort(descending=True)[: len(occurring)]
    return len(occurring), len(occurring & set(longest.tolist()))


def main() -> None:
    torch.set_num_threads(1)
    text = texts(Path(sys.argv[1]), "formats", 1.0)
    for name in ("float32", "fp4", "sign"):
        occurring, right = revealed(text, make_codec(name))
        print(f"{name}: {right} of {occurring} bytes that occurred are told by the longest rows")
    loss, norms = noisy(text, 1e9, 0.0)
    max_norm = median(norms)
    print(f"neither clipped nor noisy: {loss:.4f}; median norm {max_norm:.4f}, {len(norms) // SITES} contributions")
    for noise in (0.0, *NOISE):
        print(f"clipped to {max_norm:.4f}, noise {noise}: {noisy(text, max_norm, noise)[0]:.4f}", flush=True)


if __name__ == "__main__":
    main()
