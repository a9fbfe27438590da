"""The errors that this package raises on purpose.

An error message says what was given, what would work and, if that is not obvious, what happens now.
"""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

DEBUG = ContextVar("DEBUG", default=False)
"""Whether the command was called with --debug, so that it shows a traceback with every error."""


class DiLoCoError(Exception):
    """The base class of every error that this package raises on purpose."""


class ConfigurationError(DiLoCoError, ValueError):
    """A setting or an argument that cannot work. Raised before any work starts."""


class FragmentError(ConfigurationError):
    """The fragments do not cover every trainable parameter exactly once. The message names the parameters."""


class ContractError(ConfigurationError):
    """A codec, optimizer, merge rule or plugin, built in or supplied by the user, violates its contract."""


class CodecError(DiLoCoError, ValueError):
    """A payload of the wrong length, type or content, or values that a codec cannot encode.

    Attributes:
        replica: the replica that the payload or values came from, or None if it is unknown.
    """

    def __init__(self, message: str, *, replica: int | None = None) -> None:
        super().__init__(message)
        self.replica = replica


class NonFiniteError(DiLoCoError, ArithmeticError):
    """A pseudo-gradient, a gradient or a loss contains NaN or infinity. Nothing was sent or applied."""


class TransportError(DiLoCoError):
    """A failure in the communication between replicas.

    Attributes:
        round: the round concerned, as text (``"fragment 2, outer step 7"``), or None.
        replicas: the replicas concerned; empty if they are unknown.
    """

    def __init__(self, message: str, *, round: str | None = None, replicas: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.round = round
        self.replicas = tuple(replicas)


class RoundVoidError(TransportError):
    """The round is void for every replica of its view: no replica moved its global parameters.

    Attributes:
        reason: why, without the name of the round, which the message has as well.
    """

    def __init__(self, reason: str, *, round: str | None = None, replicas: Iterable[int] = ()) -> None:
        self.reason = reason.rstrip(".")
        super().__init__(f"{round} is void: {self.reason}." if round else reason, round=round, replicas=replicas)


class ViewChangedError(RoundVoidError):
    """The view changed before the round was decided. Gradients may be submitted again in the next view."""


class RoundTimeoutError(TransportError):
    """An average did not arrive within the time allowed."""


class DivergedError(TransportError):
    """This replica's global parameters or outer state differ from the majority's for this fragment.

    Attributes:
        donor: a replica that holds the majority's state.
        digest: the digest of the majority's state.
    """

    def __init__(
        self, message: str, *, donor: int, digest: str, round: str | None = None, replicas: Iterable[int] = ()
    ) -> None:
        super().__init__(message, round=round, replicas=replicas)
        self.donor = donor
        self.digest = digest


class RendezvousError(TransportError):
    """The replicas did not find each other, or refused each other. Raised before the first step."""


class RunFinishedError(RendezvousError):
    """The other replicas have finished the run, so there is no replica left to join."""


class EjectedError(RendezvousError):
    """The founder of the swarm has ejected this peer, which can't take part any more."""


class ReplicaLostError(TransportError):
    """A replica is lost, and this one can't or may not continue without it. Survivors committed the same rounds."""


class DataError(DiLoCoError, ValueError):
    """Text, tokens or shards cannot be read or are too few."""


class NoDataError(ConfigurationError, DataError):
    """The named data does not exist or is empty."""


class CheckpointError(DiLoCoError):
    """A checkpoint is missing, incomplete, damaged, or of another kind than the one asked for."""


class NoCheckpointError(ConfigurationError, CheckpointError):
    """The named checkpoint or run folder does not exist."""


def nearest(given: str, known: Iterable[str]) -> str:
    """Return a hint, to follow a semicolon: the known name closest to ``given``, or all known names if none is close.

    >>> nearest("int9", ["int8", "fp4"])
    "did you mean 'int8'?"
    >>> nearest("zip", ["int8", "fp4"])
    'use one of: fp4, int8.'
    """
    choices = sorted(known)
    close = difflib.get_close_matches(given, choices, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"use one of: {', '.join(choices)}."


@contextmanager
def from_extra(extra: str, needs: str) -> Iterator[None]:
    """Guard an import of an optional dependency, which the extra ``extra`` of this package installs.

    Raises:
        ConfigurationError: if the import fails; it begins with ``needs``, and says how to install the extra.

    >>> with from_extra("hf", "this needs no_such_package"):
    ...     import no_such_package
    Traceback (most recent call last):
    diloco.errors.ConfigurationError: this needs no_such_package, which can't be imported (No module ...
    """
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(
            f"{needs}, which can't be imported ({error}). Install it with: pip install 'diloco[{extra}]'."
        ) from error
