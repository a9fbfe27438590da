"""The one writer through which a command prints: it shows control characters instead of obeying them.

Whoever wrote a file, a message or an answer may have put escape sequences into it, which clear the screen, fake lines
or set the title of the window. A display that draws with such sequences itself writes to the `plain` stream, and must
show control characters in what it draws.
"""

import io
import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TextIO

from diloco.errors import ConfigurationError
from diloco.units import visible_lines

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


def as_typed(text: str) -> str:
    """Return a text of the command line, whose bytes Python can't decode in an ASCII locale.

    Raises:
        ConfigurationError: it is not UTF-8.

    >>> as_typed("caf\\udcc3\\udca9")
    'café'
    """
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError as error:
        shown = text.encode("utf-8", "backslashreplace").decode()
        raise ConfigurationError(f"'{shown}' is not text in UTF-8, which it must be.") from error


class StandardOutput(io.FileIO):
    """The file of standard output, whose first error is raised and noted, or of standard error, which never raises.

    Later output is dropped, so that nothing fails again when the interpreter exits.
    """

    failure: OSError | None = None  # of standard output
    _ended = False

    def write(self, data: Any) -> int:
        if self._ended:
            return len(data)
        try:
            return super().write(data)
        except OSError as error:
            self._ended = True
            if self.fileno() == 2:
                return len(data)
            StandardOutput.failure = error
            raise


def make_streams_safe() -> None:
    """Prepare the standard streams of this process, so that printing can't end in a traceback.

    Characters that a stream can't encode become escapes, a closed stream is replaced by the null device, and
    `StandardOutput` takes care of what can't be written.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            # The number is taken as well: otherwise the next file opened would get it, and what libraries print.
            with suppress(OSError):
                if os.open(os.devnull, os.O_RDWR) == number:
                    os.set_inheritable(number, True)
            stream = open(os.devnull, "w" if number else "r", encoding="utf-8")  # noqa: SIM115 - stays open
        elif number and type(raw := getattr(stream.buffer, "raw", stream.buffer)) is io.FileIO:
            stream = io.TextIOWrapper(
                io.BufferedWriter(StandardOutput(raw.fileno(), "w", closefd=False)),
                encoding=stream.encoding,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
        if number == 0 and stream.encoding.lower() in ("ascii", "us-ascii", "ansi_x3.4-1968"):
            stream.reconfigure(encoding="utf-8")
        stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, stream)
