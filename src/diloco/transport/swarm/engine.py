"""The parts of Hivemind that this package uses, imported on first use: its DHT, and libp2p's identities and daemon.

What it takes of Hivemind's private names, and what it changes in its modules, is here and in `dht` alone.

Hivemind dates records by the clocks of the machines, and refuses peers whose clock is more than 3 s off. Here each
node keeps a record as long by its own clock, which goes on evenly when somebody sets the machine's. No peer believes
what another one says the time is, and the clocks of two machines may differ by a day.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import time
import warnings
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from diloco.errors import ConfigurationError
from diloco.transport.connections.streams import Stream, within
from diloco.units import visible
from diloco.waiting import elapsed_s

_IN_A_SESSION = "import os, sys; os.setsid(); os.execv(sys.argv[1], sys.argv[1:])"
# what a peer relays for two others before it ends their connection, which they then open again
_RELAYED = {"relayService": 1, "relayDataLimit": 1 << 40, "relayTimeLimit": "24h"}


@cache
def load_engine() -> Any:
    """Return Hivemind's classes as attributes of one object.

    Raises:
        ConfigurationError: if Hivemind is not installed.
    """
    import torch.multiprocessing as multiprocessing

    strategy = multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]  # torch has no types for it
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its mixture of experts, imported too, uses deprecated torch
            import hivemind.utils.auth
            import hivemind.utils.timed_storage
            from hivemind.dht import node, protocol, routing
            from hivemind.dht.crypto import RSASignatureValidator
            from hivemind.dht.routing import DHTID
            from hivemind.dht.validation import CompositeValidator, RecordValidatorBase
            from hivemind.p2p import P2P, PeerID
            from hivemind.p2p.p2p_daemon_bindings.utils import (
                P2PDaemonError,
                raise_if_failed,
                read_pbmsg_safe,
                write_pbmsg,
            )
            from hivemind.proto import crypto_pb2, dht_pb2, p2pd_pb2
            from hivemind.utils.crypto import RSAPrivateKey
            from hivemind.utils.multiaddr import Multiaddr

            from diloco.transport.swarm.dht import TALLY, DHTNode, DHTProtocol, Tally
    except ImportError as error:
        remedy = "Install it with pip install 'diloco[swarm]'."
        if sys.platform == "win32":  # its daemon is built for Linux and macOS
            remedy = "It does not run on native Windows: use WSL 2, or --transport tcp."
        raise ConfigurationError(
            f"network.transport='swarm' needs Hivemind, which can't be imported ({error}). {remedy}"
        ) from error
    finally:
        # importing Hivemind changes it for the whole process
        multiprocessing.set_sharing_strategy(strategy)  # type: ignore[no-untyped-call]  # as above

    if "HIVEMIND_LOGLEVEL" not in os.environ:  # the errors of this package report what matters
        for name in ("hivemind.p2p", "hivemind.dht"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    clock = SteadyClock()
    for module in (hivemind.utils, hivemind.utils.timed_storage, hivemind.utils.auth, node, protocol, routing):
        module.get_dht_time = clock.now_s
    protocol.MAX_DHT_TIME_DISCREPANCY_SECONDS = math.inf  # peers with another time are accepted
    node.DHTProtocol = DHTProtocol

    class P2PInASession(P2P):  # type: ignore[misc]  # its base has no types
        """A P2P whose daemon runs in its own session, so that signals such as Ctrl-C do not reach the daemon."""

        @staticmethod
        def _make_process_args(*words: Any, **options: Any) -> list[str]:
            return [sys.executable, "-ISc", _IN_A_SESSION, *P2P._make_process_args(*words, **_RELAYED, **options)]

        @property
        def daemon_pid(self) -> int:
            return int(self._child.pid)

        async def open_control(self) -> Stream:
            """Open a connection to the daemon for one request."""
            return await self._client.control.daemon_connector.open_connection()  # type: ignore[no-any-return]  # as above

        async def end(self, limit_s: float) -> set[asyncio.Task[None]]:
            """End the daemon, even if it no longer answers, and return the tasks that end with it."""
            ending = {task for task in (self._listen_task, self._reader_task) if task is not None}
            try:
                await within(limit_s, self.shutdown())
            except TimeoutError:
                self._child.kill()
                await self._child.wait()
            return ending

    def signing_key(key: Any) -> RSAPrivateKey:
        """Return a private key of the package ``cryptography`` as Hivemind has it."""
        signing = RSAPrivateKey.__new__(RSAPrivateKey)
        signing._private_key = key
        return signing

    def p2p_in(folder: Path) -> Any:
        """Return the class of a P2P whose sockets are in ``folder`` instead of in /tmp, where others could use them."""
        return type("P2PInAFolder", (P2PInASession,), {"_UNIX_SOCKET_PREFIX": f"/unix{folder}/"})

    classes = (PeerID, DHTNode, DHTProtocol, DHTID, Multiaddr, P2PDaemonError, Tally)
    functions = (p2p_in, signing_key, raise_if_failed, read_pbmsg_safe, write_pbmsg)
    validators = (RSASignatureValidator, RecordValidatorBase, CompositeValidator)
    named = {each.__name__: each for each in (*classes, *functions, *validators)}
    return SimpleNamespace(**named, crypto_pb2=crypto_pb2, dht_pb2=dht_pb2, p2pd_pb2=p2pd_pb2, clock=clock, TALLY=TALLY)


class SteadyClock:
    """The time of this machine when the process began, in seconds since 1970, and what has gone by since."""

    def __init__(self) -> None:
        self._ahead_s = time.time() - elapsed_s()

    def now_s(self) -> float:
        return elapsed_s() + self._ahead_s


def in_short(error: BaseException) -> str:
    """Return what libp2p or Hivemind says, in a line and cut: it may list every address that was tried."""
    return visible(" ".join(str(error).split()), 160) or type(error).__name__
