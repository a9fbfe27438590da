from .arguments import argument_facts as argument_facts
from .arguments import check_arguments as check_arguments
from .arguments import check_kinds as check_kinds
from .arguments import complete as complete
from .arguments import frozen_digests as frozen_digests
from .diloco import DiLoCo as DiLoCo
from .fragment import Fragment as Fragment
from .recovery import StateRecovery as StateRecovery
