"""What the ranks of a fixed group know of each other without collectives: who is alive, who stops, who has failed.

Every rank keeps one record in the store of torch.distributed, renews it with each beat, and reads those of the others.
A rank whose record no longer changes is lost; then all ranks name it and end. No clock of another machine is used.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

import xxhash
from torch.distributed.distributed_c10d import PrefixStore, Store

from diloco.errors import RendezvousError, ReplicaLostError
from diloco.transport.replica_group import is_of_the_network
from diloco.waiting import in_thread, waiting_for

_BEATS = 15  # in a silence
_POLL_S = 0.02
_HURRY_S = 0.1  # between two beats of a rank that waits for the others' records
_LEAVING_S = 2.0  # for the last record


def fresh_store(store: Store, rank: int, size: int, timeout_s: float) -> Store:
    """Meet the other ranks in a store that may hold keys of earlier attempts, and return one that holds none.

    After a restart by torchrun the store is the same, and its count of restarts differs between machines. So each rank
    writes a number that is new, and the numbers of all, which only ranks of one attempt can know, name the new store.

    Raises:
        RendezvousError: if not all ranks come in time.
    """
    keys, seen = [f"nonce/{each}" for each in range(size)], set[str]()
    store.set(keys[rank], uuid.uuid4().hex)
    deadline_s = time.monotonic() + timeout_s
    with waiting_for(lambda: f"all {size} ranks in the store of torch.distributed", timeout_s):
        while time.monotonic() < deadline_s:
            if store.check(keys):
                name = xxhash.xxh3_128_hexdigest(b"".join(store.multi_get(keys)))
                if name not in seen:
                    seen.add(name)
                    store.set(f"{name}/{rank}", "here")
                if store.check([f"{name}/{each}" for each in range(size)]):
                    return PrefixStore(name, store)
            time.sleep(_POLL_S)
    raise RendezvousError(f"rank {rank} did not find all of the {size} ranks within {timeout_s:g} s")


@dataclass
class Record:
    """What a rank says of itself."""

    beat: int = 0  # greater with each renewal
    finished: bool = False  # whether it has finished the run
    failed: str = ""  # why the ranks can't continue; "": they can
    broken: bool = False  # whether a collective has failed
    stop: bool = False  # whether it asks all to stop
    begun: int | None = None  # inner steps begun, once a rank has asked to stop
    asks: int = 0  # the number of its questions so far
    asked: int = -1  # whom it asked last, and what
    question: Any = None
    news: Any = None  # what it has told last


class RollCall:
    """This rank's view of the others, kept up to date by a thread.

    Args:
        store: a store that all ranks share and that holds no keys of earlier runs.
        silence_s: a rank that has not renewed its record for this long is lost. A third of it is enough once a
            connection has broken.
    """

    def __init__(self, store: Store, rank: int, size: int, *, silence_s: float) -> None:
        self.rank, self.size, self.silence_s = rank, size, silence_s
        self.names = [f"rank {each}" for each in range(size)]
        self.questions = SimpleQueue[tuple[int, Any] | None]()  # of ranks that have asked this one; None: the end
        self.others_ended_s: float | None = None  # when this rank learnt that another has finished the run
        self._store = store
        self._beat_s = silence_s / _BEATS
        self._keys = [f"record/{each}" for each in range(size)]
        self._mine = Record()
        self._begun = 0  # inner steps begun
        self._records: Sequence[Record] = ()
        self._heard_s: dict[int, tuple[int, float]] = {}  # rank -> its last beat, and when it was first read
        self._served = [0] * size  # the last question of each rank
        self._failed = ""
        self._lock = threading.Lock()
        self._wake, self._closed = threading.Event(), threading.Event()
        self._watching = in_thread(self._watch, "diloco-roll-call")

    @property
    def failure(self) -> ReplicaLostError | None:
        """Why the ranks can't continue, or None."""
        if not self._failed:
            return None
        return ReplicaLostError(
            f"{self._failed}. Membership is fixed, so all ranks end. Restart them with --resume, unless torchrun does."
        )

    def check(self) -> None:
        if (failure := self.failure) is not None:
            raise failure

    def wait(self, done: Callable[[], bool], *, for_records: bool = False) -> None:
        """Wait until ``done``; raise `ReplicaLostError` if the ranks can't continue."""
        while not done():
            self.check()
            if for_records:
                self._wake.set()
            time.sleep(_HURRY_S if for_records else _POLL_S)

    def check_round(self) -> None:
        """Raise `ReplicaLostError` if a round that this rank waits for will never be decided."""
        self.check()
        if self.others_ended_s is not None and time.monotonic() - self.others_ended_s > self.silence_s / 3:
            raise ReplicaLostError("Another replica has finished its run, and takes part in no further round.")

    def explained(self, error: Exception) -> Exception:
        """Return the error that names the lost rank, for one of any collective; other errors stay as they are."""
        for failed in (error, error.__cause__):  # as `ReplicaGroup` raises it
            if isinstance(failed, RuntimeError) and is_of_the_network(failed):
                break
        else:
            return error
        with self._lock:
            self._mine.broken = True
        self._wake.set()
        until_s = time.monotonic() + self.silence_s + 2 * self._beat_s
        while self.failure is None and time.monotonic() < until_s:  # it is not known yet who is lost
            time.sleep(_POLL_S)
        why = str(failed).splitlines()[0]
        return self.failure or ReplicaLostError(f"A collective has failed, and all ranks are alive: {why}")

    def meet(self, name: str, value: str, timeout_s: float, ranks: Sequence[int] | None = None) -> list[str]:
        """Return the ``value`` of all ranks, or of ``ranks``, in order. Each ``name`` can be used once.

        Raises:
            RendezvousError: if not all ranks come in time; it names those that are missing.
            ReplicaLostError: if a rank is lost meanwhile.
        """
        keys = {each: f"{name}/{each}" for each in ranks or range(self.size)}
        self._store.set(keys[self.rank], value)
        until_s = time.monotonic() + timeout_s

        def missing() -> str:
            return ", ".join(self.names[each] for each, key in keys.items() if not self._store.check([key]))

        with waiting_for(lambda: f"the {name} of {missing()}", timeout_s):
            self.wait(lambda: self._store.check([*keys.values()]) or time.monotonic() > until_s)
        if names := missing():
            raise RendezvousError(f"{names} did not send the {name} within {timeout_s:g} s.")
        return [text.decode() for text in self._store.multi_get([*keys.values()])]

    def tell(self, news: Any) -> None:
        """Tell all ranks something, as JSON, in place of what was told before."""
        with self._lock:
            self._mine.news = news
        self._wake.set()

    def told(self) -> list[Any]:
        """Return what each rank has told last, or None; nothing before all records are known."""
        return [record.news for record in self._records]

    def ask(self, rank: int, question: Any) -> None:
        """Put a question to another rank, among its `questions`."""
        with self._lock:
            self._mine = replace(self._mine, asks=self._mine.asks + 1, asked=rank, question=question)
        self._wake.set()

    def ask_to_stop(self) -> None:
        """Ask all ranks to agree soon on the step that `stop_step` returns. For any thread; it does not wait."""
        with self._lock:
            self._mine.stop = True
        self._wake.set()

    def stop_step(self, step: int, *, wanted: bool = False) -> int | None:
        """Do as `Transport.stop_step`.

        Once a rank has asked, each tells how many steps it has begun, and begins no other before all have. They stop
        after the greatest of these numbers.

        Raises:
            ReplicaLostError: if the ranks can't continue.
        """
        if wanted:
            self.ask_to_stop()
        self.check()
        with self._lock:
            if self._mine.begun is None:
                self._begun = step + 1
                return None
        begun = list[int]()

        def have_begun() -> bool:
            begun[:] = [each.begun for each in self._records if each.begun is not None]
            return len(begun) == self.size

        self.wait(have_begun, for_records=True)
        return max(begun)

    def finish(self) -> None:
        """Wait until all ranks have finished the run."""
        with self._lock:
            self._mine.finished = True
        self.wait(lambda: self._closed.is_set() or self._all_have_finished(), for_records=True)

    def close(self, failed: str = "") -> None:
        """Leave; ``failed`` says why, if not all ranks have finished."""
        if self._closed.is_set():
            return
        with self._lock:
            if not (self._mine.finished or self._failed):
                self._mine.failed = f"{self.names[self.rank]} has ended: {failed.rstrip('.') or 'it has left'}"
        self._closed.set()
        self._wake.set()
        self.questions.put(None)
        futures.wait([self._watching], _LEAVING_S)

    def _all_have_finished(self) -> bool:
        return bool(self._records) and all(each.finished for each in self._records)

    def _watch(self) -> None:
        last = False
        while not last:
            last = self._closed.is_set()  # the last record says why this rank has left
            self._wake.clear()
            with self._lock:
                self._mine.beat += 1
                self._mine.failed = self._mine.failed or self._failed
                mine = json.dumps(vars(self._mine))
            try:
                self._store.set(self._keys[self.rank], mine)
                if self._store.check(self._keys):
                    self._read([Record(**json.loads(each)) for each in self._store.multi_get(self._keys)])
            except RuntimeError as error:
                self._closed.set() if self._mine.finished else self._fail(
                    f"Rank 0, which holds the store of torch.distributed, does not answer: {str(error).splitlines()[0]}"
                )
                return
            self._wake.wait(self._beat_s)

    def _read(self, records: Sequence[Record]) -> None:
        now_s, self._records = time.monotonic(), records
        broken = any(each.broken for each in records)
        limit_s = self.silence_s / 3 if broken else self.silence_s
        for rank, record in enumerate(records):
            beat, since_s = self._heard_s.get(rank, (-1, now_s))
            if beat != record.beat:
                self._heard_s[rank] = record.beat, now_s
            elif now_s - since_s > limit_s and not record.finished and rank != self.rank:
                why = "a connection has broken, and " if broken else ""
                self._fail(f"{self.names[rank]} is lost: {why}it has not been heard from for {limit_s:g} s")
            if record.failed:
                self._fail(record.failed)
            if record.finished and not self._mine.finished:
                self.others_ended_s = self.others_ended_s or now_s
            if record.asked == self.rank and record.asks > self._served[rank]:
                self._served[rank] = record.asks
                self.questions.put((rank, record.question))
        with self._lock:
            if any(each.stop for each in records) and self._mine.begun is None:
                self._mine.begun = self._begun
                self._wake.set()

    def _fail(self, why: str) -> None:
        with self._lock:
            self._failed = self._failed or why
