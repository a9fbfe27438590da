"""A donor of state that serves many: its rate limit, memory, lock, and unknown peers."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from diloco.errors import ConfigurationError, TransportError
from diloco.transport import MAX_FETCHERS, DonorService
from tests.same import same_values
from tests.transport.state_donors import LIMIT_S, Conversation, Fetcher, MakeDonor, state
from tests.transport.wires import at_once


def test_the_limit_holds_for_all_askers_together(make_donor: MakeDonor) -> None:
    held = state(numel=50_000)  # 400 kB
    donor, askers = make_donor(held, 800_000.0), [Fetcher(), Fetcher()]
    started_s = time.monotonic()
    results = at_once([lambda fetcher=fetcher: fetcher.fetch({0: donor}) for fetcher in askers])
    took_s = time.monotonic() - started_s
    for fetcher in askers:
        fetcher.connections.close()
    assert all(same_values(each, {**held, "fragment": 0}) for each in results)
    assert took_s > (800_000 - 200_000) / 800_000, "the burst is a quarter of a second's bytes"
    assert donor.copies == 1


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_limit_that_is_not_positive_is_refused(limit: float) -> None:
    with pytest.raises(ConfigurationError, match="rate limit must be a positive number"):
        DonorService(limit)


def test_a_donor_in_the_middle_of_a_change_is_waited_for(fetcher: Fetcher, make_donor: MakeDonor) -> None:
    """Its control thread continues meanwhile and answers others."""
    donor, entered, changed = make_donor(state()), threading.Event(), threading.Event()

    def source(fragment: int) -> Mapping[str, Any]:
        entered.set()
        assert changed.wait(LIMIT_S)
        return donor.copied(fragment)

    donor.service.source = source
    result = fetcher.start({1: donor})
    assert entered.wait(LIMIT_S)
    assert donor.connections.call(answer(), LIMIT_S) == 7
    changed.set()
    assert same_values(result(), {**state(), "fragment": 0})


def test_a_donor_may_leave_while_it_sends(fetcher: Fetcher, make_donor: MakeDonor) -> None:
    """Its peer does not read. Nothing stays open, which pytest would report."""
    donor = make_donor({"global_params": torch.zeros(8 << 20)})
    talk = Conversation(fetcher, donor)
    talk.say()
    offer = talk.hear()
    talk.say(0, offer["snapshot"], offset=0, size=offer["bytes"])
    assert talk.hear()["kind"] == "chunk"
    donor.connections.close()
    del donor
    gc.collect()


async def answer() -> int:
    return 7


def test_no_more_than_two_snapshots_of_a_fragment_are_held(fetcher: Fetcher, make_donor: MakeDonor) -> None:
    donor = make_donor(None)
    talks, offers = [Conversation(fetcher, donor) for _ in range(3)], []
    donor.service.source = donor.copied
    for talk in talks[:2]:
        donor.held = state(numel=100, seed=len(offers))
        talk.say(0)
        offers.append(talk.hear())
    donor.held = state(numel=100, seed=2)
    talks[2].say(0)
    assert talks[2].hear() == {"kind": "later", "reason": "it is still sending two earlier states"}
    assert (donor.copies, len(donor.service.cache.snapshots)) == (2, 2)
    talks[2].say(1)
    assert talks[2].hear()["kind"] == "offer", "another fragment has its own room"
    talks[0].end()
    heard = {"kind": "later"}
    while heard["kind"] == "later":  # until the donor has noticed the end of the connection
        talks[2].say(0)
        heard = talks[2].hear()
    assert heard["kind"] == "offer", "the first snapshot is no longer in use"
    assert (donor.copies, len(donor.service.cache.snapshots)) == (4, 3)
    talks[2].say(0, offers[1]["snapshot"], offset=0, size=1)
    assert talks[2].hear()["kind"] == "chunk", "a stored snapshot can be fetched"
    talks[2].say(1)
    assert talks[2].hear()["kind"] == "offer", "asking for another state releases the one before"
    talks[2].say(0, "feedfeedfeedfeed", offset=0, size=1)
    assert talks[2].hear() == {"kind": "moved"}


def test_a_few_are_served_at_once_and_the_others_come_again(fetcher: Fetcher, make_donor: MakeDonor) -> None:
    donor = make_donor(state())
    talks = [Conversation(fetcher, donor) for _ in range(MAX_FETCHERS)]
    for talk in talks:
        talk.say()
        assert talk.hear()["kind"] == "offer"
    with pytest.raises(TransportError, match=f"replica 1: it is serving {MAX_FETCHERS} others"):
        fetcher.fetch({1: donor}, timeout_s=1.0)
    result = fetcher.start({1: donor})
    talks[0].end()
    assert same_values(result(), {**state(), "fragment": 0})
    assert donor.copies == 1, "one copy for all fetchers"


STRANGE = [
    {"fragment": -1},
    {"fragment": True},
    {"fragment": "0"},
    {"snapshot": "known", "offset": -1, "size": 1},
    {"snapshot": "known", "offset": 0, "size": 0},
    {"snapshot": "known", "offset": 800, "size": 1},
    {"snapshot": "known", "offset": 0, "size": 1e3},
    {"snapshot": "known"},
]


@pytest.mark.parametrize("request_", STRANGE, ids=str)
def test_a_request_that_is_none_ends_its_connection_only(
    fetcher: Fetcher, make_donor: MakeDonor, request_: dict[str, Any]
) -> None:
    donor = make_donor(state(numel=100))
    talk = Conversation(fetcher, donor)
    talk.say()
    digest = talk.hear()["snapshot"]
    talk.say(**{**request_, **({"snapshot": digest} if "snapshot" in request_ else {})})
    with pytest.raises((EOFError, OSError)):
        talk.hear()
    assert same_values(fetcher.fetch({1: donor}), {**state(numel=100), "fragment": 0})


def test_a_state_that_nobody_would_take_is_refused_by_its_donor(fetcher: Fetcher, make_donor: MakeDonor) -> None:
    for value, words in [(torch.empty(1, dtype=torch.complex64), "complex"), (float("nan"), "nan"), ([1], "1")]:
        with pytest.raises(TransportError, match=rf"replica 1: its state can't be sent: .*{words}"):
            fetcher.fetch({1: make_donor({"global_params": value})})
