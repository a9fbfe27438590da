"""DiLoCo in existing training scripts: the Hugging Face `Trainer`, Accelerate, Lightning, and their shared code."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
