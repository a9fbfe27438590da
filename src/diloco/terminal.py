"""The one writer through which a command prints: it shows control characters instead of obeying them.

Whoever wrote a file, a message or an answer may have put escape sequences into it, which clear the screen, fake lines
or set the title of the window. A display that draws with such sequences itself writes to the `plain` stream, and must
show control characters in what it draws.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from diloco.units import visible_lines

__all__ = ["VisibleStream", "plain", "show_visibly"]

_BAR = re.compile(r"(?:\x1b\[A)*\r?")  # how a progress bar of a library (tqdm) begins what it writes


class VisibleStream:
    """A text stream that writes control characters, except line ends and tabs, as escape codes.

    Args:
        stream: where to write.
        bars: whether progress bars may return to the beginning of a line, and go up, before their text.

    >>> VisibleStream(sys.stdout).write("a\\x1b[2J\\rb\\n")
    a\\x1b[2J\\rb
    8
    """

    def __init__(self, stream: TextIO, *, bars: bool = False) -> None:
        self.plain, self._bars = stream, bars

    def write(self, text: str) -> int:
        begin = _BAR.match(text) if self._bars else None
        end = begin.end() if begin else 0
        self.plain.write(text[:end] + visible_lines(text[end:]))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


def plain(stream: TextIO) -> TextIO:
    """Return the stream below a `VisibleStream`, or any other stream as it is."""
    return stream.plain if isinstance(stream, VisibleStream) else stream


def show_visibly() -> None:
    """Let everything that this process prints from now on show control characters."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, VisibleStream):
            setattr(sys, name, VisibleStream(stream, bars=name == "stderr"))
