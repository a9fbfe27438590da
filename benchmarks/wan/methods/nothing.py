"""No communication: the baseline of all other methods."""

from benchmarks.wan.methods import base


class Program(base.Program):
    """Only inner steps."""

    def step(self, step: int) -> None:
        self.loop.compute()
        self.loop.update(step)

    def digest(self) -> str:
        return ""
