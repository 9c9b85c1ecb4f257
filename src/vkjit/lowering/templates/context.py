"""What a template is given beside its group, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.elements import memory_type
from vkjit.lowering.kernel.nodes import Kernel
from vkjit.lowering.kernel.types import Access, Buffer, ScalarType
from vkjit.lowering.plan.groups import ArrayInfo
from vkjit.lowering.target import Target


@final
class TemplateContext:
    """The target, and the arrays of the plan so far; templates may add temporaries.

    ``constants`` are arrays that no call changes: a kernel that reads nothing else runs once.
    ``numbers`` is how far the group counts in blocks, which have more numbers than elements.
    """

    __slots__ = ("arrays", "constants", "numbers", "target")

    def __init__(
        self, target: Target, arrays: list[ArrayInfo], constants: frozenset[int] = frozenset()
    ) -> None:
        self.target = target
        self.arrays = arrays
        self.constants = constants
        self.numbers = 0

    def new_array(self, elem: ScalarType, length: int) -> int:
        """A temporary that later kernels of the same group may read; returns its id."""
        self.arrays.append(ArrayInfo(elem, length))
        return len(self.arrays) - 1


@final
@dataclass(frozen=True, slots=True)
class Lowered:
    """A kernel and the array behind each of its buffers, in order."""

    kernel: Kernel
    arrays: tuple[int, ...]


@final
class Buffers:
    """Declares the arrays of a group as kernel buffers, each once."""

    __slots__ = ("_access", "_b", "_context", "_declared")

    def __init__(self, b: Builder, context: TemplateContext, access: dict[int, Access]) -> None:
        self._b = b
        self._context = context
        self._access = access
        self._declared: dict[int, Buffer] = {}

    def of(self, array: int) -> Buffer:
        """The buffer of ``array``, declared on first use."""
        found = self._declared.get(array)
        if found is None:
            info = self._context.arrays[array]
            found = self._b.buffer(
                f"a{array}", memory_type(info.elem), info.length, self._access[array]
            )
            self._declared[array] = found
        return found

    @property
    def target(self) -> Target:
        """What the kernel is for."""
        return self._context.target

    @property
    def arrays(self) -> tuple[int, ...]:
        """Array ids in the order of the kernel's buffers."""
        return tuple(self._declared)
