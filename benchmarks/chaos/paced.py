"""``python -m benchmarks.chaos.paced STEP_S CLOCK train ...``: ``diloco``, with inner steps that take at least so long.

The time stands for an accelerator's work: many peers fit on few cores, and a run lasts as long as its events. The clock
of the process is off by as many seconds as the file CLOCK holds, a float64 that may be written at any time; the
machine's clock is nobody's to change. SIGUSR1 prints where all threads are.
"""

from __future__ import annotations

import faulthandler
import mmap
import signal
import struct
import sys
import time
from pathlib import Path
from types import SimpleNamespace

__all__ = ["set_clock"]


def set_clock(path: Path, off_s: float) -> None:
    """Let the clock of the processes that `shift_clock` was given ``path`` be off by so much, from now on."""
    path.touch()
    with path.open("r+b") as file:
        file.write(struct.pack("d", off_s))


def shift_clock(path: Path) -> None:
    """Let ``time.time`` of this process, and of those that it forks, be off by what ``path`` holds.

    It is to be called before anything keeps ``time.time`` for itself, as Hivemind does. The daemon, a program of its
    own, keeps the machine's clock. So do the records in metrics.jsonl, by which the run is judged.
    """
    true = time.time
    with path.open("rb") as file:
        held = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
    time.time = lambda: true() + float(struct.unpack("d", held)[0])

    from diloco.monitor import files

    vars(files)["time"] = SimpleNamespace(time=true)


def pace(step_s: float) -> None:
    """Let no batch be drawn sooner than ``step_s`` after the one before."""
    from torch import Tensor

    from diloco.data.sampler import Sampler

    draw, next_s = Sampler.next_batch, 0.0

    def slowly(self: Sampler) -> tuple[Tensor, Tensor]:
        nonlocal next_s
        time.sleep(max(0.0, next_s - time.monotonic()))
        next_s = time.monotonic() + step_s
        return draw(self)

    Sampler.next_batch = slowly  # type: ignore[method-assign]  # paced


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    shift_clock(Path(sys.argv[2]))
    pace(float(sys.argv[1]))

    from diloco.cli import main

    sys.exit(main(sys.argv[3:]))
