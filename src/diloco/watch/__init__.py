"""A read-only web page that shows runs and swarms live, from the files that they write and the status of peers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
