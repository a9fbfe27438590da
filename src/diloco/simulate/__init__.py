"""What a link will cost, before anything is rented: the compute-utilisation simulator and the planner."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
