"""``python -m benchmarks.chaos.paced STEP_S train ...``: ``diloco``, with inner steps that take at least so long.

The time stands for an accelerator's work: many peers fit on few cores, and a run lasts as long as its events. SIGUSR1
prints where all threads are.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import time

from torch import Tensor

from diloco.cli import main
from diloco.data.sampler import Sampler

__all__: list[str] = []


def pace(step_s: float) -> None:
    """Let no batch be drawn sooner than ``step_s`` after the one before."""
    draw, next_s = Sampler.next_batch, 0.0

    def slowly(self: Sampler) -> tuple[Tensor, Tensor]:
        nonlocal next_s
        time.sleep(max(0.0, next_s - time.monotonic()))
        next_s = time.monotonic() + step_s
        return draw(self)

    Sampler.next_batch = slowly  # type: ignore[method-assign]  # paced


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    pace(float(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
