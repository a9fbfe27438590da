from .arguments import Arguments as Arguments
from .arguments import check_kinds as check_kinds
from .diloco import DiLoCo as DiLoCo
from .model_watch import frozen_digests as frozen_digests
from .recovery import SharedState as SharedState
from .recovery import StateRecovery as StateRecovery
from .reports import Warnings as Warnings
