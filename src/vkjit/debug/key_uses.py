"""Uses of random keys: marks in programs, and the values that were consumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from vkjit.control.act import Act
from vkjit.debug.modes import modes
from vkjit.errors import KeyReuseError
from vkjit.ir.avals import Aval
from vkjit.ir.control import Control, Inline
from vkjit.ir.primitive import Array, Value
from vkjit.ir.program import Program, Source, Var
from vkjit.trace import aval_of, bind_outs


@final
@dataclass(frozen=True, slots=True)
class Use:
    """A function that consumed a key, and the user's line."""

    name: str
    source: Source | None

    def __str__(self) -> str:
        return f"{self.name} at {self.source}" if self.source else self.name


def reused(before: Use, now: Use, where: str = "") -> KeyReuseError:
    """The error for a key that two functions consumed."""
    if where:
        return KeyReuseError(
            f"key_reuse: {now} consumes one random key {where}, expected a key of its own each "
            "time; pass split keys as xs, carry a key and split it, or fold_in the turn"
        )
    return KeyReuseError(
        f"key_reuse: {now} consumes a random key that {before} consumed, so their numbers are not "
        "independent; split the key first, and use each part once"
    )


@final
@dataclass(frozen=True)
class Consume(Act):
    """Marks that ``use`` consumes the key, or each of an array of keys; does nothing else."""

    use: Use = field(compare=False)
    of: Aval

    def evaluate_outs(self, *arrays: Array) -> tuple[Array, ...]:
        """Notes the values."""
        if modes.keys:
            note(arrays[0], self.use)
        return ()

    def batch_outs(self, args: Sequence[Value], batched: Sequence[bool]) -> tuple[Value, ...]:
        """A mark of all keys."""
        return tuple(bind_outs(Consume(self.use, aval_of(args[0])), *args))

    def control(self) -> Control:
        """Nothing."""
        return Inline(Program((Var(self.of),), (), ()))

    def parameters(self) -> dict[str, object]:
        """The name of the function."""
        return {"by": self.use.name}


def note(keys: Array, use: Use) -> None:
    """Notes the values of consumed keys u32[..., 2].

    Raises:
        KeyReuseError: one was consumed before.
    """
    for row in np.ascontiguousarray(keys).reshape(-1, 2):
        value = row.tobytes()
        before = modes.used.get(value)
        if before is not None:
            raise reused(before, use)
        modes.used[value] = use
