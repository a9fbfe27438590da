"""Where a model comes from, as one word on the command line. No torch here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from diloco.errors import ConfigurationError

__all__ = ["Source", "parse_source"]

_FUNCTION = re.compile(r"(?P<place>.+\.py|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<function>[A-Za-z_]\w*)")


@dataclass(frozen=True)
class Source:
    """Where a model comes from.

    Attributes:
        kind: ``hf``: a causal language model of ``transformers``; ``module``: somebody's own function.
        place: folder or name on the hub; module, or path of a ``.py`` file.
        function: of the module; empty for ``hf``.
    """

    kind: Literal["hf", "module"]
    place: str
    function: str = ""

    @property
    def label(self) -> str:
        """A word for folders.

        >>> parse_source("hf:meta-llama/Llama-3.2-1B").label, parse_source("my.models:small").label
        ('Llama-3.2-1B', 'small')
        """
        word = self.function or self.place.rstrip("/").rpartition("/")[2]
        return re.sub(r"[^\w.-]+", "-", word).strip(".-") or "model"

    def __str__(self) -> str:
        return f"{self.place}:{self.function}" if self.function else f"hf:{self.place}"


def parse_source(text: str) -> Source:
    """What ``model.source`` says.

    >>> parse_source("hf:models/llama"), parse_source("nets.py:build")
    (Source(kind='hf', place='models/llama', function=''), Source(kind='module', place='nets.py', function='build'))

    Raises:
        ConfigurationError: if it is neither ``hf:PATH_OR_NAME`` nor ``module:function``.
    """
    kind, _, place = text.partition(":")
    if kind == "hf" and place.strip():
        return Source("hf", place.strip())
    if kind != "hf" and (found := _FUNCTION.fullmatch(text)):
        return Source("module", found["place"], found["function"])
    raise ConfigurationError(
        f"model.source={text!r} was given; hf:PATH_OR_NAME (a causal language model of transformers) or "
        "module:function (your own) would work, and --preset NAME for a native model. Nothing was started."
    )
