"""Contributions that are refused name who sent them, to those who look at the run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from diloco.errors import RoundVoidError
from diloco.events import RoundCommitted
from diloco.monitor import RunProgress, line
from diloco.protocol import header_of
from diloco.transport import PeerTransport
from tests.transport.contract import contribution, exchange
from tests.transport.wires import Wires


def say_again(transport: PeerTransport, fragment: int, outer_step: int) -> None:
    """Replica 1 sends replica 0 a header that nothing follows."""
    given = contribution(1, fragment=fragment, outer_step=outer_step)
    message = header_of(given).to_message(transport.view.id)
    transport.connections.post(transport.connections.send, 0, message)


def test_who_contributes_twice_is_named_and_the_first_one_stands(wires: Wires) -> None:
    first, second = wires.meet(2)
    pending = second.average(contribution(1))
    forged = replace(header_of(contribution(1, weight=5.0)), weight=5.0)
    second.connections.post(second.connections.send, 0, forged.to_message(second.view.id))
    average = first.average(contribution(0)).wait()
    assert torch.equal(average.values, pending.wait().values)
    assert average.weight == 2.0
    notes = [
        average.note,
        *(each.note for each in exchange([first, second], [contribution(m, outer_step=1) for m in (0, 1)])),
    ]
    told = "a contribution of replica 1 to fragment 0, outer step 0 was refused: it had contributed already"
    assert told in notes, "with the round itself, or, if that was decided first, with the next"


def test_who_contributes_to_a_round_that_is_long_over_is_named(wires: Wires) -> None:
    first, second = wires.meet(2)
    for outer_step in range(4):
        exchange([first, second], [contribution(m, outer_step=outer_step) for m in (0, 1)])
    say_again(second, 0, 0)
    average, other = exchange([first, second], [contribution(m, outer_step=4) for m in (0, 1)])
    told = "a contribution of replica 1 to fragment 0, outer step 0 was refused: "
    assert average.note in (told + "that round ended long ago", told + "it had contributed already")
    assert other.note == ""
    assert exchange([first, second], [contribution(m, outer_step=5) for m in (0, 1)])[0].note == "", "told once"


def test_what_is_left_out_of_a_mean_is_told_of(wires: Wires) -> None:
    transports = wires.meet(3, min_contributors=2)
    given = [contribution(m) for m in range(3)]
    given[1] = replace(given[1], payload=torch.full_like(given[1].payload, 255))
    averages = exchange(transports, given)
    assert {average.contributors for average in averages} == {(0, 2)}
    assert {average.note.partition(":")[0] for average in averages} == {"the contribution of replica 1 was refused"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"numel": 999}, "replica 1 was refused: it holds 999 values instead of 1000 values"),
        ({"buffers": None}, "replica 1 was refused: it holds no floating buffers"),
        ({"weight": 1e19}, "replica 1 was refused: its weight is 1e\\+19"),
        ({"withdrawn": "gradients that are not finite"}, "replica 1 was refused: gradients that are not finite"),
    ],
)
def test_whose_contribution_makes_a_round_void_is_named(wires: Wires, change: dict[str, object], words: str) -> None:
    transports = wires.meet(3)
    headers = [contribution(m) for m in range(3)]
    pending = [transports[m].average(headers[m]) for m in (0, 2)]
    given = replace(header_of(headers[1]), **change)  # type: ignore[arg-type]  # as strangers might
    for rank in (0, 2):
        transports[1].connections.post(transports[1].connections.send, rank, given.to_message(transports[1].view.id))
    for each in pending:
        with pytest.raises(RoundVoidError, match=words):
            each.wait()


def test_the_console_says_so_once_for_each_reason() -> None:
    def committed(replica: int, outer_step: int, note: str) -> RoundCommitted:
        return RoundCommitted(
            step=outer_step,
            replica=replica,
            fragment=0,
            outer_step=outer_step,
            contributors=(0,),
            sent_bytes=0,
            received_bytes=0,
            wait_s=0.0,
            note=note,
        )

    progress, why = RunProgress(), "the contribution of replica 1 was refused: it holds 3 values instead of 4 values"
    events = [
        committed(0, 1, why),
        committed(1, 1, why),
        committed(0, 2, ""),
        committed(0, 3, why),
        committed(0, 4, "x"),
    ]
    assert [progress.take(event, 0.0) for event in events] == [True, False, False, False, True]
    assert line(events[0], progress) == f"fragment 0, outer step 1, committed: {why}"
