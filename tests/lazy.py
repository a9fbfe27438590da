"""Libraries that take seconds to import, which every tester would do for files that another one runs."""

from __future__ import annotations

import importlib
from typing import Any


class Lazy:
    """A module that is imported when something of it is asked for.

    >>> Lazy("math").floor(2.5)
    2
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest asks whatever stands in a file for some of these
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
