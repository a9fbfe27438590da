"""Where control messages leave short values for other threads."""

from __future__ import annotations

import threading

from diloco.errors import TransportError

__all__ = ["Mailbox"]

_MOST_VALUES = 1 << 16
_MOST_BYTES = 1 << 16


class Mailbox:
    """Short values by key, put there by control messages and waited for in other threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._closed = ""

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            if len(self._values) >= _MOST_VALUES or len(key) + len(value) > _MOST_BYTES:
                raise ValueError(f"a mailbox takes {_MOST_VALUES} values of {_MOST_BYTES} bytes")
            self._values[key] = value
            self._changed.notify_all()

    def take(self, key: str, timeout_s: float) -> bytes:
        """The value of ``key``, waiting for it; it stays.

        Raises:
            TransportError: if it does not come in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: key in self._values or self._closed, timeout_s)
            if key not in self._values:
                raise TransportError(f"{key} did not come within {timeout_s:g} s. {self._closed}")
            return self._values[key]

    def forget(self, prefix: str) -> None:
        """Drop what begins with ``prefix``."""
        with self._changed:
            self._values = {key: value for key, value in self._values.items() if not key.startswith(prefix)}

    def close(self, reason: str) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._closed = reason
            self._changed.notify_all()
