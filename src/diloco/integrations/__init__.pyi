from .host import StepWatch as StepWatch
from .host import bare_model as bare_model
from .host import bare_optimizer as bare_optimizer
from .host import check_ranks as check_ranks
from .host import replica_share as replica_share
from .hosted_replica import HostedReplica as HostedReplica
from .hosted_replica import load_state as load_state
from .hosted_replica import save_state as save_state
