"""Whole histories run again from their log."""

import contextlib
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from diloco.protocol import LoggedMachine, Rules
from tests.protocol import simulated
from tests.protocol.histories import KINDS
from tests.protocol.replay import main, replay


def logged(kind: str, seed: int) -> list[str]:
    """Return the lines of all ranks of a history."""
    lines: list[str] = []

    def write(words: str, fields: Any) -> None:
        lines.append(json.dumps({"message": words, **fields}, allow_nan=False))

    def machine(rules: Rules) -> LoggedMachine:
        return LoggedMachine(rules, write)

    with mock.patch.object(simulated, "Machine", machine), contextlib.suppress(AssertionError):
        simulated.finish(KINDS[kind](4, seed))
    return lines


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_a_simulated_history_runs_again_with_the_same_effects(kind: str, seed: int) -> None:
    lines = logged(kind, seed)
    found = replay(lines)
    assert {*found} >= {0, 1, 2, 3}
    assert sum(found.values()) == sum("input" in json.loads(line) for line in lines)


def test_the_first_effect_that_differs_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = logged("any faults", 0)
    place = next(place for place, line in enumerate(lines) if "'messages'" in line)
    changed = json.loads(lines[place])
    rank, changed["effects"] = changed["rank"], changed["effects"].replace("'messages'", "'others'")
    (tmp_path / "log").write_text("\n".join(["diloco: a line for people", *lines[:place], json.dumps(changed)]))
    with pytest.raises(SystemExit, match="1"):
        main(str(tmp_path / "log"))
    said = capsys.readouterr().out.splitlines()
    assert sum("the same effects" in line for line in said) == 3
    (differs,) = (line for line in said if line.startswith(f"rank {rank}: event "))
    assert changed["message"] in differs
    assert "'others': [(" in said[said.index(differs) + 1]
    assert "'messages': [(" in said[said.index(differs) + 2]


@pytest.mark.parametrize(("lines", "words"), [([], "has no events"), (slice(8, None), "No line says with which rules")])
def test_a_log_that_lacks_its_beginning_is_refused(tmp_path: Path, lines: Any, words: str) -> None:
    (tmp_path / "log").write_text("\n".join(lines and logged("two groups", 0)[lines]))
    with pytest.raises(SystemExit, match=words):
        main(str(tmp_path / "log"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line[:-20],
        lambda line: json.dumps(json.loads(line) | {"input": "AAAA"}),
        lambda line: json.dumps(json.loads(line) | {"input": 3}),
        lambda line: json.dumps({"rank": 0, "input": json.loads(line)["input"]}),
        lambda line: json.dumps({"rank": 0, "rules": {"rank": "none", "colour": 3}}),
    ],
    ids=["cut", "another event", "no event", "no time", "no rules"],
)
def test_a_damaged_line_is_named(tmp_path: Path, damage: Any) -> None:
    lines = logged("two groups", 0)
    place = next(place for place, line in enumerate(lines) if "input" in json.loads(line))
    (tmp_path / "log").write_text("\n".join([*lines[:place], damage(lines[place]), *lines[place + 1 :]]))
    with pytest.raises(SystemExit, match=rf"Line {place + 1} is damaged"):
        main(str(tmp_path / "log"))
