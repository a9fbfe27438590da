"""The parts of Hivemind that are used: its DHT, and libp2p's identities and streams. Imported when first asked for."""

from __future__ import annotations

import logging
import math
import os
import sys
import warnings
from functools import cache
from types import SimpleNamespace
from typing import Any

from diloco.errors import ConfigurationError
from diloco.transport.hivemind.clock import NetworkClock

__all__ = ["load_engine"]

_IN_A_SESSION = "import os, sys; os.setsid(); os.execv(sys.argv[1], sys.argv[1:])"


@cache
def load_engine() -> Any:
    """Hivemind's classes by name.

    Raises:
        ConfigurationError: if it is not installed.
    """
    import torch.multiprocessing as multiprocessing

    strategy = multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]  # torch has no types for it
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its mixture of experts, which comes along, uses what torch deprecates
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
        raise ConfigurationError(
            f"transport.name='hivemind' was given, and Hivemind can't be imported ({error}); "
            "pip install 'diloco[hivemind]' would work. Nothing was started."
        ) from error
    finally:
        # importing Hivemind changes it for the whole process
        multiprocessing.set_sharing_strategy(strategy)  # type: ignore[no-untyped-call]  # as above

    if "HIVEMIND_LOGLEVEL" not in os.environ:  # what matters of what libp2p says is in the errors of this package
        for name in ("hivemind.p2p", "hivemind.dht"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    clock = NetworkClock()
    for module in (hivemind.utils, hivemind.utils.timed_storage, hivemind.utils.auth, node, protocol, routing):
        module.get_dht_time = clock.now_s
    protocol.MAX_DHT_TIME_DISCREPANCY_SECONDS = math.inf  # what is far off is moved, not refused

    class P2PInASession(P2P):  # type: ignore[misc]  # its base has no types
        """Its daemon has a session of its own: a signal to this process's group, such as Ctrl-C, is not for it."""

        @staticmethod
        def _make_process_args(*words: Any, **options: Any) -> list[str]:
            return [sys.executable, "-ISc", _IN_A_SESSION, *P2P._make_process_args(*words, **options)]

    return SimpleNamespace(
        P2P=P2PInASession,
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
