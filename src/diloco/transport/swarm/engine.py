"""The parts of Hivemind that this package uses, imported on first use: its DHT, and libp2p's identities and streams.

Hivemind dates records by the clocks of the machines, and refuses peers whose clock is more than 3 s off. This package
makes the DHT use a network time instead: a peer adopts the time of the peers through which it enters the network. So no
machine's clock has to be right, and the network time does not jump when a machine's clock is set.
"""

from __future__ import annotations

import logging
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from diloco.errors import ConfigurationError

__all__ = ["NetworkClock", "load_engine"]

_IN_A_SESSION = "import os, sys; os.setsid(); os.execv(sys.argv[1], sys.argv[1:])"
_STEP_S = 60.0  # by which the peers of the run can change the time at once
_NOISE_S = 1.0  # the error in a peer's time that a slow answer may cause


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
            from hivemind.dht.node import DHTNode
            from hivemind.dht.protocol import DHTProtocol
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
            from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey
            from hivemind.utils.multiaddr import Multiaddr
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
    clock = NetworkClock()
    for module in (hivemind.utils, hivemind.utils.timed_storage, hivemind.utils.auth, node, protocol, routing):
        module.get_dht_time = clock.now_s
    protocol.MAX_DHT_TIME_DISCREPANCY_SECONDS = math.inf  # peers with another time are accepted and adapt

    class P2PInASession(P2P):  # type: ignore[misc]  # its base has no types
        """A P2P whose daemon runs in its own session, so that signals such as Ctrl-C do not reach the daemon."""

        @staticmethod
        def _make_process_args(*words: Any, **options: Any) -> list[str]:
            return [sys.executable, "-ISc", _IN_A_SESSION, *P2P._make_process_args(*words, **options)]

    def p2p_in(folder: Path) -> Any:
        """Return the class of a P2P whose sockets are in ``folder`` instead of in /tmp, where others could use them."""
        return type("P2PInAFolder", (P2PInASession,), {"_UNIX_SOCKET_PREFIX": f"/unix{folder}/"})

    return SimpleNamespace(
        p2p_in=p2p_in,
        PeerID=PeerID,
        DHTNode=DHTNode,
        DHTProtocol=DHTProtocol,
        DHTID=DHTID,
        Multiaddr=Multiaddr,
        P2PDaemonError=P2PDaemonError,
        RSAPrivateKey=RSAPrivateKey,
        RSAPublicKey=RSAPublicKey,
        RSASignatureValidator=RSASignatureValidator,
        RecordValidatorBase=RecordValidatorBase,
        CompositeValidator=CompositeValidator,
        crypto_pb2=crypto_pb2,
        dht_pb2=dht_pb2,
        p2pd_pb2=p2pd_pb2,
        raise_if_failed=raise_if_failed,
        read_pbmsg_safe=read_pbmsg_safe,
        write_pbmsg=write_pbmsg,
        clock=clock,
    )


class NetworkClock:
    """The time that the peers of a network share, in seconds since 1970; it starts from this machine's clock."""

    def __init__(self) -> None:
        self._ahead_s = time.time() - _elapsed_s()

    def now_s(self) -> float:
        """Return the time of the network."""
        return _elapsed_s() + self._ahead_s

    def off_s(self) -> float:
        """Return how many seconds the clock of this machine is ahead of the network's (negative: behind)."""
        return time.time() - self.now_s()

    def enter(self, ahead_s: Sequence[float]) -> None:
        """Adopt the time of a network.

        Args:
            ahead_s: how many seconds the clocks of some of its peers are ahead of this one; empty if unknown.

        >>> clock = NetworkClock()
        >>> clock.enter([3600.0, 3600.5, -50.0, math.inf])
        >>> round(clock.off_s())
        -3600
        """
        if finite := [each for each in ahead_s if math.isfinite(each)]:
            self._ahead_s += statistics.median_low(finite)

    def keep_up(self, ahead_s: Sequence[float]) -> None:
        """Follow the time that most peers of the run have, by a minute at most; if there are two times, the later one.

        Args:
            ahead_s: as in `enter`.

        >>> clock = NetworkClock()
        >>> clock.keep_up([1e9]), clock.keep_up([math.inf]), clock.keep_up([math.nan, 0.0, 0.5, -3600.0])
        (None, None, None)
        >>> round(clock.off_s())
        -60
        """
        ahead = statistics.median_high([0.0, *(each for each in ahead_s if math.isfinite(each))])
        if abs(ahead) > _NOISE_S:
            self._ahead_s += max(-_STEP_S, min(_STEP_S, ahead))


def _elapsed_s() -> float:
    """Return a time that no setting of the clock changes, and that goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()
