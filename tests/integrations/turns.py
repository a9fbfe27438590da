"""Run training scripts in the threads of one process, one at a time: a script yields when it waits for the others.

Process-wide state of a framework, such as random generators and warning filters, is thus used by one script at a time,
and tests are exactly reproducible.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from diloco.algorithm import Contribution
from diloco.protocol import Average
from diloco.transport import InProcessTransport, Pending, Transport


def _yielding(transport: Transport, turn: threading.Lock) -> Transport:
    """Let a transport yield the turn while it waits for an average."""
    average = transport.average

    def averaged(contribution: Contribution) -> Pending:
        pending = average(contribution)

        def wait() -> Average:
            turn.release()
            try:
                return pending.wait()
            finally:
                turn.acquire()

        return Pending(wait)

    transport.average = averaged  # type: ignore[method-assign]
    return transport


def in_turns(train: Callable[[int, Transport], Any], replicas: int = 2) -> list[Any]:
    """Return the results of ``train(replica, transport)`` for every replica."""
    hub, turn = InProcessTransport(replicas), threading.Lock()

    def run(replica: int) -> Any:
        with turn:
            return train(replica, _yielding(hub.endpoint(replica), turn))

    with ThreadPoolExecutor(replicas) as threads:
        return list(threads.map(run, range(replicas)))


def alone_of_two(ended: list[BaseException]) -> Callable[..., AbstractContextManager[Transport]]:
    """Return what connects a replica to one that sends nothing, and notes the error with which the connection ends."""

    @contextmanager
    def connect(model: Any = None) -> Iterator[Transport]:
        try:
            yield InProcessTransport(2, round_timeout_s=0.01).endpoint(0)
        except BaseException as error:
            ended.append(error)
            raise

    return connect
