"""Functions that test the contracts of plugins. The package's own codecs, optimizers and rules pass the same tests.

>>> import diloco.testing
>>> from diloco import Nesterov, make_codec
>>> diloco.testing.check_codec(lambda: make_codec("fp4", block_size=64))
>>> diloco.testing.check_outer_optimizer(Nesterov(learning_rate=0.4))
"""

from diloco.testing.codecs import check_bytes, check_codec, check_payload
from diloco.testing.optimizers import check_average_rule, check_inner_optimizer, check_merge_rule, check_outer_optimizer

__all__ = [
    "check_average_rule",
    "check_bytes",
    "check_codec",
    "check_inner_optimizer",
    "check_merge_rule",
    "check_outer_optimizer",
    "check_payload",
]
