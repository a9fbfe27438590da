"""Choice of the number of torch threads: the user's choice, else this process's share of the machine's cores."""

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


def choose_threads(processes: int = 1) -> None:
    """Use at most this process's share of the cores, unless the user has chosen a number (OMP_NUM_THREADS).

    Args:
        processes: the number of processes that compute on this machine at the same time, including this one.
    """
    if not threads_are_chosen(os.environ) and torch.get_num_threads() > share(processes):
        torch.set_num_threads(share(processes))


class Seats:
    """Counts the processes of one user on this machine.

    Each process locks its own file, a seat. The system unlocks it when the process ends, for whatever reason.

    Args:
        folder: the folder of the files, created if missing. A folder that belongs to another user is not used.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mine: int | None = None
        self._number = -1
        if sys.platform == "win32":
            return  # swarms do not run on Windows
        with contextlib.suppress(OSError):  # a process without a seat counts only itself
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                return
            folder.chmod(0o700)
            for number in count():
                self._mine = self._lock(number, fcntl.LOCK_EX, os.O_RDWR | os.O_CREAT)
                if self._mine is not None:
                    self._number = number
                    return

    def taken(self) -> int:
        """Return the number of processes now, including this one."""
        others = 0
        if self._mine is None:
            return 1
        with contextlib.suppress(FileNotFoundError):  # after the last seat
            for number in count():
                if number == self._number:
                    continue
                probe = self._lock(number, fcntl.LOCK_SH, os.O_RDONLY)  # shared, as others may count at the same time
                if probe is None:
                    others += 1
                else:
                    os.close(probe)
        return 1 + others

    def leave(self) -> None:
        """Release the seat."""
        if self._mine is not None:
            os.close(self._mine)
            self._mine = None

    def _lock(self, number: int, kind: int, flags: int) -> int | None:
        """Lock the file of a seat and return it open, or return None if another process holds it."""
        seat = os.open(self._folder / f"seat-{number}", flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(seat, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(seat)
            return None
        return seat


class PeerThreads:
    """Divides the cores of this machine among the swarm peers on it, which join and leave.

    The number of threads may change during training, because a swarm does not need the same bits on every machine.
    Peers of other users and in other containers are not counted.
    """

    def __init__(self, seats: Seats | None = None) -> None:
        user = os.getuid() if hasattr(os, "getuid") else 0
        self._seats = seats or Seats(Path(tempfile.gettempdir()) / f"diloco-peers-{user}")
        self._chosen = threads_are_chosen(os.environ)
        self._most = self._threads = torch.get_num_threads()
        self._counted_s = float("-inf")
        self.follow()

    def follow(self) -> str:
        """Count the peers again and use this peer's share of the cores, at most once every 5 s.

        Returns:
            A sentence that describes the change; "" if nothing changed.
        """
        now_s = time.monotonic()
        if self._chosen or now_s - self._counted_s < _COUNT_AGAIN_S:
            return ""
        self._counted_s = now_s
        if torch.get_num_threads() != self._threads:  # other code has set the number and stays in charge
            self._chosen = True
            return ""
        peers = self._seats.taken()
        threads = min(self._most, share(peers))
        if threads == self._threads:
            return ""
        torch.set_num_threads(threads)
        self._threads = threads
        others = f"{peers} peers train" if peers > 1 else "No other peer trains"
        return f"{others} on this machine: this one uses {threads} thread{'s' if threads > 1 else ''}."

    def leave(self) -> None:
        """Leave the cores to the other peers."""
        self._seats.leave()
