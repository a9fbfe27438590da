"""Waiting with a timeout, and cancellation in the meantime."""

from __future__ import annotations

import asyncio

import pytest

from diloco.transport import within


def test_what_is_there_in_time_is_returned_and_what_is_not_is_an_error() -> None:
    async def both() -> None:
        assert await within(30.0, asyncio.sleep(0, "there")) == "there"
        with pytest.raises(TimeoutError):
            await within(0.01, asyncio.Event().wait())

    asyncio.run(both())


def test_who_is_told_to_end_in_the_moment_it_comes_ends() -> None:
    """``asyncio.wait_for`` loses that cancellation."""

    async def one(coming: asyncio.Future[None]) -> None:
        async def come() -> None:
            await coming

        await within(30.0, come())
        await asyncio.Event().wait()

    async def both() -> None:
        coming: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(one(coming))
        for _ in range(3):
            await asyncio.sleep(0)
        coming.set_result(None)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=1.0)
        assert task in done
        assert task.cancelled()

    asyncio.run(both())
