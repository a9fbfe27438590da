"""`DiLoCo` for any training loop, the rounds of its fragments, and the recovery of state from other replicas."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
