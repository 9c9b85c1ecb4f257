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
    """

    step: int
    tensors: tuple[TensorState, ...]
    still: tuple[str, ...]
    moved: float

    def rows(self) -> list[dict[str, Any]]:
        """Rows of ``adapters.csv``."""
        return [{"step": self.step, **vars(one)} for one in self.tensors]


@final
class AdapterWatch:
    """Compares adapters with their initial values and with those measured before.

    Keeps copies of the adapters on the host: the initial ones, those of the measurement before,
    and one for each name that `moved_since` is asked with.
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
        self._began, self._marks = self._initial, dict[str, Mapping[str, NDArray[Any]]]()
        self._last: Movement | None = None

    def resume(self, step: int, adapters: Adapters) -> None:
        """Makes the adapters after ``step`` those that the next measurement is compared with."""
        self._before, self._since = tensors_of(adapters), step
        self._began = self._before

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
        self._last = Movement(step, states, still, _way(now, self._initial))
        self._before, self._since = now, step
        return self._last

    def moved_since(self, what: str, adapters: Adapters) -> float:
        """Norm of all differences since the last call with ``what``, over the norm of all tensors.

        The first call compares with the adapters that this process began with. (`measure` would
        not do: saves measure, too, so it compares with what may be one step ago.)
        """
        now = tensors_of(adapters)
        before = self._marks.get(what, self._began)
        self._marks[what] = now
        return _way(now, before)

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


def _way(now: Mapping[str, NDArray[Any]], before: Mapping[str, NDArray[Any]]) -> float:
    """Norm of all differences over the norm of all tensors."""
    differences = [value - before[name] for name, value in now.items()]
    return _ratio(_norm(differences), _norm(now.values()))


def _norm(values: Any) -> float:
    """Euclidean norm of all arrays together, summed in float64."""
    squares = (float(np.square(value, dtype=np.float64).sum()) for value in values)
    return math.sqrt(math.fsum(squares))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
