"""``nans``: calls that end where a value first becomes NaN, and say which operation made it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from typing import final

import numpy as np

from vkjit.debug.blame import Suspect, Tainted, checked, wrong
from vkjit.debug.flags import Flagged, flagged
from vkjit.debug.modes import Watch, modes
from vkjit.device_array import host_values
from vkjit.dtypes import is_float
from vkjit.errors import NonFiniteError
from vkjit.ir.avals import Aval
from vkjit.ir.evaluate import evaluate
from vkjit.ir.primitive import Array, Primitive, Value
from vkjit.ir.program import Eqn, Program, Var
from vkjit.lowering.artifact import Plan
from vkjit.lowering.compile import compile_program
from vkjit.passes.pipeline import simplify
from vkjit.runtime.device import Device, DeviceBuffer, Loaded
from vkjit.trace import Hooks, aval_of, present_source


@contextmanager
def nans(*, infs: bool = False) -> Generator[None]:
    """Raises where a value first becomes NaN, inside the block and in this thread.

    Jitted calls run an instrumented plan: behind each launch the device looks at the floats that it
    wrote, and the result is read once, at the end. Where one was NaN, the call runs again, with a
    check behind every operation of that launch; the first that fails names the operation, index,
    operands, the turn of the loops around it, the line, and whether it computes values or
    cotangents. Operations outside ``jit`` are looked at one by one. ``VKJIT_DEBUG_NANS=1`` switches
    it on for the whole process.

    Functions are compiled anew for the block and wait for each call. What they donate is gone only
    when the call has succeeded, and nothing takes its memory over.

    Args:
        infs: whether infinities are errors, too.

    Raises:
        NonFiniteError: from the call that made such a value, or was given one.
    """
    before = modes.watch
    modes.watch = Watch.NONFINITE if infs else Watch.NAN
    modes.update()
    try:
        yield
    finally:
        modes.watch = before
        modes.update()


def watched(
    device: Device,
    plan: Plan,
    program: Program,
    constants: Sequence[DeviceBuffer],
    packed: Sequence[DeviceBuffer],
) -> Loaded:
    """``plan`` ready to run with what ``nans`` asks for.

    Args:
        device: where it runs.
        plan: takes over no inputs.
        program: what it computes; parameters are the constants, then the inputs.
        constants: values of the first parameters.
        packed: further constants of the plan.
    """
    return WatchedLoaded(
        device, flagged(plan, device.target, modes.watch), program, constants, packed
    )


@final
class WatchedLoaded(Loaded):
    """An instrumented plan, and the program to blame an operation of."""

    __slots__ = ("_constants", "_device", "_false", "_flagged", "_loaded", "_program", "_watch")

    def __init__(
        self,
        device: Device,
        made: Flagged,
        program: Program,
        constants: Sequence[DeviceBuffer],
        packed: Sequence[DeviceBuffer],
    ) -> None:
        self._device = device
        self._flagged = made
        self._program = program
        self._constants = list(constants)
        self._watch = modes.watch
        self._loaded = device.load(made.plan, [*constants, *packed])
        self._false: set[int] = set()

    def run(
        self, inputs: Sequence[DeviceBuffer], donated: Collection[int] = ()
    ) -> list[DeviceBuffer]:
        """Runs the plan, and looks at the table.

        Raises:
            NonFiniteError: a launch wrote a value that is not finite.
        """
        table = self._device.upload(self._flagged.table())
        *outputs, table = self._loaded.run([*inputs, table], [len(inputs)])
        seen = np.array(self._device.download(table, np.uint8, (table.nbytes,)))
        found = [i for i in self._flagged.found(seen) if i not in self._false]
        if found:
            self._blame(found, inputs)
            self._require_results(found[0], outputs)
            self._false.update(found)
        for position in donated:
            inputs[position].release()
        return outputs

    def _blame(self, found: Sequence[int], inputs: Sequence[DeviceBuffer]) -> None:
        """Runs again with checks, first of the operations of the first launch."""
        values = [*self._constants, *inputs]
        self._require_inputs(values)
        named = set(self._flagged.launches[found[0]].origin)

        def suspect(eqn: Eqn) -> bool:
            return _origin(eqn) in named

        with contextlib.suppress(Tainted):
            self._again(values, suspect, causes=True)
        self._again(values, _all, causes=False)

    def _require_results(self, found: int, outputs: Sequence[DeviceBuffer]) -> None:
        """Where no operation gives such a value on its own: do the results have one?

        If not, the launch wrote memory that nobody reads as floats.
        """
        launch = self._flagged.launches[found]
        for var, value in zip(self._program.results, outputs, strict=True):
            of = var.aval
            if not is_float(of.dtype):
                continue
            if wrong(self._device.download(value, of.dtype, of.shape), self._watch).any():
                raise NonFiniteError(
                    f"{self._watch.value}: kernel {launch.kernel.name} gave such a value, and no "
                    f"operation gives one when run on its own: {'; '.join(launch.origin)}"
                )

    def _again(self, values: Sequence[DeviceBuffer], suspect: Suspect, *, causes: bool) -> None:
        program = simplify(checked(self._program, self._watch, suspect, causes=causes))
        plan = compile_program(program, self._device.target).plan
        self._device.load(plan).run(values)

    def _require_inputs(self, values: Sequence[DeviceBuffer]) -> None:
        """Refuses inputs that are not finite themselves."""
        count = len(self._constants)
        for position, (var, value) in enumerate(zip(self._program.params, values, strict=True)):
            of = var.aval
            if not is_float(of.dtype):
                continue
            array = self._device.download(value, of.dtype, of.shape)
            bad = wrong(array, self._watch)
            if bad.any():
                index = [int(i) for i in np.unravel_index(int(np.argmax(bad)), of.shape)]
                which = f"array {position - count} of the call"
                if position < count:
                    which = "a captured array"
                raise NonFiniteError(
                    f"{self._watch.value}: {which}, {of}, is {array[tuple(index)]} at {index} "
                    f"when it is given ({int(bad.sum())} of {bad.size} elements)"
                )


def _all(eqn: Eqn) -> bool:
    del eqn
    return True


def _origin(eqn: Eqn) -> str:
    """As lowering names an equation in the origin of a launch."""
    return f"{eqn.prim.name} at {eqn.source}" if eqn.source else eqn.prim.name


_unwatched = Hooks.eager


def _eager(prim: Primitive, values: Sequence[Value], outs: Sequence[Aval]) -> Sequence[Value]:
    """Runs a primitive now, and looks at its results where ``nans`` is switched on."""
    results = _unwatched(prim, values, outs)
    if modes.watching:
        for value, of in zip(results, outs, strict=True):
            if is_float(of.dtype) and wrong(host_values(value), modes.watch).any():
                _blame_eager(prim, values, outs)
    return results


def _blame_eager(prim: Primitive, values: Sequence[Value], outs: Sequence[Aval]) -> None:
    """Evaluates the primitive once more, with checks, also inside it."""
    params = tuple(Var(aval_of(v)) for v in values)
    results = tuple(map(Var, outs))
    program = Program(params, (Eqn(prim, params, results, present_source()),), results)
    arrays: list[Array] = [
        np.asarray(host_values(v), p.aval.dtype) for v, p in zip(values, params, strict=True)
    ]
    evaluate(checked(program, modes.watch, _all, causes=False), arrays)


Hooks.eager = staticmethod(_eager)
