"""The membership of a run: views, votes and view changes, as pure values and functions. Times are arguments."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
