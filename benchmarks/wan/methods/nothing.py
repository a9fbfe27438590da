"""No communication: what the others are measured against."""

from __future__ import annotations

from benchmarks.wan.methods import base

__all__ = ["Program"]


class Program(base.Program):
    """Inner steps alone."""

    def step(self, step: int) -> None:
        self.loop.compute()
        self.loop.update(step)

    def digest(self) -> str:
        return ""
