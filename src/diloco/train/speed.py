"""How fast a run is, as a fraction of what its device could do. No torch here."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Speed", "known_peak_flops_per_s"]

TERA = 1e12

PEAKS: tuple[tuple[str, float, float, float], ...] = (
    # name, half precision (bfloat16 where it has it), TF32, float32; the first that fits counts
    ("B200", 2250, 1125, 75),
    ("H200 NVL", 835, 418, 60),
    ("GH200|H200", 989, 494, 67),
    ("H100 PCIe", 756, 378, 51),
    ("H100 NVL", 835, 418, 60),
    ("H100", 989, 494, 67),
    ("H800", 989, 494, 67),
    ("A100|A800", 312, 156, 19.5),
    ("L40S", 362, 183, 91.6),
    ("L40", 181, 90.5, 90.5),
    ("L4", 121, 60, 30.3),
    ("A40", 150, 75, 37.4),
    ("A10", 125, 62.5, 31.2),
    ("V100", 125, 15.7, 15.7),
    ("T4", 65, 8.1, 8.1),
    ("RTX 4090", 165, 82.6, 82.6),
    ("RTX 3090", 71, 35.6, 35.6),
    ("MI300X", 1307, 654, 163),
)
"""Dense products, in 10^12 operations a second, from the makers' data sheets; consumer cards with float32 sums."""


def known_peak_flops_per_s(device_name: str, precision: str, matmul_precision: str = "highest") -> float | None:
    """What a device can do at most in dense matrix products; None where it is not known.

    Args:
        device_name: as ``torch.cuda.get_device_name`` says it.
        precision: of the products, as ``train.precision``.
        matmul_precision: of those in float32, as ``train.matmul_precision``.

    >>> known_peak_flops_per_s("NVIDIA H200", "bfloat16"), known_peak_flops_per_s("NVIDIA L4", "float32", "high")
    (989000000000000.0, 60000000000000.0)
    >>> known_peak_flops_per_s("AMD EPYC 9654 96-Core Processor", "float32") is None
    True
    """
    for name, half, tf32, float32 in PEAKS:
        if re.search(rf"(?<![A-Za-z0-9])({name})(?![A-Za-z0-9]| Laptop)", device_name):
            if precision != "float32":
                return half * TERA
            return (float32 if matmul_precision == "highest" else tf32) * TERA
    return None


@dataclass(frozen=True)
class Speed:
    """What a step computes on this process's device.

    Attributes:
        flops_per_token: operations of training on one token, of the model; what is computed again does not count.
        tokens_per_step: that this process trains on.
        peak_flops_per_s: of its device, or None.

    >>> Speed(flops_per_token=1e9, tokens_per_step=50_000, peak_flops_per_s=1e15).utilization(0.1)
    0.5
    """

    flops_per_token: float
    tokens_per_step: int
    peak_flops_per_s: float | None

    def utilization(self, seconds: float, steps: int = 1) -> float | None:
        """Model flops utilisation (MFU; PaLM, 2204.02311, appendix B) of steps that took so long; None: no peak."""
        if self.peak_flops_per_s is None or seconds <= 0:
            return None
        return self.flops_per_token * self.tokens_per_step * steps / seconds / self.peak_flops_per_s
