"""The training loop. In the order of a run: ``settings``, ``description`` (what the run is), ``processes``,
``connecting`` (of a ``fleet``), ``session`` (of ``replica``, ``inner`` and ``parallel``), ``joining``
(where it begins and goes on after a loss), ``run``, ``state`` (checkpoints).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
