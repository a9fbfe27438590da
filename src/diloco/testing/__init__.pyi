from .contracts import check_average_rule as check_average_rule
from .contracts import check_codec as check_codec
from .contracts import check_inner_optimizer as check_inner_optimizer
from .contracts import check_merge_rule as check_merge_rule
from .contracts import check_outer_optimizer as check_outer_optimizer
from .contracts import same_bits as same_bits
from .contracts import spread_values as spread_values
