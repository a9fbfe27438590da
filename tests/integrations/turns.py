"""Run two training scripts in the threads of one process, one at a time: a script yields when it waits for the other.

Process-wide state of a framework, such as random generators and warning filters, is thus used by one script at a time,
and tests are exactly reproducible.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from diloco.algorithm import Contribution
from diloco.protocol import Average
from diloco.transport import InProcessTransport, Pending, SnapshotSource, Transport


class _TurnTaking(Transport):
    def __init__(self, transport: Transport, turn: threading.Lock) -> None:
        self._transport = transport
        self._turn = turn
        self.replica = transport.replica
        self.view = transport.view

    def average(self, contribution: Contribution) -> Pending:
        pending = self._transport.average(contribution)

        def wait() -> Average:
            self._turn.release()
            try:
                return pending.wait()
            finally:
                self._turn.acquire()

        return Pending(wait)

    def publish(self, source: SnapshotSource, version: Callable[[int], object] | None = None) -> None:
        self._transport.publish(source, version)

    def fetch(self, fragment: int, donors: Sequence[int], expected_bytes: int | None = None) -> Any:
        return self._transport.fetch(fragment, donors, expected_bytes)

    def tick(self) -> None:
        self._transport.tick()


def in_turns(train: Callable[[int, Transport], Any], replicas: int = 2) -> list[Any]:
    """Return the results of ``train(replica, transport)`` for every replica; raise the first error that one raises."""
    hub, turn = InProcessTransport(replicas), threading.Lock()
    results: dict[int, Any] = {}

    def run(replica: int) -> None:
        with turn:
            try:
                results[replica] = train(replica, _TurnTaking(hub.endpoint(replica), turn))
            except BaseException as error:  # raised again below
                results[replica] = error

    threads = [threading.Thread(target=run, args=(replica,)) for replica in range(replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return [results[replica] for replica in range(replicas)]
