"""``python -m benchmarks.chaos.paced PACE CLOCK train ...``: ``diloco`` with a least step duration and a clock offset.

An inner step takes at least as many seconds as the file PACE holds. The time stands for the work of an accelerator, so
that many peers fit on few cores and a run lasts as long as its events. The clock of the process is off by as many
seconds as the file CLOCK holds; the clock of the machine stays as it is. Each file holds a float64 that may be written
at any time. SIGUSR1 prints the stacks of all threads.
"""

import faulthandler
import mmap
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace


def set_seconds(path: Path, seconds: float) -> None:
    """Write the value of ``path``; processes that read the file use it from now on."""
    path.touch()
    with path.open("r+b") as file:
        file.write(struct.pack("d", seconds))


def read_seconds(path: Path) -> Callable[[], float]:
    """Return a function that returns the current value of ``path``."""
    with path.open("rb") as file:
        held = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
    return lambda: float(struct.unpack("d", held)[0])


def shift_clock(off_s: Callable[[], float]) -> None:
    """Shift ``time.time`` of this process, and of the processes that it forks, by ``off_s()``.

    Call it before any module keeps a reference to ``time.time``, as Hivemind does. The daemon is a separate program and
    keeps the machine's clock. So do the records in metrics.jsonl, by which the run is judged.
    """
    true = time.time
    time.time = lambda: true() + off_s()

    from diloco.monitor import MetricsFile

    vars(sys.modules[MetricsFile.__module__])["time"] = SimpleNamespace(time=true)


def pace(step_s: Callable[[], float]) -> None:
    """Delay each batch until ``step_s()`` seconds after the previous one."""
    from torch import Tensor

    from diloco.data import Sampler

    draw, drawn_s = Sampler.next_batch, 0.0

    def slowly(self: Sampler) -> tuple[Tensor, Tensor]:
        nonlocal drawn_s
        time.sleep(max(0.0, drawn_s + step_s() - time.monotonic()))
        drawn_s = time.monotonic()
        return draw(self)

    Sampler.next_batch = slowly  # type: ignore[method-assign]  # in this process only


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    shift_clock(read_seconds(Path(sys.argv[2])))
    pace(read_seconds(Path(sys.argv[1])))

    from diloco.cli import main

    sys.exit(main(sys.argv[3:]))
