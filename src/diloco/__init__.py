"""DiLoCo and Streaming DiLoCo in PyTorch: train one language model over slow, distant and unreliable links.

The public names of this package and of each package in it are listed in its ``__init__.pyi``, and are imported on first
use, so that ``import diloco`` itself is fast.
"""

import lazy_loader

__version__ = "0.6.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
