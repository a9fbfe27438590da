"""Text from tokens that come one by one."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from diloco.data.tokenizer import Tokenizer
from diloco.errors import ConfigurationError

__all__ = ["TextStream"]


class TextStream:
    """Whole characters as soon as they are certain; all that was given is in the end what `Tokenizer.decode` gives.

    Args:
        tokenizer: of the tokens.
        stops: texts that end it, and are left out with all that follows: of several, the one that is complete first.

    Attributes:
        stopped: whether one of ``stops`` has come; what is fed afterwards is not looked at.

    >>> from diloco.data.tokenizer import ByteTokenizer
    >>> text = TextStream(ByteTokenizer(), stops=["END"])
    >>> [text.feed(byte) for byte in "né Er END.".encode()], text.stopped
    (['n', '', 'é', ' ', '', 'Er', ' ', '', '', '', ''], True)
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        if "" in stops:
            raise ConfigurationError("an empty text to stop at was given; some text would work. Nothing was generated.")
        self.stopped = False
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def feed(self, token: int) -> str:
        """The text that is certain now, beyond what was given before."""
        return "" if self.stopped else self._take(self._decoder.decode(self._tokenizer.as_bytes(token)))

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        if self.stopped:
            return ""
        given = self._take(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return given + ("" if self.stopped else rest)

    def _take(self, text: str) -> str:
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._held[: min(found)[1]]
        keep = max((self._begun(stop) for stop in self._stops), default=0)
        certain = len(self._held) - keep
        given, self._held = self._held[:certain], self._held[certain:]
        return given

    def _begun(self, stop: str) -> int:
        """How many characters at the end of what is held may be the beginning of ``stop``."""
        return next((n for n in range(min(len(stop) - 1, len(self._held)), 0, -1) if self._held.endswith(stop[:n])), 0)
