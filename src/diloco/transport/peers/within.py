"""Waiting for something for a limited time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

__all__ = ["within"]

T = TypeVar("T")


async def within(seconds: float | None, awaited: Awaitable[T]) -> T:
    """As ``asyncio.wait_for``, which in Python 3.11 forgets that its task is to end when that comes in the moment in
    which what it waits for is done: the task then goes on, and whoever waits for its end waits for ever.

    Raises:
        TimeoutError: if it takes longer.
    """
    async with asyncio.timeout(seconds):
        return await awaited
