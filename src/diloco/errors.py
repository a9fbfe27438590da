"""Every error this package raises on purpose.

::

    DiLoCoError
    ├── ConfigurationError            a setting or an argument that cannot work; nothing was started (exit code 2)
    │   ├── FragmentError             the fragments do not cover the trainable parameters exactly once
    │   └── ContractError             a plugin does not keep the contract of what it stands for
    ├── CodecError                    a payload that cannot be decoded, or values a codec cannot take
    ├── NonFiniteError                NaN or infinity where numbers were due; nothing was sent
    ├── TransportError                carries the round, and the replicas concerned where known
    │   ├── RoundVoidError            the round is void for every replica of its view; nobody applied it
    │   │   └── ViewChangedError      because the view changed before it was decided
    │   ├── RoundTimeoutError         an average did not arrive in the time allowed
    │   ├── DivergedError             this replica's global parameters differ from the majority's
    │   ├── RendezvousError           the replicas did not find each other; nothing was started
    │   └── ReplicaLostError          a replica is gone or can't be reached, and this one can't or may not go on
    ├── DataError                     text, tokens or shards that cannot be read or do not suffice
    │   └── NoDataError               what was named is not there or is empty; a ConfigurationError, too
    └── CheckpointError               a checkpoint that is missing, incomplete, damaged or of another kind

A message says what was given, what would work, and, where it is not plain, what happens now.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

__all__ = [
    "CheckpointError",
    "CodecError",
    "ConfigurationError",
    "ContractError",
    "DataError",
    "DiLoCoError",
    "DivergedError",
    "FragmentError",
    "NoDataError",
    "NonFiniteError",
    "RendezvousError",
    "ReplicaLostError",
    "RoundTimeoutError",
    "RoundVoidError",
    "RunOverError",
    "TransportError",
    "ViewChangedError",
    "from_extra",
    "nearest",
]


class DiLoCoError(Exception):
    """The root: ``except DiLoCoError`` catches everything this package raises on purpose."""


class ConfigurationError(DiLoCoError, ValueError):
    """A setting or an argument that cannot work. Raised before any work is done."""


class FragmentError(ConfigurationError):
    """The fragments do not hold every trainable parameter exactly once; the message names the parameters."""


class ContractError(ConfigurationError):
    """A codec, optimizer or merge rule, from outside or our own, does not keep the contract of its kind."""


class CodecError(DiLoCoError, ValueError):
    """A payload of the wrong length, type or content, or values that a codec cannot take.

    Attributes:
        replica: whose payload or values they are, where that is known; else None.
    """

    def __init__(self, message: str, *, replica: int | None = None) -> None:
        super().__init__(message)
        self.replica = replica


class NonFiniteError(DiLoCoError, ArithmeticError):
    """NaN or infinity in a pseudo-gradient, a gradient or a loss. Nothing was sent or applied."""


class TransportError(DiLoCoError):
    """Something went wrong between replicas.

    Attributes:
        round: the round concerned, as text (``"fragment 2, outer step 7"``), or None.
        replicas: the replicas concerned, where known.
    """

    def __init__(self, message: str, *, round: str | None = None, replicas: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.round = round
        self.replicas = tuple(replicas)


class RoundVoidError(TransportError):
    """The round is void for every replica of its view: global parameters did not move anywhere."""


class ViewChangedError(RoundVoidError):
    """The round is void because the view changed before it was decided.

    The gradients of a data-parallel step may be handed in again, to the next view.
    """


class RoundTimeoutError(TransportError):
    """An average did not arrive within the time allowed."""


class DivergedError(TransportError):
    """This replica's global parameters or outer state differ from the majority's for this fragment.

    Attributes:
        donor: a replica that holds what the majority holds.
        digest: of what the majority holds.
    """

    def __init__(
        self, message: str, *, donor: int, digest: str, round: str | None = None, replicas: Iterable[int] = ()
    ) -> None:
        super().__init__(message, round=round, replicas=replicas)
        self.donor = donor
        self.digest = digest


class RendezvousError(TransportError):
    """The replicas did not find each other, or refused each other. Raised before the first step."""


class RunOverError(RendezvousError):
    """The others have finished the run; nobody is left to join."""


class ReplicaLostError(TransportError):
    """A replica is gone or can't be reached, and this one can't or may not go on without it.

    What was committed is committed on every survivor, and what was not is void on all of them.
    """


class DataError(DiLoCoError, ValueError):
    """Text, tokens or shards that cannot be read or do not suffice."""


class NoDataError(ConfigurationError, DataError):
    """What was named as data is not there, or holds none."""


class CheckpointError(DiLoCoError):
    """A checkpoint that is missing, incomplete, damaged, or of another kind than asked for."""


def nearest(given: str, known: Iterable[str]) -> str:
    """A sentence naming the known word nearest to ``given``, or all of them when none is near.

    >>> nearest("int9", ["int8", "fp4"])
    "did you mean 'int8'?"
    >>> nearest("zip", ["int8", "fp4"])
    'known are: fp4, int8.'
    """
    choices = sorted(known)
    close = difflib.get_close_matches(given, choices, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known are: {', '.join(choices)}."


@contextmanager
def from_extra(extra: str, needs: str) -> Iterator[None]:
    """Around an import of what comes with an extra of this package; ``needs`` says what needs which other package.

    Raises:
        ConfigurationError: if it can't be imported; it says how to install it.

    >>> with from_extra("hf", "this needs no_such_package"):
    ...     import no_such_package
    Traceback (most recent call last):
    diloco.errors.ConfigurationError: this needs no_such_package, which can't be imported (No module ...
    """
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(
            f"{needs}, which can't be imported ({error}): pip install 'diloco[{extra}]'."
        ) from error
