"""A custom codec with one bit per value and the mean magnitude of each block of 1024 values. A complete example.

python examples/custom_codec.py
diloco train --codec examples/custom_codec.py:OneBit --error-feedback 1
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from diloco import Codec, DiLoCo, InProcessTransport, SyncSchedule, testing

BLOCK = 1024
BLOCK_BYTES = 4 + BLOCK // 8  # a float32 scale and the signs
BITS = 2 ** torch.arange(8, dtype=torch.uint8)


class OneBit(Codec):
    """Encodes ``sign(x) * mean(|x|)`` per block. Error feedback compensates the quantisation error."""

    name = "one-bit"
    block_size = BLOCK

    def payload_bytes(self, numel: int) -> int:
        return -(-numel // BLOCK) * BLOCK_BYTES

    def _encode(self, values: Tensor, payload: Tensor) -> None:
        blocks = payload.view(-1, BLOCK_BYTES)
        rows = nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
        filled = torch.full((len(rows), 1), float(BLOCK))
        filled[len(values) // BLOCK :] = len(values) % BLOCK
        scales = (rows.abs() / filled).sum(1, keepdim=True).clamp(max=1e38)
        blocks[:, :4] = scales.view(torch.uint8)
        blocks[:, 4:] = ((rows < 0).view(-1, BLOCK // 8, 8) * BITS).sum(2, dtype=torch.uint8)

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        blocks = payload.view(-1, BLOCK_BYTES)
        negative = (blocks[:, 4:, None] & BITS).ne(0).view(-1, BLOCK)
        scales = _scales(payload)
        out.copy_(torch.where(negative, -scales, scales).flatten()[: len(out)])

    def _find_fault(self, payload: Tensor, numel: int) -> str | None:
        """Refuse payloads with non-finite scales, because payloads come from untrusted peers."""
        return None if bool(_scales(payload).isfinite().all()) else "has a block whose scale is not finite"


def _scales(payload: Tensor) -> Tensor:
    """Return the scales, with shape ``(blocks, 1)``; a copy, because the payload may be unaligned."""
    return payload.view(-1, BLOCK_BYTES)[:, :4].flatten().clone().view(torch.float32)[:, None]


def main(steps: int = 300) -> dict[str, tuple[float, int]]:
    """Train two replicas with each codec, and return codec -> (loss of the global model, bytes sent by a replica)."""
    testing.check_codec(OneBit)  # raises with a reason if the codec violates the contract
    inputs = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    targets = inputs.sin().sum(1, keepdim=True)
    shares = list(zip(inputs.chunk(2), targets.chunk(2), strict=True))
    found = {}
    for codec in ("float32", OneBit()):
        transport, replicas = InProcessTransport(2), []
        for number in range(2):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 1))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            diloco = DiLoCo(
                model,
                optimizer,
                transport=transport.endpoint(number),
                schedule=SyncSchedule(inner_steps=10, overlap_steps=1),
                codec=codec,
                error_feedback=codec != "float32",
            )
            replicas.append((model, optimizer, diloco))
        for _ in range(steps):
            for (model, optimizer, diloco), (x, y) in zip(replicas, shares, strict=True):
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                diloco.begin()
            for *_, diloco in replicas:
                diloco.finish()
        for *_, diloco in replicas:
            diloco.drain()
        with replicas[0][2].global_model() as agreed, torch.no_grad():
            loss = nn.functional.mse_loss(agreed(inputs), targets).item()
        name = codec if isinstance(codec, str) else codec.name
        found[name] = (loss, transport.endpoint(0).sent_bytes)
        print(f"{name}: loss {loss:.4f}, {found[name][1]} bytes sent")
    return found


if __name__ == "__main__":
    main()
