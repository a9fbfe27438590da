"""The DiLoCo algorithm as pure functions of tensors, without process groups, clocks, threads, files or loggers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
