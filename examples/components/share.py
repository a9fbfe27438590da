"""The global parameters, and a share of what was trained while they were in flight."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    share: float = 0.5
    keeps_sent = True

    def merge(self, local, global_params, sent):
        local.sub_(sent).mul_(self.share).add_(global_params)
