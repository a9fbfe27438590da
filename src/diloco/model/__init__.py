"""Language models: the native decoder and its presets, models of ``transformers``, and user-defined modules."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
