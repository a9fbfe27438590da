"""The state machine of one rank: events and a time go in, effects come out. It does no I/O and owns no clock."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
