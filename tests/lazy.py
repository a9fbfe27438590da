"""Lazy imports of slow libraries, so that a test process does not import them for files that another one runs."""

import importlib
from typing import Any


class Lazy:
    """A module that is imported on first access to an attribute.

    >>> Lazy("math").floor(2.5)
    2
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks up some of these on every object in a file
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
