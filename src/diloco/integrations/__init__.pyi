from .host import HostedReplica as HostedReplica
from .host import StepWatch as StepWatch
from .host import load_state as load_state
from .host import replica_share as replica_share
from .host import save_state as save_state
from .host import unwrapped as unwrapped
