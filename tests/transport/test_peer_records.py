"""Records that peers store in the DHT, where any peer can write."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from diloco.transport import Admission, PeerRecord, new_secret, owner_of

_KEY = rsa.generate_private_key(65537, 2048)
ADMISSION = Admission("run", new_secret())
SUBKEY = b"[owner:" + _KEY.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"]"
ADDRESSES = ("/ip4/10.0.0.1/tcp/4",)
RECORD = PeerRecord(3, "swarm", ADDRESSES, True, owner_of(SUBKEY))


def forged(**fields: Any) -> bytes:
    """A record by an author that knows the secret."""
    names = ("number", "swarm", "addresses", "finished")
    content = msgspec.json.encode([(msgspec.structs.asdict(RECORD) | fields)[name] for name in names])
    return msgspec.json.encode((content.decode(), ADMISSION.sign(SUBKEY, content).hex()))


def test_a_record_survives_its_way_as_a_line_of_text() -> None:
    """Regression: Hivemind did not find its signature behind a record with the byte 10."""
    assert PeerRecord.from_bytes(SUBKEY, forged(number=-1), ADMISSION).number == -1
    for number in range(0, 300, 7):
        record = msgspec.structs.replace(RECORD, number=number, addresses=("x" * number,))
        data = record.to_bytes(SUBKEY, ADMISSION)
        assert data.decode().isprintable()
        assert PeerRecord.from_bytes(SUBKEY, data, ADMISSION) == record


def test_only_who_has_the_secret_makes_a_record_that_counts_and_no_key_is_read_before() -> None:
    """Reading a key takes a fifth of a millisecond, which a flood of records would take for each of them."""
    mine = RECORD.to_bytes(SUBKEY, ADMISSION)
    others = [Admission("run"), Admission("run", new_secret()), Admission("x", ADMISSION.secret)]
    with mock.patch.object(sys.modules[owner_of.__module__], "owner_of") as owner:
        for data in (*(RECORD.to_bytes(SUBKEY, other) for other in others), mine.replace(b"swarm", b"swarn")):
            with pytest.raises(ValueError, match="its author does not know the secret"):
                PeerRecord.from_bytes(SUBKEY, data, ADMISSION)
        with pytest.raises(ValueError, match="its author does not know the secret"):
            PeerRecord.from_bytes(b"of another peer", mine, ADMISSION)
    owner.assert_not_called()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b'["' + b"[" * 3000 + b'", ""]',
        forged(number=1 << 40),
        forged(number=-3),
        forged(swarm="\x1b[2J"),
        forged(addresses=[1]),
        forged(finished=7),
        forged(swarm="x" * (1 << 16)),
    ],
    ids=range(10),  # each run has other keys
)
def test_what_is_no_record_is_left_out(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        PeerRecord.from_bytes(SUBKEY, data, ADMISSION)
