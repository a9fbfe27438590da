"""Functions that test the contracts of plugins. The package's own codecs, optimizers and rules pass the same tests.

>>> import diloco.testing
>>> from diloco import Nesterov, make_codec
>>> diloco.testing.check_codec(lambda: make_codec("fp4", block_size=64))
>>> diloco.testing.check_outer_optimizer(Nesterov(learning_rate=0.4))
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
