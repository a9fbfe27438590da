"""The random generators of one replica, so that replicas take turns in one process without sharing random numbers.

Dropout and whatever else a model draws uses generators that belong to the process: Python's ``random``, NumPy's global
``numpy.random``, torch's default CPU generator, and one per CUDA device. A `RandomState` holds one replica's own state
of all of them and installs it while that replica works, so a run gives the same bits whether its replicas share a
process or not. Not for threads: the generators are the process's.
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


@dataclass(frozen=True)
class _Generators:
    """The state of every global generator at one moment."""

    python: Any  # of random.getstate
    numpy: np.random.BitGenerator
    normal: float | None  # the second of two normal numbers that NumPy made at once and still holds
    cpu: torch.Tensor  # (5056,) uint8
    cuda: tuple[torch.Tensor, ...]  # (16,) uint8 each, one per device; empty while CUDA has not been started

    @classmethod
    def capture(cls) -> _Generators:
        numpy_state = np.random.get_state(legacy=False)
        return cls(
            python=random.getstate(),
            numpy=np.random.mtrand.get_bit_generator(),
            normal=float(numpy_state["gauss"]) if numpy_state["has_gauss"] else None,
            cpu=torch.default_generator.get_state(),
            cuda=tuple(generator.get_state() for generator in _cuda_generators()),
        )

    def install(self, cuda_seed: int = 0) -> None:
        """Make these the global generators; a CUDA device that has no state here begins from ``cuda_seed``."""
        random.setstate(self.python)
        np.random.mtrand.set_bit_generator(self.numpy)
        if self.normal is not None:  # swapping has dropped it
            np.random.set_state({**np.random.get_state(legacy=False), "has_gauss": 1, "gauss": self.normal})
        torch.default_generator.set_state(self.cpu)
        for index, generator in enumerate(_cuda_generators()):
            if index < len(self.cuda):
                generator.set_state(self.cuda[index])
            else:
                generator.manual_seed(cuda_seed)


class RandomState:
    """All random generators of one replica: Python, NumPy's global one, torch CPU, and CUDA once it has been started.

    They depend on ``seed`` and ``replica`` and on nothing else; no two replicas' are alike.

    >>> def roll():
    ...     return random.randrange(1000)
    >>> first, again, second = RandomState(seed=0, replica=0), RandomState(seed=0, replica=0), RandomState(0, 1)
    >>> with first.active():
    ...     alone = [roll(), roll()]
    >>> with again.active():
    ...     in_turns = [roll()]
    >>> with second.active():
    ...     others = [roll()]
    >>> with again.active():
    ...     in_turns.append(roll())
    >>> in_turns == alone, others == alone[:1]
    (True, False)

    Raises:
        ConfigurationError: when ``seed`` or ``replica`` is negative.
    """

    def __init__(self, seed: int, replica: int) -> None:
        if seed < 0 or replica < 0:
            raise ConfigurationError(
                f"seed={seed} and replica={replica} were given; both must be whole numbers from 0 on."
            )
        python, numpy_, torch_, cuda = np.random.SeedSequence(seed, spawn_key=(replica,)).spawn(4)
        self._generators = _Generators(
            python=random.Random(_number(python)).getstate(),
            numpy=np.random.MT19937(numpy_),
            normal=None,
            cpu=torch.Generator().manual_seed(_number(torch_)).get_state(),
            cuda=(),
        )
        self._cuda_seed = _number(cuda)
        self._in_use = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Install these generators for the length of a ``with`` block.

        Afterwards, also after an exception, this state has advanced by what the block drew and the process has the
        generators that it had before. Different states may be nested. About 0.1 ms each time.

        Raises:
            DiLoCoError: when this state is active already.
            ConfigurationError: when the block was the first to start CUDA, whose numbers then came from no seed.
        """
        self._refuse_in_use("activated")
        outer = _Generators.capture()
        self._in_use = True
        try:
            self._generators.install(self._cuda_seed)
            yield
        finally:
            self._generators = _Generators.capture()
            outer.install()
            self._in_use = False
        if len(self._generators.cuda) > len(outer.cuda):
            raise ConfigurationError(
                "CUDA was started while a replica's generators were installed, so what it drew came from no seed. "
                "Move the model to its device, or call torch.cuda.init(), before the first step. The step can't be "
                "repeated, and the run should begin again."
            )

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on, as plain values and tensors (a copy).

        Raises:
            DiLoCoError: when this state is active.
        """
        self._refuse_in_use("saved")
        generators = self._generators
        _, words, normal = generators.python
        numpy_state = generators.numpy.state["state"]
        return {
            "python": {"words": torch.tensor(words, dtype=torch.int64), "normal": normal},
            "numpy": {
                "words": torch.tensor(numpy_state["key"].astype(np.int64)),
                "position": int(numpy_state["pos"]),
                "normal": generators.normal,
            },
            "torch": generators.cpu.clone(),
            "cuda": [state.clone() for state in generators.cuda],
            "cuda_seed": self._cuda_seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            CheckpointError: when ``state`` is not what `state_dict` gives; this state is then as it was.
            DiLoCoError: when this state is active.
        """
        self._refuse_in_use("loaded")
        try:
            python, numpy_, cuda_seed = state["python"], state["numpy"], int(state["cuda_seed"])
            words = np.array(numpy_["words"].tolist(), dtype=np.uint32)
            bits, position = np.random.MT19937(0), int(numpy_["position"])
            if words.shape != (624,) or not 0 <= position <= 624 or not 0 <= cuda_seed < 2**64:
                raise ValueError(f"{words.size} words, position {position} and CUDA seed {cuda_seed}")
            bits.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": position}}
            loaded = _Generators(
                python=(3, tuple(python["words"].tolist()), _optional_float(python["normal"])),
                numpy=bits,
                normal=_optional_float(numpy_["normal"]),
                cpu=state["torch"].cpu().clone(),
                cuda=tuple(saved.cpu().clone() for saved in state["cuda"]),
            )
            random.Random().setstate(loaded.python)
            torch.Generator().set_state(loaded.cpu)
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RuntimeError) as error:
            raise CheckpointError(f"The saved random state is malformed: {error!r}. Nothing was loaded.") from error
        self._generators, self._cuda_seed = loaded, cuda_seed

    def _refuse_in_use(self, what: str) -> None:
        if self._in_use:
            raise DiLoCoError(
                f"A RandomState was to be {what} while it was active; that is possible outside of its `with` block "
                "only. Its generators are as they were."
            )


def _cuda_generators() -> Sequence[torch.Generator]:
    return torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]  # torch's own


def _number(sequence: np.random.SeedSequence) -> int:
    return int(sequence.generate_state(1, np.uint64)[0])


def _optional_float(value: float | None) -> float | None:
    return None if value is None else float(value)
