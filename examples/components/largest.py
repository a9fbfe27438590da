"""The largest of every 256 values, as float16, with their positions."""

import torch

from diloco import Codec


class Largest(Codec):
    name = "largest"
    block_size = 256

    def __init__(self, kept: int = 16):
        self.kept = kept

    def parameters(self):
        return {"kept": self.kept}

    def payload_bytes(self, numel):
        return 3 * (numel // 256 * self.kept + min(numel % 256, self.kept))

    def _encode(self, values, payload):
        for block, record in self._records(values, payload):
            order = block.abs().sort(descending=True, stable=True).indices[: len(record) // 3]
            places = order.sort().values
            numbers = block[places].clamp(-65504, 65504).half().view(torch.uint8)
            record.copy_(torch.cat([places.to(torch.uint8), numbers]))

    def _decode(self, payload, out):
        for block, record in self._records(out.zero_(), payload):
            places, numbers = record.tensor_split([len(record) // 3])
            block[places.long()] = numbers.clone().view(torch.float16).float()

    def _find_fault(self, payload, numel):
        for block, record in self._records(payload.new_empty(numel, dtype=torch.float32), payload):
            places = record[: len(record) // 3].long()
            if bool((places.diff() <= 0).any()) or bool((places >= len(block)).any()):
                return "has places out of order or out of range"
        return super()._find_fault(payload, numel)

    def _records(self, values, payload):
        return zip(values.split(self.block_size), payload.split(3 * self.kept), strict=True)
