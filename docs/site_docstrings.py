"""How docstrings become Markdown: doctests as blocks of code, and `names` as they are."""

from __future__ import annotations

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^>>> .*(?:\n(?!\n)(?!>>> ).*|\n>>> .*)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Fences the doctests of every docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None and obj.is_attribute:
            obj.docstring.value = obj.docstring.value.replace("][", "]\\[")  # text, no cross-reference
        elif obj.docstring is not None:
            obj.docstring.value = _DOCTEST.sub(lambda found: f"```python\n{found[0]}\n```", obj.docstring.value)
