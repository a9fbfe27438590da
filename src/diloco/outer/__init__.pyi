from .arguments import argument_facts as argument_facts
from .arguments import check_kinds as check_kinds
from .arguments import check_own_code as check_own_code
from .diloco import DiLoCo as DiLoCo
from .fragment import Fragment as Fragment
from .model_watch import frozen_digests as frozen_digests
from .recovery import StateRecovery as StateRecovery
