"""Processes of tests return values and failures, and none is left over."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from torch import Tensor

from tests.processes import Processes, receive, report


def doubled(rank: int, values: Tensor) -> tuple[int, int, Tensor]:
    if rank == 3:
        raise ValueError("three is one too many")
    return os.getpid(), torch.get_num_threads(), 2 * values + rank


def waits(rank: int) -> None:
    report("ready")
    receive()


def stubborn(rank: int) -> None:
    """Fail, and then never end."""
    threading.Thread(target=threading.Event().wait).start()
    raise ValueError("I did not want to")


def test_results_come_back_by_value_and_failures_with_their_traceback() -> None:
    with Processes() as processes:
        processes.start(2, doubled, torch.ones(2))
        assert processes.start(1, doubled, torch.zeros(1 << 18)) == range(2, 3)  # 1 MB, more than the buffer of a pipe
        results = processes.results()
        assert len({pid for pid, _, _ in results.values()} | {os.getpid()}) == 4
        assert {threads for _, threads, _ in results.values()} == {1}
        assert results[1][2].tolist() == [3, 3]
        assert torch.equal(results[2][2], torch.full((1 << 18,), 2.0))
        assert processes.exit_code(0) == 0
        processes.start(1, doubled, torch.ones(1))
        with pytest.raises(AssertionError, match=r"rank 3 failed:(?s:.*)in doubled(?s:.*)three is one too many"):
            processes.results()
        assert processes.exit_code(3) == 1
        assert processes.results(ranks=[0, 1]).keys() == {0, 1}


def test_nobody_is_left_behind() -> None:
    with Processes() as waiting:
        waiting.start(2, waits)
        waiting.next_report(0)
        waiting.freeze(1)
        with pytest.raises(AssertionError, match="no result from rank 0, 1 within 0 s"):
            waiting.results(timeout_s=0)
    with Processes() as failed:
        failed.start(1, stubborn)
        with pytest.raises(AssertionError, match="ValueError: I did not want to"):
            failed.results()
    assert [member.process.exitcode for member in (*waiting.members, *failed.members)] == [-9, -9, -9]
