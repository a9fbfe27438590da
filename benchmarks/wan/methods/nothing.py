"""No communication: the baseline of all other methods."""

from __future__ import annotations

from benchmarks.wan.methods import base

__all__ = ["Program"]


class Program(base.Program):
    """Only inner steps."""

    def step(self, step: int) -> None:
        self.loop.compute()
        self.loop.update(step)

    def digest(self) -> str:
        return ""
