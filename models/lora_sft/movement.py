"""Whether the adapters move: checksum, norm and change of every tensor."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from vkjit_models.llama.model import Adapters

COLUMNS = (
    "step", "tensor", "sha256", "norm", "change", "change_ratio", "since_step", "update_ratio",
)  # fmt: skip
"""Of ``adapters.csv``: `TensorState` after a step."""
_DIGITS = 16  # hexadecimal digits of a checksum: enough to tell, short enough to read


@final
@dataclass(frozen=True)
class TensorState:
    """One adapter tensor at one step.

    Args:
        tensor: Its name: the module's, then ``A``, ``B`` or ``magnitude``.
        sha256: The first 16 digits of the checksum of its bytes.
        norm: Its Euclidean norm.
        change: Norm of its difference from the initial value.
        change_ratio: ``change / norm``; 0 where the norm is.
        since_step: Step of the measurement before this one.
        update_ratio: Norm of the difference since then, over ``norm``.
    """

    tensor: str
    sha256: str
    norm: float
    change: float
    change_ratio: float
    since_step: int
    update_ratio: float


@final
@dataclass(frozen=True)
class Movement:
    """All adapter tensors at one step.

    Args:
        step: Steps done.
        tensors: One entry each.
        still: Names of those whose checksum is the initial one.
        moved: Norm of all differences from the initial values over the norm of all tensors.
        moved_since: The same for the differences since the measurement before.
    """

    step: int
    tensors: tuple[TensorState, ...]
    still: tuple[str, ...]
    moved: float
    moved_since: float

    def rows(self) -> list[dict[str, Any]]:
        """Rows of ``adapters.csv``."""
        return [{"step": self.step, **vars(one)} for one in self.tensors]


@final
class AdapterWatch:
    """Compares adapters with their initial values and with those measured before.

    Keeps two copies of the adapters on the host.
    """

    def __init__(self, initial: Adapters, frozen: Sequence[str] = ()) -> None:
        """Starts from the adapters before the first step.

        Args:
            initial: The adapters.
            frozen: Modules whose tensors are not expected to move.
        """
        self._initial = tensors_of(initial)
        self._hashes = {name: checksum(value) for name, value in self._initial.items()}
        self._frozen = {
            name for name in self._initial if any(name.startswith(f"{one}.") for one in frozen)
        }
        self._before, self._since = self._initial, 0
        self._last: Movement | None = None

    def resume(self, step: int, adapters: Adapters) -> None:
        """Makes the adapters after ``step`` those that the next measurement is compared with."""
        self._before, self._since = tensors_of(adapters), step

    def measure(self, step: int, adapters: Adapters) -> Movement:
        """Measures; a second time at one step it gives the first answer."""
        if self._last is not None and self._last.step == step:
            return self._last
        now = tensors_of(adapters)
        states = tuple(self._state(name, value) for name, value in now.items())
        still = tuple(
            one.tensor
            for one in states
            if one.sha256 == self._hashes[one.tensor] and one.tensor not in self._frozen
        )
        size = _norm(now.values())
        self._last = Movement(
            step,
            states,
            still,
            _ratio(_norm(_differences(now, self._initial)), size),
            _ratio(_norm(_differences(now, self._before)), size),
        )
        self._before, self._since = now, step
        return self._last

    def _state(self, name: str, value: NDArray[Any]) -> TensorState:
        norm = _norm([value])
        change = _norm([value - self._initial[name]])
        update = _norm([value - self._before[name]])
        return TensorState(
            name, checksum(value), norm, change, _ratio(change, norm), self._since,
            _ratio(update, norm),
        )  # fmt: skip


def tensors_of(adapters: Adapters) -> dict[str, NDArray[Any]]:
    """The adapters' arrays on the host, by name."""
    tensors: dict[str, NDArray[Any]] = {}
    for module, pair in adapters.items():
        for part, value in (("A", pair.a), ("B", pair.b), ("magnitude", pair.magnitude)):
            if value is not None:
                tensors[f"{module}.{part}"] = np.asarray(value)
    return tensors


def checksum(value: NDArray[Any]) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of an array's bytes, in C order."""
    return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:_DIGITS]


def _differences(
    now: Mapping[str, NDArray[Any]], before: Mapping[str, NDArray[Any]]
) -> list[NDArray[Any]]:
    return [value - before[name] for name, value in now.items()]


def _norm(values: Any) -> float:
    """Euclidean norm of all arrays together, summed in float64."""
    squares = (float(np.square(value, dtype=np.float64).sum()) for value in values)
    return math.sqrt(math.fsum(squares))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
