"""``python -m benchmarks.chaos.paced PACE CLOCK train ...``: ``diloco``, with inner steps that take at least so long.

The time stands for an accelerator's work: many peers fit on few cores, and a run lasts as long as its events. The clock
of the process is off by as many seconds as the file CLOCK holds; the machine's clock is nobody's to change. Both files
hold a float64, in seconds, that may be written at any time. SIGUSR1 prints where all threads are.
"""

from __future__ import annotations

import faulthandler
import mmap
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

__all__ = ["read_seconds", "set_seconds", "shift_clock"]


def set_seconds(path: Path, seconds: float) -> None:
    """Let the processes that were given ``path`` go by another value, from now on."""
    path.touch()
    with path.open("r+b") as file:
        file.write(struct.pack("d", seconds))


def read_seconds(path: Path) -> Callable[[], float]:
    """Tells what ``path`` holds, now or later."""
    with path.open("rb") as file:
        held = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
    return lambda: float(struct.unpack("d", held)[0])


def shift_clock(off_s: Callable[[], float]) -> None:
    """Let ``time.time`` of this process, and of those that it forks, be off by so much.

    It is to be called before anything keeps ``time.time`` for itself, as Hivemind does. The daemon, a program of its
    own, keeps the machine's clock. So do the records in metrics.jsonl, by which the run is judged.
    """
    true = time.time
    time.time = lambda: true() + off_s()

    from diloco.monitor import files

    vars(files)["time"] = SimpleNamespace(time=true)


def pace(step_s: Callable[[], float]) -> None:
    """Let no batch be drawn sooner than so long after the one before."""
    from torch import Tensor

    from diloco.data.sampler import Sampler

    draw, drawn_s = Sampler.next_batch, 0.0

    def slowly(self: Sampler) -> tuple[Tensor, Tensor]:
        nonlocal drawn_s
        time.sleep(max(0.0, drawn_s + step_s() - time.monotonic()))
        drawn_s = time.monotonic()
        return draw(self)

    Sampler.next_batch = slowly  # type: ignore[method-assign]  # paced


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    shift_clock(read_seconds(Path(sys.argv[2])))
    pace(read_seconds(Path(sys.argv[1])))

    from diloco.cli import main

    sys.exit(main(sys.argv[3:]))
