"""The stages of a jitted function, one by one: ``jit(f).trace(x).lower().compile()(x)``.

Names follow ``jax.stages``. Each stage can be printed and asked what it will cost; nothing runs
before the last one is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from vkjit import tree
from vkjit.api.costs import CostAnalysis
from vkjit.api.executable import Executable
from vkjit.api.ref import Ref
from vkjit.api.staged import Lowered, MemoryReport, ShapeDtypeStruct
from vkjit.device_array import DeviceArray, placed
from vkjit.errors import ArgumentError, DTypeError, ShapeError
from vkjit.ir.avals import Aval
from vkjit.ir.primitive import Value
from vkjit.ir.program import Program
from vkjit.ir.text import text
from vkjit.runtime import get_device
from vkjit.runtime.device import Device
from vkjit.trace import aval_of

Lower = Callable[[Device], Lowered]


@final
class TracedCall:
    """A function traced for some arguments: a program.

    Values that the function closes over are the first parameters of ``program``.
    """

    def __init__(
        self, program: Program, trees: tuple[tree.TreeDef, tree.TreeDef], lower: Lower, at: Device
    ) -> None:
        self.program = program
        self.in_tree, self.out_tree = trees
        self._lower = lower
        self._device = at

    @property
    def out_info(self) -> Any:
        """Shapes and dtypes of the results, in their structure."""
        count = self.out_tree.num_leaves
        avals = self.program.out_avals[:count]
        outs = [ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak) for a in avals]
        return tree.unflatten(self.out_tree, outs)

    def as_text(self) -> str:
        """The program as text, with source lines."""
        return text(self.program, lines=True)

    def lower(self, device: str | None = None) -> Lowered:
        """Kernels and plan for ``device``; by default that of the arguments."""
        return self._lower(get_device(device) if device else self._device)


@final
class CompiledCall:
    """A function compiled for one combination of shapes and dtypes.

    Call it with dynamic arguments alone, of the structure, shapes and dtypes that it was traced
    for. Donated arguments are taken over as by the jitted function; ``lowered`` has all texts.
    """

    def __init__(self, executable: Executable, in_tree: tree.TreeDef) -> None:
        self._executable = executable
        self._in_tree = in_tree
        self.lowered = executable.lowered
        self._avals = self.lowered.program.in_avals[len(self.lowered.constants) :]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result.

        Raises:
            ArgumentError: the arguments have another structure.
            ShapeError, DTypeError: a leaf has another shape or dtype.
        """
        leaves, given = tree.flatten((args, kwargs))
        refs = [leaf for leaf in leaves if type(leaf) is Ref]
        leaves = [leaf.value if type(leaf) is Ref else leaf for leaf in leaves]
        if given != self._in_tree:
            raise ArgumentError(
                f"compiled: called with {given}, compiled for {self._in_tree}; call the jitted "
                "function, which compiles for any arguments"
            )
        device = self._executable.device
        return self._executable(fitting(leaves, self._avals, device), refs)

    def as_text(self, stage: str = "plan") -> str:
        """See ``Lowered.as_text``."""
        return self.lowered.as_text(stage)

    def cost_analysis(self) -> CostAnalysis:
        """Operations and bytes of one call."""
        return self.lowered.cost_analysis()

    def memory_analysis(self) -> MemoryReport:
        """Bytes of one call by role."""
        return self.lowered.memory()


def fitting(leaves: Sequence[Value], avals: Sequence[Aval], device: Device) -> list[DeviceArray]:
    """The leaves on a device.

    Raises:
        ShapeError, DTypeError: a leaf is not what the code was compiled for.
    """
    for position, (leaf, of) in enumerate(zip(leaves, avals, strict=True)):
        given = aval_of(leaf)
        if given.shape != of.shape:
            raise ShapeError(f"compiled: argument leaf {position} is {given}, expected {of}")
        if given.dtype != of.dtype:
            raise DTypeError(f"compiled: argument leaf {position} is {given}, expected {of}")
    return [placed(leaf, device.name) for leaf in leaves]
