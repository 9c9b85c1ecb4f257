"""What products on cooperative matrices do with their sums: convert, map the body over them, store.

A body of conversions alone stays with whole matrices. Any other becomes a map: it is evaluated for
every element at its row and column, with the same steps as in all other templates. Arrays that have
an element for each output are loaded as matrices, like the operands, if there are registers for
both; the map loads what repeats along rows or columns, or lies otherwise, by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from vkjit.errors import InternalError
from vkjit.lowering.gpu.gemm_epilogue import widened
from vkjit.lowering.gpu.gemm_tensor_memory import (
    ALIGNMENT,
    Located,
    Place,
    is_aligned,
    plane_of,
)
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import BlockArg, Const, Convert, For, If, Value
from vkjit.lowering.kernel.types import (
    BF16,
    F16,
    F32,
    F64,
    I1,
    BinOp,
    ConvertOp,
    MatScope,
    MatType,
    ScalarType,
    scalar_of,
)
from vkjit.lowering.plan.groups import (
    IOTA,
    BodyStep,
    ContractGroup,
    LoadStep,
    ScalarStep,
    StoreStep,
)
from vkjit.lowering.plan.schedule import TensorSchedule
from vkjit.lowering.templates.body import Point, access_of, arguments, evaluate, needed
from vkjit.lowering.templates.context import Buffers

_STORED = (F16, BF16, F32)
_MOST_WORDS = 128
"""Words of matrices that an invocation can hold."""


@final
class Epilogue:
    """Body and stores of a group, for the tiles of one workgroup."""

    def __init__(
        self,
        b: Builder,
        group: ContractGroup,
        schedule: TensorSchedule,
        buffers: Buffers,
        batch: Sequence[Value],
    ) -> None:
        self.b = b
        self.group = group
        self.s = schedule
        self.buffers = buffers
        self.batch = tuple(batch)

    def emit(self, place: Place, total: Value, *, clamped: bool) -> None:
        """Every store of the tile that begins at ``place``."""
        for step in _readers_first(self.group):
            casts = casts_of(self.group, step)
            if casts is None:
                value = self._mapped(place, total, step, clamped=clamped)
                casts = [self.group.body[step.value].type]
            else:
                value = total
            for elem in casts:
                value = self._cast(value, elem)
            self._located(step).store(self.b, place, value, clamped=clamped)

    def _loads(self, step: StoreStep, total: Value) -> dict[int, LoadStep]:
        """Steps of the body that are loaded as matrices, by number."""
        found: dict[int, LoadStep] = {}
        assert isinstance(total.type, MatType)
        words = self.s.block_m * self.s.block_n * total.type.elem.bytes // 4
        if 2 * words > _MOST_WORDS * self.s.invocations:
            return found
        for number in needed(self.group.body, {step.value}, {0}):
            load = self.group.body[number]
            if not isinstance(load, LoadStep) or load.type not in _STORED or load.array == IOTA:
                continue
            if load.blocks is not None:
                continue
            plane = plane_of(load.view)
            fits = plane is not None and plane.pitch > 1 and is_aligned(load.view, load.type)
            if fits and total.type.scope is MatScope.SUBGROUP:
                fits = plane is not None and plane.pitch * load.type.bytes % ALIGNMENT == 0
            if fits:
                found[number] = load
        return found

    def _loaded(self, place: Place, load: LoadStep, total: Value, *, clamped: bool) -> Value:
        t = total.type
        assert isinstance(t, MatType)
        type_ = MatType(load.type, t.rows, t.cols, t.use, t.scope)
        loaded = self._located(load).load(self.b, place, type_, clamped=clamped)
        # All sources of a map are of one type: drivers refuse others.
        return self._cast(loaded, t.elem)

    def _located(self, step: StoreStep | LoadStep) -> Located:
        plane, b = plane_of(step.view), self.b
        if plane is None:
            raise InternalError(f"gemm_tensor: {step.view}, expected a contiguous axis")
        index = (*self.batch, b.index(0), b.index(0))
        return Located(self.buffers.of(step.array), plane, Point(b, index).base(step.view))

    def _cast(self, value: Value, elem: ScalarType) -> Value:
        t = value.type
        assert isinstance(t, MatType)
        return self.b.mat_convert(value, MatType(elem, t.rows, t.cols, t.use, t.scope))

    def _mapped(self, place: Place, total: Value, step: StoreStep, *, clamped: bool) -> Value:
        """The values to store, in float32 unless sums and results have fewer bits."""
        b, group = self.b, self.group
        if scalar_of(total.type) is not group.body[step.value].type:
            total = self._cast(total, F32)
        elem = scalar_of(total.type)
        for array in _read(group, step):  # outside of the map: buffers count in their order of use
            self.buffers.of(array)
        loads = self._loads(step, total)
        matrices = [self._loaded(place, load, total, clamped=clamped) for load in loads.values()]
        with b.mat_map(total, *matrices) as made:
            row, column = b.add(place[0], made.row), b.add(place[1], made.column)
            if clamped:
                row = b.binary(BinOp.MIN_S, row, b.index(group.m - 1))
                column = b.binary(BinOp.MIN_S, column, b.index(group.n - 1))
            point = Point(b, (*self.batch, row, column))
            known = {
                number: widened(b, x, loads[number].type)
                for number, x in zip(loads, made.elements[1:], strict=True)
            }
            known[0] = widened(b, made.elements[0], group.body[0].type)
            values = evaluate(point, self.buffers, group.body, {step.value}, known)
            made.body.yields = (widened(b, values[step.value], elem),)
        return made


def supports(group: ContractGroup) -> bool:
    """Whether body and stores can be expressed with matrices and maps over them."""
    stored = {step.array for step in group.stores}
    for step in group.stores:
        plane = plane_of(step.view)
        if plane is None or plane.pitch == 0 or group.body[step.value].type not in _STORED:
            return False
        if stored & set(_read(group, step)):
            return False
    if len(_readers(group)) > 1:
        return False
    wanted = {step.value for step in group.stores}
    steps = [group.body[number] for number in needed(group.body, wanted, {0})]
    return all(step.type is not F64 and _is_flat(group.body, step) for step in steps)


def casts_of(group: ContractGroup, step: StoreStep) -> list[ScalarType] | None:
    """The types that the sums pass through to be stored, or None where the body does more."""
    casts = [group.body[0].type]
    for number in needed(group.body, {step.value}, {0}):
        scalar = group.body[number]
        if not isinstance(scalar, ScalarStep) or len(scalar.args) != 1:
            return None
        b = Builder("cast")
        given = BlockArg(group.body[scalar.args[0]].type, "x")
        made = scalar.fn(b, given)
        is_cast = isinstance(made, Convert) and made.op is ConvertOp.FLOAT and made.x is given
        if made is not given and not is_cast:
            return None
        casts.append(scalar.type)
    return casts if all(elem in _STORED for elem in casts) else None


def _read(group: ContractGroup, step: StoreStep) -> list[int]:
    """The arrays that the body reads for a store."""
    steps = [group.body[number] for number in needed(group.body, {step.value}, {0})]
    return list(access_of(steps, ()))


def _readers(group: ContractGroup) -> list[StoreStep]:
    """The stores whose bodies read where another store writes: it may be the same memory."""
    found: list[StoreStep] = []
    for step in group.stores:
        body = [group.body[number] for number in needed(group.body, {step.value}, {0})]
        read = [s.view for s in body if isinstance(s, LoadStep)]
        if any(other.view in read for other in group.stores if other is not step):
            found.append(step)
    return found


def _readers_first(group: ContractGroup) -> list[StoreStep]:
    """The stores in an order in which none writes what the map of a later one reads."""
    readers = _readers(group)
    return [*readers, *[step for step in group.stores if step not in readers]]


def _is_flat(body: Sequence[BodyStep], step: BodyStep) -> bool:
    """Whether a step is expressions on scalars alone, without control flow."""
    if not isinstance(step, ScalarStep):
        return True
    b = Builder("step")
    step.fn(b, *[_zero(b, body[a].type) for a in arguments(step)])
    return not any(isinstance(node, For | If) for node in b.kernel.body.nodes)


def _zero(b: Builder, elem: ScalarType) -> Const:
    return b.const(elem, False if elem is I1 else 0 if elem.kind == "int" else 0.0)
