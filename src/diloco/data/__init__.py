"""Text sources, tokenizers, and deterministic, disjoint and resumable batches for each replica."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
