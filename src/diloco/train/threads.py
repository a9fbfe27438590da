"""How many threads torch computes with: what the user says, else this process's share of the machine's cores."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

import torch

from diloco.cores import share, threads_are_chosen

if sys.platform != "win32":
    import fcntl

__all__ = ["PeerThreads", "Seats", "choose_threads"]

_COUNT_AGAIN_S = 5.0


def choose_threads(wanted: int | None, processes: int = 1) -> None:
    """Compute with ``wanted`` threads, or, if nobody chose a number, with at most this process's share of the cores.

    Args:
        wanted: ``train.threads``.
        processes: how many compute on this machine at the same time, this one included.
    """
    if wanted is not None:
        torch.set_num_threads(wanted)
    elif not threads_are_chosen(os.environ) and torch.get_num_threads() > share(processes):
        torch.set_num_threads(share(processes))


class Seats:
    """Counts one user's processes on this machine.

    Each process locks a file of its own, a seat. The system unlocks it when the process ends, however it ends.

    Args:
        folder: of the files, made if missing. A folder that belongs to another user is not used.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mine: int | None = None
        self._number = -1
        if sys.platform == "win32":
            return  # where swarms do not run
        with contextlib.suppress(OSError):  # without a seat it counts itself alone
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.stat().st_uid != os.getuid():
                return
            for number in count():
                self._mine = self._lock(number, fcntl.LOCK_EX, os.O_RDWR | os.O_CREAT)
                if self._mine is not None:
                    self._number = number
                    return

    def taken(self) -> int:
        """How many processes there are now, this one included; at least 1."""
        others = 0
        if self._mine is None:
            return 1
        with contextlib.suppress(FileNotFoundError):  # behind the last seat
            for number in count():
                if number == self._number:
                    continue
                probe = self._lock(number, fcntl.LOCK_SH, os.O_RDONLY)  # shared: others may count at the same time
                if probe is None:
                    others += 1
                else:
                    os.close(probe)
        return 1 + others

    def leave(self) -> None:
        """Give the seat back."""
        if self._mine is not None:
            os.close(self._mine)
            self._mine = None

    def _lock(self, number: int, kind: int, flags: int) -> int | None:
        """The open file of a seat; None if another process holds it."""
        seat = os.open(self._folder / f"seat-{number}", flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(seat, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(seat)
            return None
        return seat


class PeerThreads:
    """Divides the cores of this machine among the peers of swarms on it, which come and go.

    What a peer computes need not have the same bits on every machine, so its threads may change while it trains. Peers
    of other users and in other containers are not seen.
    """

    def __init__(self, wanted: int | None, seats: Seats | None = None) -> None:
        user = os.getuid() if hasattr(os, "getuid") else 0
        self._seats = seats or Seats(Path(tempfile.gettempdir()) / f"diloco-peers-{user}")
        self._chosen = wanted is not None or threads_are_chosen(os.environ)
        self._most = self._threads = torch.get_num_threads()
        self._counted_s = float("-inf")
        self.follow()

    def follow(self) -> str:
        """Count the peers again, unless that was seconds ago, and take the share of the cores.

        Returns:
            What changed, as a sentence; "" for nothing.
        """
        now_s = time.monotonic()
        if self._chosen or now_s - self._counted_s < _COUNT_AGAIN_S:
            return ""
        self._counted_s = now_s
        if torch.get_num_threads() != self._threads:  # somebody else has set it, and goes on choosing
            self._chosen = True
            return ""
        peers = self._seats.taken()
        threads = min(self._most, share(peers))
        if threads == self._threads:
            return ""
        torch.set_num_threads(threads)
        self._threads = threads
        on_it = f"{peers} peers train" if peers > 1 else "No other peer trains"
        return f"{on_it} on this machine: this one computes with {threads} thread{'s' if threads > 1 else ''}."

    def leave(self) -> None:
        """Leave the cores to the others."""
        self._seats.leave()
