"""The part of the DHT that a peer holds for others, where anybody may be a node.

It is Hivemind's, with bounds on what strangers can do. Only its author can have a record stored, over a connection that
has proved its identity: nobody stores in the name of others, or replays what they stored. A node keeps a record for
half an hour after its author last announced it, by its own clock. The expiry that Hivemind has in each record is
signed, and only tells an author's records apart. As authors announce their records every minute, these are neither
handed on to new nodes nor cached.

Importing this module imports Hivemind; `load_engine` does.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from typing import Any

from hivemind.dht import node, protocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2PContext
from hivemind.proto import dht_pb2
from hivemind.utils.timed_storage import ValueWithExpiration

from diloco.transport.connections.limits import ArrivalLimit
from diloco.transport.swarm.identity import RECORD_S, owner_of
from diloco.waiting import elapsed_s

MAX_KEY_BYTES = 1 << 20  # of the records under one key: a quarter of the largest message
MAX_OWNER_BYTES = 1 << 16  # of the records of one peer, under all keys
MAX_BYTES = 16 << 20  # of all records
_OVERHEAD_BYTES = 300  # of a record, beside its value and its subkey
_MAX_ANSWERED = 1024  # records of an answer that are read
_MAX_REQUESTS, _REQUESTS_S = 256, 16.0  # of one peer, in this time


@dataclass
class Tally:
    """How many nodes were asked in a look-up, and how many answered."""

    asked: int = 0
    answered: int = 0


TALLY: ContextVar[Tally | None] = ContextVar("TALLY", default=None)
"""That of the look-up for which the present task works."""


def node_id_of(peer_id: Any) -> DHTID:
    """Return the id of a peer's node: it follows from the peer's identity, so that nobody has several."""
    return DHTID.generate(source=str(peer_id).encode())


@dataclass(frozen=True)
class _Stored:
    value: bytes
    expiration_time: float
    until_s: float  # by `elapsed_s`
    owner: str
    num_bytes: int


class RecordStore(DHTLocalStorage):  # type: ignore[misc]  # its base has no types
    """The records that a node holds: one of each owner under a key.

    Where there is no room, the largest record under the key goes, or the oldest of the owner that has most.
    """

    def __init__(self, me: str) -> None:
        super().__init__()
        self._me = me
        self._records: dict[DHTID, dict[bytes, _Stored]] = {}
        # places of all records, and of those of an owner, the oldest first
        self._places: OrderedDict[tuple[DHTID, bytes], None] = OrderedDict()
        self._owner_places: dict[str, OrderedDict[tuple[DHTID, bytes], None]] = {}
        self._key_bytes, self._owner_bytes = Counter[DHTID](), Counter[str]()
        self.num_bytes = 0

    def keep(self, key: DHTID, subkey: bytes, value: bytes, expiration_time: float, owner: str) -> bool:
        """Store a record of ``owner`` in place of the one that it has under this key. Return whether it is stored."""
        self._forget_old()
        self._drop(key, subkey)
        size = len(value) + len(subkey) + _OVERHEAD_BYTES
        if self._owner_bytes[owner] + size > MAX_OWNER_BYTES:
            return False
        self._records.setdefault(key, {})[subkey] = _Stored(value, expiration_time, elapsed_s() + RECORD_S, owner, size)
        self._key_bytes[key] += size
        self._owner_bytes[owner] += size
        self.num_bytes += size
        self._places[key, subkey] = None
        self._owner_places.setdefault(owner, OrderedDict())[key, subkey] = None
        while self._key_bytes[key] > MAX_KEY_BYTES:
            under_key = self._records[key]
            self._drop(key, max(under_key, key=lambda each: under_key[each].num_bytes))
        while self.num_bytes > MAX_BYTES:
            most = max(self._owner_bytes, key=self._owner_bytes.__getitem__)
            self._drop(*next(iter(self._owner_places[most])))
        return subkey in self._records.get(key, {})

    def store(self, key: DHTID, value: bytes, expiration_time: float, subkey: bytes | None = None) -> bool:
        """Store a record of this node itself."""
        return subkey is not None and self.keep(key, subkey, value, expiration_time, self._me)

    def get(self, key: DHTID) -> Any:
        self._forget_old()
        return _dictionary({subkey: (each.value, each.expiration_time) for subkey, each in self._of(key).items()})

    def _of(self, key: DHTID) -> dict[bytes, _Stored]:
        return self._records.get(key, {})

    def _drop(self, key: DHTID, subkey: bytes) -> None:
        if (stored := self._of(key).pop(subkey, None)) is None:
            return
        self._key_bytes[key] -= stored.num_bytes
        self._owner_bytes[stored.owner] -= stored.num_bytes
        self.num_bytes -= stored.num_bytes
        del self._places[key, subkey], self._owner_places[stored.owner][key, subkey]
        if not self._records[key]:
            del self._records[key], self._key_bytes[key]
        if not self._owner_bytes[stored.owner]:
            del self._owner_bytes[stored.owner], self._owner_places[stored.owner]

    def _forget_old(self) -> None:
        now_s = elapsed_s()
        while self._places:  # all are kept equally long
            key, subkey = next(iter(self._places))
            if self._records[key][subkey].until_s >= now_s:
                break
            self._drop(key, subkey)


def _dictionary(records: Mapping[bytes, tuple[bytes, float]]) -> Any:
    """Return records as Hivemind has them, or None if there are none. No clock decides which of them are expired."""
    if not records:
        return None
    dictionary = DictionaryDHTValue()
    dictionary.frozen = True
    for subkey, (value, expiration_time) in records.items():
        dictionary.store(subkey, value, expiration_time)
    return ValueWithExpiration(dictionary, dictionary.latest_expiration_time)


class DHTProtocol(protocol.DHTProtocol):  # type: ignore[misc]  # its base has no types; its name is in those of its calls
    """The calls between nodes."""

    @classmethod
    async def create(cls, p2p: Any, *arguments: Any, **more: Any) -> Any:
        self = await super().create(p2p, *arguments, **more)
        self.storage = RecordStore(str(p2p.peer_id))
        return self

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self._requests = ArrivalLimit(_MAX_REQUESTS, _REQUESTS_S)

    def _admits(self, context: P2PContext) -> bool:
        return self._requests.admits([str(context.remote_id)], elapsed_s())

    async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        if not self._admits(context):
            return dht_pb2.PingResponse(peer=self.node_info)
        return await super().rpc_ping(request, context)

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        if not self._admits(context):
            return dht_pb2.FindResponse(results=[], peer=self.node_info)
        del request.keys[1:]  # a search of this package asks for one, and an answer may be thousands of times as large
        return await super().rpc_find(request, context)

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        """Store a record of the peer that asks for it. There is one in a request of this package."""
        response = dht_pb2.StoreResponse(store_ok=[False] * len(request.keys), peer=self.node_info)
        if self._admits(context) and len(request.keys) == 1:
            record = DHTRecord(request.keys[0], request.subkeys[0], request.values[0], request.expiration_time[0])
            with suppress(Exception):  # parsers raise errors of many types
                response.store_ok[0] = self._kept(record, str(context.remote_id))
        if request.peer:
            asyncio.create_task(super().rpc_ping(dht_pb2.PingRequest(peer=request.peer), context))  # noqa: RUF006  # as Hivemind
        return response

    def _kept(self, record: DHTRecord, author: str) -> bool:
        subkey = self.serializer.loads(record.subkey)
        if owner_of(subkey) != author or not self.record_validator.validate(record):
            return False
        key = DHTID.from_bytes(record.key)
        return bool(self.storage.keep(key, subkey, record.value, record.expiration_time, author))

    async def call_find(self, peer: Any, keys: Collection[DHTID]) -> Any:
        """Ask a node. Of its answer only valid records and ids of nodes count, and not what it says of their expiry."""
        found = await super().call_find(peer, keys)
        if found is None:
            return None
        return {key: (self._valid(key, value), self._others(nodes)) for key, (value, nodes) in found.items()}

    def _others(self, nodes: Mapping[DHTID, Any]) -> dict[DHTID, Any]:
        """Return the nodes that are named rightly, without this one, in whose name Hivemind's search would fail.

        It is named by who knew it before it came back to listen nowhere, and by anybody who wants to.
        """
        return {each: at for each, at in nodes.items() if each == node_id_of(at) and each != self.node_id}

    def _validate_dictionary(self, key_bytes: bytes, dictionary: Any) -> bool:
        return True  # `_valid` leaves out single records: one that is not valid must not hide the others

    def _valid(self, key: DHTID, found: Any) -> Any:
        valid = {}
        if found is not None and isinstance(found.value, DictionaryDHTValue):
            for subkey, (value, expiration_time) in islice(found.value.data.items(), _MAX_ANSWERED):
                with suppress(Exception):  # parsers raise errors of many types
                    record = DHTRecord(key.to_bytes(), self.serializer.dumps(subkey), value, expiration_time)
                    if self.record_validator.validate(record):
                        valid[subkey] = value, expiration_time
        return _dictionary(valid)

    async def update_routing_table(self, node_id: Any, peer_id: Any, responded: bool = True) -> None:
        """Note that a node has answered, or has not. It is handed nothing to store, unlike in Hivemind."""
        table, its_id = self.routing_table, node_id_of(peer_id)
        if not responded:
            if its_id in table:
                del table[its_id]
            return
        if node_id != its_id:
            return
        bucket = table.buckets[table.get_bucket_index(its_id)]
        if its_id in table or len(bucket.replacement_nodes) < bucket.size:
            may_be_gone = table.add_or_update_node(its_id, peer_id)
            if may_be_gone is not None:
                asyncio.create_task(self.call_ping(may_be_gone[1]))  # noqa: RUF006  # as Hivemind


class DHTNode(node.DHTNode):  # type: ignore[misc]  # its base has no types
    async def _call_find_with_blacklist(self, peer_id: Any, keys: Collection[DHTID]) -> Any:
        found = await super()._call_find_with_blacklist(peer_id, keys)
        if (tally := TALLY.get()) is not None:
            tally.asked += 1
            tally.answered += found is not None
        return found
