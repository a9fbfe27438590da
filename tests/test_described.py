"""Types that several threads decode at the same time."""

from __future__ import annotations

import ast
import threading
from dataclasses import dataclass
from pathlib import Path

import diloco
from diloco.protocol import decode, encode
from diloco.waiting import in_thread
from tests.processes import Processes

ROOT = Path(diloco.__file__).parent
CALLS = {"msgspec.convert": 1, "msgspec.json.decode": 1, "msgspec.msgpack.decode": 1, "msgspec.msgpack.Decoder": 0}


def slow() -> type[int]:
    """The type of a field, which is known once the other thread has had time to need it, too."""
    begun.set()
    other_has_ended.wait(0.2)
    return int


@dataclass
class Part:
    number: slow()  # type: ignore[valid-type]  # evaluated when it is described


@dataclass
class Whole:
    part: Part


begun, other_has_ended = threading.Event(), threading.Event()


def decode_in_two_threads(rank: int) -> list[Whole]:
    data = encode(Whole(Part(3)))

    def decode_too() -> Whole:
        begun.wait()
        try:
            found: Whole = decode(data, Whole | None)
            return found
        finally:
            other_has_ended.set()

    other = in_thread(decode_too, "other")
    return [decode(data, Whole), other.result(20.0)]


def test_two_threads_that_need_one_type_for_the_first_time_both_get_it() -> None:
    """The second one ended the process by a segmentation fault."""
    with Processes() as processes:
        processes.start(1, decode_in_two_threads)
        assert processes.results() == {0: 2 * [Whole(Part(3))]}


def test_all_types_are_described_before_they_are_decoded() -> None:
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and (at := CALLS.get(ast.unparse(node.func))) is not None:
                named = [each.value for each in node.keywords if each.arg == "type"]
                for kind in (*node.args[at : at + 1], *named):
                    assert ast.unparse(kind).startswith("described("), f"{path}:{node.lineno}"
