"""A run of peers that are connected over sockets runs again from its log."""

import json
import logging
from base64 import b64decode
from collections.abc import Iterator

import pytest

from diloco.errors import DEBUG, RoundVoidError
from diloco.protocol import Store
from diloco.transport import new_secret
from diloco.waiting import log_to_stderr
from tests.protocol.replay import replay
from tests.transport.contract import contribution
from tests.transport.wires import Wires

SECRET = new_secret()


@pytest.fixture
def debug_log() -> Iterator[None]:
    """What `--debug` and `--log json` do."""
    before = DEBUG.set(True)
    log_to_stderr(as_json=True)
    yield
    DEBUG.reset(before)
    log_to_stderr()
    assert logging.getLogger("diloco").level == logging.NOTSET


def test_three_peers_of_which_one_leaves_run_again_with_the_same_effects(
    debug_log: None, wires: Wires, capsys: pytest.CaptureFixture[str]
) -> None:
    transports = wires.meet(3, secret=SECRET, continue_without_lost=True, raise_on_loss=False)
    for step in range(3):
        for each in transports:
            each.tick()
        for pending in [each.average(contribution(each.replica, outer_step=step)) for each in transports]:
            pending.wait()
    first, second, third = transports
    first.connections.post(first.connections.send, 1, Store("order", SECRET.encode()))
    third.leave()
    with pytest.raises(RoundVoidError):
        third.average(contribution(2, outer_step=3)).wait()
    for pending in [each.average(contribution(each.replica, outer_step=3)) for each in (first, second)]:
        assert pending.wait().contributors == (0, 1)
    wires.close()
    lines = capsys.readouterr().err.splitlines()
    found = replay(lines)
    assert {0, 1, 2} <= {*found}
    events = [each for each in map(json.loads, lines) if "input" in each]
    assert sum(found.values()) == len(events)
    for name in ("Connected", "Begun", "Stepped", "Submitted", "Computed", "Exchanged", "Left", "BeatDue", "Closed"):
        assert any(each["message"].startswith(f"{name}(") for each in events), name
    assert not any("Store" in each["message"] for each in events)
    assert SECRET not in "".join(lines)
    assert not any(SECRET.encode() in b64decode(each["input"]) for each in events)


def test_a_run_without_debugging_logs_no_event(wires: Wires, capsys: pytest.CaptureFixture[str]) -> None:
    wires.meet(2)
    wires.close()
    assert "Connected" not in capsys.readouterr().err
