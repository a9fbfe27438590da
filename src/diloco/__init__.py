"""Train one language model over links that are slow, far apart and unreliable: DiLoCo and Streaming DiLoCo in PyTorch.

The names below load what they need when they are first used, so that ``import diloco`` alone is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco.algorithm.clipping import Clipping
    from diloco.algorithm.codec import Codec, make_codec
    from diloco.algorithm.fragments import Fragment, partition
    from diloco.algorithm.merge import AlphaMerge, RebaseMerge
    from diloco.algorithm.muon import Muon, muon
    from diloco.algorithm.outer_optimizer import Adam, Nesterov, Sgd
    from diloco.algorithm.schedule import Merge, Send, SyncSchedule
    from diloco.algorithm.value_schedule import ValueSchedule
    from diloco.errors import DiLoCoError
    from diloco.integrations.host import replica_share
    from diloco.outer.diloco import DiLoCo
    from diloco.transport.hivemind.library import connect_peer
    from diloco.transport.in_process import InProcessTransport
    from diloco.transport.links import Link, VirtualNetwork
    from diloco.transport.torch_distributed.library import connect_replica

__version__ = "0.5.0"

_HOMES = {
    "Adam": "diloco.algorithm.outer_optimizer",
    "AlphaMerge": "diloco.algorithm.merge",
    "Clipping": "diloco.algorithm.clipping",
    "Codec": "diloco.algorithm.codec",
    "DiLoCo": "diloco.outer.diloco",
    "DiLoCoError": "diloco.errors",
    "Fragment": "diloco.algorithm.fragments",
    "InProcessTransport": "diloco.transport.in_process",
    "Link": "diloco.transport.links",
    "Merge": "diloco.algorithm.schedule",
    "Muon": "diloco.algorithm.muon",
    "Nesterov": "diloco.algorithm.outer_optimizer",
    "RebaseMerge": "diloco.algorithm.merge",
    "Send": "diloco.algorithm.schedule",
    "Sgd": "diloco.algorithm.outer_optimizer",
    "SyncSchedule": "diloco.algorithm.schedule",
    "ValueSchedule": "diloco.algorithm.value_schedule",
    "VirtualNetwork": "diloco.transport.links",
    "connect_peer": "diloco.transport.hivemind.library",
    "connect_replica": "diloco.transport.torch_distributed.library",
    "make_codec": "diloco.algorithm.codec",
    "muon": "diloco.algorithm.muon",
    "partition": "diloco.algorithm.fragments",
    "replica_share": "diloco.integrations.host",
}

__all__ = [
    "Adam",
    "AlphaMerge",
    "Clipping",
    "Codec",
    "DiLoCo",
    "DiLoCoError",
    "Fragment",
    "InProcessTransport",
    "Link",
    "Merge",
    "Muon",
    "Nesterov",
    "RebaseMerge",
    "Send",
    "Sgd",
    "SyncSchedule",
    "ValueSchedule",
    "VirtualNetwork",
    "__version__",
    "connect_peer",
    "connect_replica",
    "make_codec",
    "muon",
    "partition",
    "replica_share",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'diloco' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
