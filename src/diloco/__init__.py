"""DiLoCo and Streaming DiLoCo in PyTorch: train one language model over slow, distant and unreliable links.

The public names are imported on first use, so that ``import diloco`` itself is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco.algorithm.average_rules import AverageRule, Rda, SendersMean
    from diloco.algorithm.averaging import RoundId
    from diloco.algorithm.clipping import Clipping
    from diloco.algorithm.codec import Codec, codec_names, make_codec, register
    from diloco.algorithm.fragments import Fragment, partition
    from diloco.algorithm.merge import AlphaMerge, MergeRule, RebaseMerge
    from diloco.algorithm.muon import Muon, muon
    from diloco.algorithm.numbers import ValueSchedule
    from diloco.algorithm.outer_optimizer import Adam, Nesterov, OuterOptimizer, OuterState, Sgd
    from diloco.algorithm.schedule import Merge, Send, SyncSchedule
    from diloco.errors import CodecError, ConfigurationError, ContractError, DiLoCoError
    from diloco.integrations.host import replica_share
    from diloco.outer.diloco import DiLoCo
    from diloco.transport.faults import Fault
    from diloco.transport.hivemind.library import connect_peer
    from diloco.transport.in_process import InProcessTransport
    from diloco.transport.links import Link, VirtualNetwork
    from diloco.transport.torch_distributed.library import connect_replica

__version__ = "0.5.0"

_NAMES = {
    "algorithm/average_rules": "AverageRule Rda SendersMean",
    "algorithm/averaging": "RoundId",
    "algorithm/clipping": "Clipping",
    "algorithm/codec": "Codec codec_names make_codec register",
    "algorithm/fragments": "Fragment partition",
    "algorithm/merge": "AlphaMerge MergeRule RebaseMerge",
    "algorithm/muon": "Muon muon",
    "algorithm/numbers": "ValueSchedule",
    "algorithm/outer_optimizer": "Adam Nesterov OuterOptimizer OuterState Sgd",
    "algorithm/schedule": "Merge Send SyncSchedule",
    "errors": "CodecError ConfigurationError ContractError DiLoCoError",
    "integrations/host": "replica_share",
    "outer/diloco": "DiLoCo",
    "transport/faults": "Fault",
    "transport/hivemind/library": "connect_peer",
    "transport/in_process": "InProcessTransport",
    "transport/links": "Link VirtualNetwork",
    "transport/torch_distributed/library": "connect_replica",
}
_HOMES = {name: f"diloco.{home.replace('/', '.')}" for home, names in _NAMES.items() for name in names.split()}

__all__ = [
    "Adam",
    "AlphaMerge",
    "AverageRule",
    "Clipping",
    "Codec",
    "CodecError",
    "ConfigurationError",
    "ContractError",
    "DiLoCo",
    "DiLoCoError",
    "Fault",
    "Fragment",
    "InProcessTransport",
    "Link",
    "Merge",
    "MergeRule",
    "Muon",
    "Nesterov",
    "OuterOptimizer",
    "OuterState",
    "Rda",
    "RebaseMerge",
    "RoundId",
    "Send",
    "SendersMean",
    "Sgd",
    "SyncSchedule",
    "ValueSchedule",
    "VirtualNetwork",
    "__version__",
    "codec_names",
    "connect_peer",
    "connect_replica",
    "make_codec",
    "muon",
    "partition",
    "register",
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
