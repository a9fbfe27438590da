from .checks import argument_facts as argument_facts
from .checks import check_kinds as check_kinds
from .checks import check_own_code as check_own_code
from .checks import frozen_digests as frozen_digests
from .diloco import DiLoCo as DiLoCo
from .fragment import Fragment as Fragment
from .recovery import StateRecovery as StateRecovery
