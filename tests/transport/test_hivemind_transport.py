"""The hivemind transport: the contract over direct streams, and what concerns payloads over libp2p's as well."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from diloco.transport.base import Transport
from tests.transport.contract import MakeEndpoints, PayloadContract, TransportContract
from tests.transport.swarms import HIVEMIND_LEAVES_CONNECTIONS, Swarms

pytestmark = HIVEMIND_LEAVES_CONNECTIONS


class TestDirectStreamsContract(TransportContract):
    @pytest.fixture
    def make_endpoints(self, swarms: Swarms) -> MakeEndpoints:
        def make(num_replicas: int) -> Sequence[Transport]:
            return swarms.meet(num_replicas, direct="only", streams=2)

        return make


class TestLibp2pStreamsContract(PayloadContract):
    @pytest.fixture
    def make_endpoints(self, swarms: Swarms) -> MakeEndpoints:
        def make(num_replicas: int) -> Sequence[Transport]:
            return swarms.meet(num_replicas, direct="never")

        return make
