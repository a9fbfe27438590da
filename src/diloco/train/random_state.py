"""The random generators of one replica, so that replicas in one process do not share random numbers.

Dropout and any other random draws of a model use generators that belong to the process: Python's ``random``, NumPy's
global ``numpy.random``, torch's default CPU generator, and one per CUDA device. A `RandomState` holds one replica's
state of all of them and installs it while that replica works, so a run gives the same bits whether or not its replicas
share a process. It is not thread-safe, because the generators belong to the process.
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
    """A snapshot of the state of every global generator."""

    python: Any  # from random.getstate
    numpy: np.random.BitGenerator
    normal: float | None  # the second of two normal numbers that NumPy drew at once and still holds
    cpu: torch.Tensor  # (5056,) uint8
    cuda: tuple[torch.Tensor, ...]  # (16,) uint8 per device; empty until CUDA is initialised

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
        """Make these the global generators. A CUDA device without a state here is seeded with ``cuda_seed``."""
        random.setstate(self.python)
        np.random.mtrand.set_bit_generator(self.numpy)
        if self.normal is not None:  # set_bit_generator dropped it
            np.random.set_state({**np.random.get_state(legacy=False), "has_gauss": 1, "gauss": self.normal})
        torch.default_generator.set_state(self.cpu)
        for index, generator in enumerate(_cuda_generators()):
            if index < len(self.cuda):
                generator.set_state(self.cuda[index])
            else:
                generator.manual_seed(cuda_seed)


class RandomState:
    """All random generators of one replica: Python, NumPy's global one, torch CPU, and CUDA once it is initialised.

    They depend on ``seed`` and ``replica`` only, and differ between replicas.

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
        ConfigurationError: if ``seed`` or ``replica`` is negative.
    """

    def __init__(self, seed: int, replica: int) -> None:
        if seed < 0 or replica < 0:
            raise ConfigurationError(f"seed and replica must be at least 0, got seed={seed} and replica={replica}.")
        python, numpy_, torch_, cuda = np.random.SeedSequence(seed, spawn_key=(replica,)).spawn(4)
        self._generators = _Generators(
            python=random.Random(_number(python)).getstate(),
            numpy=np.random.MT19937(numpy_),
            normal=None,
            cpu=torch.Generator("cpu").manual_seed(_number(torch_)).get_state(),
            cuda=(),
        )
        self._cuda_seed = _number(cuda)
        self._in_use = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Install these generators for the duration of a ``with`` block.

        Afterwards, even after an exception, this state has advanced by the draws of the block and the process has its
        previous generators back. Different states may be nested. Each use takes about 0.1 ms.

        Raises:
            DiLoCoError: if this state is already active.
            ConfigurationError: if the block was the first to initialise CUDA, so that its CUDA numbers were not seeded.
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
                "CUDA was initialised while a replica's generators were installed, so its random numbers were not "
                "seeded. Move the model to its device, or call torch.cuda.init(), before the first step. The step "
                "can't be repeated; restart the run."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state as plain values and tensors.

        Raises:
            DiLoCoError: if this state is active.
        """
        self._refuse_in_use("saved")
        generators = self._generators
        _, words, normal = generators.python
        numpy_state = generators.numpy.state["state"]
        return {
            "python": {"words": torch.tensor(words, dtype=torch.int64, device="cpu"), "normal": normal},
            "numpy": {
                "words": torch.from_numpy(numpy_state["key"].astype(np.int64)),
                "position": int(numpy_state["pos"]),
                "normal": generators.normal,
            },
            "torch": generators.cpu.clone(),
            "cuda": [state.clone() for state in generators.cuda],
            "cuda_seed": self._cuda_seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Raises:
            CheckpointError: if ``state`` is malformed. This state is then unchanged.
            DiLoCoError: if this state is active.
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
            torch.Generator("cpu").set_state(loaded.cpu)
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RuntimeError) as error:
            raise CheckpointError(f"The saved random state is malformed: {error!r}. Nothing was loaded.") from error
        self._generators, self._cuda_seed = loaded, cuda_seed

    def _refuse_in_use(self, what: str) -> None:
        if self._in_use:
            raise DiLoCoError(
                f"A RandomState can't be {what} while it is active; leave its `with` block first. Its generators are "
                "unchanged."
            )


def _cuda_generators() -> Sequence[torch.Generator]:
    return torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]  # torch's own


def _number(sequence: np.random.SeedSequence) -> int:
    return int(sequence.generate_state(1, np.uint64)[0])


def _optional_float(value: float | None) -> float | None:
    return None if value is None else float(value)
