"""The random generators of one replica, so that replicas take turns in one process without hearing each other's dice.

Dropout and whatever else a model draws uses generators that belong to the process: Python's ``random``, NumPy's global
``numpy.random``, torch's default CPU generator, and one per CUDA device. A `RandomState` holds one replica's own state
of all of them and installs it while that replica works, so a run gives the same bits whether its replicas share a
process or not.

It is used for every replica at every step, and NumPy takes long to read or set its 624 words one by one. So NumPy's bit
generators are swapped, and only its cached normal number is read. Not for threads: the generators are the process's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from diloco.errors import CheckpointError, ConfigurationError, DiLoCoError

__all__ = ["RandomState"]

_PYTHON_WORDS = 625  # 624 words of the Mersenne Twister and its position
_NUMPY_WORDS = 624


class MT19937(np.random.MT19937):
    """NumPy's Mersenne Twister, able to leave out its 624 words when only the cached normal number is asked for.

    The name is that of its parent on purpose: NumPy compares it when a state is set.
    """

    brief = False

    @property
    def state(self) -> Any:
        return {"bit_generator": "MT19937"} if self.brief else super().state

    @state.setter
    def state(self, value: Any) -> None:
        # a property of the parent is reached through the class: super() reads properties but does not set them
        np.random.MT19937.state.__set__(self, value)  # type: ignore[attr-defined]  # the stub hides the descriptor


@dataclass(frozen=True)
class _Generators:
    """The state of every global generator at one moment."""

    for_python: Any
    """What ``random.getstate`` gives."""
    for_numpy: np.random.BitGenerator
    numpy_normal: float | None
    """The second of two normal numbers that NumPy's legacy generator made at once and still holds."""
    for_torch: torch.Tensor
    """(5056,) uint8"""
    for_cuda: tuple[torch.Tensor, ...]
    """(16,) uint8 each, one per device; empty while CUDA has not been started."""

    @classmethod
    def capture(cls) -> _Generators:
        return cls(
            for_python=random.getstate(),
            for_numpy=np.random.mtrand.get_bit_generator(),
            numpy_normal=_numpy_normal(),
            for_torch=torch.default_generator.get_state(),
            for_cuda=tuple(generator.get_state() for generator in _cuda_generators()),
        )

    def install(self, cuda_seed: int = 0) -> None:
        """Make these the global generators; a CUDA device that has no state here begins from ``cuda_seed``."""
        random.setstate(self.for_python)
        np.random.mtrand.set_bit_generator(self.for_numpy)
        if self.numpy_normal is not None:  # swapping has dropped it
            np.random.set_state({**np.random.get_state(legacy=False), "has_gauss": 1, "gauss": self.numpy_normal})
        torch.default_generator.set_state(self.for_torch)
        for index, generator in enumerate(_cuda_generators()):
            if index < len(self.for_cuda):
                generator.set_state(self.for_cuda[index])
            else:
                generator.manual_seed(cuda_seed)


class RandomState:
    """All random generators of one replica: Python, NumPy's global one, torch CPU, and CUDA once it has been started.

    >>> first, second = RandomState.seeded(seed=0, replica=0), RandomState.seeded(seed=0, replica=1)
    >>> def roll():
    ...     return random.randrange(1000)
    >>> with first.active():
    ...     alone = [roll(), roll()]
    >>> again = RandomState.seeded(seed=0, replica=0)
    >>> with again.active():
    ...     in_turns = [roll()]
    >>> with second.active():
    ...     others = [roll()]
    >>> with again.active():
    ...     in_turns.append(roll())
    >>> in_turns == alone, others == alone[:1]
    (True, False)
    """

    def __init__(self, generators: _Generators, cuda_seed: int) -> None:
        self._generators = generators
        self._cuda_seed = cuda_seed
        self._in_use = False

    @classmethod
    def seeded(cls, seed: int, replica: int) -> RandomState:
        """Generators that depend on ``seed`` and ``replica`` and on nothing else; no two replicas' are alike.

        Raises:
            ConfigurationError: when one of them is negative.
        """
        if seed < 0 or replica < 0:
            raise ConfigurationError(
                f"seed={seed} and replica={replica} were given; whole numbers from 0 on would work. "
                "Nothing was started."
            )
        seeds = np.random.SeedSequence(seed, spawn_key=(replica,)).spawn(4)
        generators = _Generators(
            for_python=random.Random(_number(seeds[0])).getstate(),
            for_numpy=MT19937(seeds[1]),
            numpy_normal=None,
            for_torch=torch.Generator().manual_seed(_number(seeds[2])).get_state(),
            for_cuda=(),
        )
        return cls(generators, cuda_seed=_number(seeds[3]))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Install these generators for the length of a ``with`` block.

        Afterwards, also after an exception, this state has advanced by what the block drew and the process has the
        generators that it had before. Different states may be nested. About 0.1 ms each time, half of it when nested.

        Raises:
            DiLoCoError: when this state is active already.
            ConfigurationError: when the block was the first to start CUDA, whose numbers then came from no seed.
        """
        if self._in_use:
            raise DiLoCoError(
                "A RandomState was activated while it was active; one `with state.active():` around the whole block "
                "would work. Its generators are as they were."
            )
        outer = _Generators.capture()
        self._in_use = True
        try:
            self._generators.install(self._cuda_seed)
            yield
        finally:
            self._generators = _Generators.capture()
            outer.install()
            self._in_use = False
        if len(self._generators.for_cuda) > len(outer.for_cuda):
            raise ConfigurationError(
                "CUDA was started while a replica's generators were installed, so what it drew came from no seed; "
                "moving the model to its device, or torch.cuda.init(), before the first step would work. "
                "The step cannot be repeated and the run should begin again."
            )

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on, as plain values and tensors (a copy)."""
        if self._in_use:
            raise DiLoCoError(
                "The state of a RandomState was asked for while it was active and its numbers still being drawn; "
                "asking after the `with` block would work. Nothing was saved."
            )
        generators = self._generators
        _, words, normal = generators.for_python
        numpy_state = generators.for_numpy.state["state"]
        return {
            "python": {"words": torch.tensor(words, dtype=torch.int64), "normal": normal},
            "numpy": {
                "words": torch.tensor(numpy_state["key"].astype(np.int64)),
                "position": int(numpy_state["pos"]),
                "normal": generators.numpy_normal,
            },
            "torch": generators.for_torch.clone(),
            "cuda": [state.clone() for state in generators.for_cuda],
            "cuda_seed": self._cuda_seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            CheckpointError: when ``state`` is not what `state_dict` gives; this state is then as it was.
            DiLoCoError: when this state is active.
        """
        if self._in_use:
            raise DiLoCoError(
                "A RandomState was loaded while it was active; loading outside of its `with` block would work. "
                "Nothing was loaded."
            )
        _check_keys("", state, {"python", "numpy", "torch", "cuda", "cuda_seed"})
        _check_keys("python.", state["python"], {"words", "normal"})
        _check_keys("numpy.", state["numpy"], {"words", "position", "normal"})
        cuda, cuda_seed, position = state["cuda"], state["cuda_seed"], state["numpy"]["position"]
        if type(cuda) is not list:
            raise _refused("cuda", cuda, "a list of uint8 tensors")
        if type(cuda_seed) is not int or not 0 <= cuda_seed < 2**64:
            raise _refused("cuda_seed", cuda_seed, "a whole number of 64 bits")
        if type(position) is not int or not 0 <= position <= _NUMPY_WORDS:
            raise _refused("numpy.position", position, f"a whole number from 0 to {_NUMPY_WORDS}")
        bits = MT19937(0)
        words = np.array(_words("numpy.words", state["numpy"]["words"], _NUMPY_WORDS), dtype=np.uint32)
        bits.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": position}}
        python_words = _words("python.words", state["python"]["words"], _PYTHON_WORDS)
        python = (3, tuple(python_words), _normal("python.normal", state["python"]["normal"]))
        try:
            random.Random().setstate(python)
        except ValueError as error:  # the position, which is the last word, lies beyond the others
            raise _refused("python.words", python_words[-1], "a position from 0 to 624 as its last word") from error
        self._generators = _Generators(
            for_python=python,
            for_numpy=bits,
            numpy_normal=_normal("numpy.normal", state["numpy"]["normal"]),
            for_torch=_torch_state(state["torch"]),
            for_cuda=tuple(_bytes_tensor(f"cuda.{index}", saved) for index, saved in enumerate(cuda)),
        )
        self._cuda_seed = cuda_seed


def _cuda_generators() -> Sequence[torch.Generator]:
    return torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]  # torch's own


def _numpy_normal() -> float | None:
    bits = np.random.mtrand.get_bit_generator()
    if isinstance(bits, MT19937):
        bits.brief = True
    try:
        state = np.random.get_state(legacy=False)
    finally:
        if isinstance(bits, MT19937):
            bits.brief = False
    return float(state["gauss"]) if state["has_gauss"] else None


def _number(sequence: np.random.SeedSequence) -> int:
    return int(sequence.generate_state(1, np.uint64)[0])


def _refused(name: str, given: object, wanted: str) -> CheckpointError:
    return CheckpointError(
        f"The saved random state has {given!r:.200} as {name!r}; {wanted} would work. No generator was changed."
    )


def _check_keys(prefix: str, state: object, wanted: set[str]) -> None:
    if not isinstance(state, Mapping) or set(state) != wanted:
        held = sorted(map(str, state)) if isinstance(state, Mapping) else state
        raise _refused(prefix.rstrip(".") or "state", held, f"a dictionary with {', '.join(sorted(wanted))}")


def _words(name: str, value: object, count: int) -> list[int]:
    if isinstance(value, torch.Tensor) and value.dtype == torch.int64 and value.shape == (count,):
        words: list[int] = value.tolist()
        if all(0 <= word < 2**32 for word in words):
            return words
    raise _refused(name, value, f"an int64 tensor of {count} words of 32 bits")


def _normal(name: str, value: object) -> float | None:
    if value is None or type(value) is float:
        return value
    raise _refused(name, value, "a float or None")


def _bytes_tensor(name: str, value: object) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.dim() == 1:
        return value.detach().cpu().clone()
    raise _refused(name, value, "a uint8 tensor with one dimension")


def _torch_state(value: object) -> torch.Tensor:
    state = _bytes_tensor("torch", value)
    try:
        torch.Generator().set_state(state)
    except RuntimeError as error:
        raise _refused("torch", value, "the state of a CPU generator of this torch") from error
    return state
