"""The settings of a run, in layers: preset, TOML file, command line. This package works without torch.

What a user gives and can't work raises `ConfigurationError`, which names the key, the flag or the file.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
