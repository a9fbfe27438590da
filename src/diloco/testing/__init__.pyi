from .codecs import check_codec as check_codec
from .codecs import same_bits as same_bits
from .codecs import spread_values as spread_values
from .optimizers import check_average_rule as check_average_rule
from .optimizers import check_inner_optimizer as check_inner_optimizer
from .optimizers import check_merge_rule as check_merge_rule
from .optimizers import check_outer_optimizer as check_outer_optimizer
