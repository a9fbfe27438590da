"""The attacks of benchmarks/hostile: the fast ones do no harm, and parsers raise nothing but refusals."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from benchmarks.hostile import doors, members, records, strangers, table
from benchmarks.hostile.attack import Attack
from benchmarks.hostile.fuzz import PARSERS, feed

QUICK = [
    *(each for each in strangers.ATTACKS if each.name.startswith(("headers", "a change", "welcomes", "a replacement"))),
    *(
        each
        for each in members.ATTACKS
        if each.name.startswith(("a reason", "2^60", "the number", "a kind", "300 facts"))
    ),
    *(
        each
        for each in doors.ATTACKS
        if each.name.startswith(("a pickle", "a hello as a living", "JSON", "a proof of"))
    ),
    *records.ATTACKS,
]


@pytest.mark.parametrize("attack", QUICK, ids=lambda attack: attack.name)
def test_an_attack_that_is_quick_to_try_does_no_harm(attack: Attack) -> None:
    assert attack.row()["harm"] == []


def test_there_are_enough_attacks_and_each_has_its_name() -> None:
    assert len(table.ATTACKS) >= 100
    twice = [name for name, count in Counter(each.name for each in table.ATTACKS).items() if count > 1]
    assert not twice


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_raises_nothing_but_the_refusal(name: str) -> None:
    strategy, parse = PARSERS[name]
    tried, failure = feed(strategy, parse, 20)
    assert tried >= 10
    assert failure == ""


def test_what_a_parser_should_not_raise_is_found() -> None:
    def careless(value: Any) -> int:
        return {}[value]  # type: ignore[no-any-return]

    strategy, _ = PARSERS["a text of another"]
    assert "KeyError" in feed(strategy, careless, 20)[1]
