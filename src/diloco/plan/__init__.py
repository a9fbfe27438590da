"""What a link will cost, before anything is rented: a simulator of compute utilisation, and predictions for a run."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
