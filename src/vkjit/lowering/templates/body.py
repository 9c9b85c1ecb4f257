"""Bodies of groups evaluated at a point of the index space.

One helper for every template: pointwise loops, reductions, prologues and epilogues of products. A
value is a scalar while nothing it depends on varies along the lane axis, and becomes a vector where
it meets one that does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import assert_never, final

from vkjit.errors import InternalError
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.decode import LANES, decode, decode_at
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import (
    I1,
    I8,
    Access,
    BinOp,
    Buffer,
    CmpOp,
    ConvertOp,
    ScalarType,
    VecType,
    scalar_of,
    with_elem,
)
from vkjit.lowering.kernel.views import View
from vkjit.lowering.plan.groups import (
    IOTA,
    BodyStep,
    ConstStep,
    GatherStep,
    LoadStep,
    ProductStep,
    ReduceStep,
    ScalarStep,
    StoreStep,
)
from vkjit.lowering.templates.context import Buffers


@final
class Point:
    """Where a body is evaluated: one index per axis, and at most one axis of consecutive lanes.

    A point belongs to the region in which it was made: it remembers the addresses it has computed.
    It is ``aligned`` where the index along the lane axis is known to be a multiple of the lanes.
    """

    __slots__ = ("_addresses", "aligned", "axis", "b", "indices", "lanes", "mask")

    def __init__(  # noqa: PLR0913  where, and what is known of it
        self,
        b: Builder,
        indices: Sequence[Value],
        axis: int | None = None,
        lanes: int = 1,
        mask: Value | None = None,
        *,
        aligned: bool = False,
    ) -> None:
        self.b = b
        self.indices = tuple(indices)
        self.axis = axis if lanes > 1 else None
        self.lanes = lanes
        self.mask = mask
        self.aligned = aligned
        self._addresses: dict[View, Value] = {}

    def base(self, view: View) -> Value:
        """Address of lane 0."""
        found = self._addresses.get(view)
        if found is None:
            b = self.b
            found = b.index(view.offset)
            for index, stride in zip(self.indices, view.strides, strict=True):
                if stride:
                    found = b.add(found, b.scaled(index, stride))
            self._addresses[view] = found
        return found

    def step(self, view: View) -> int:
        """Address distance from lane to lane; 0 without lanes."""
        return 0 if self.axis is None else view.strides[self.axis]

    def spread(self, base: Value, stride: int) -> Value:
        """Addresses of all lanes."""
        b = self.b
        return b.add(b.splat(base, self.lanes), b.iota(self.lanes, stride))


def evaluate(
    point: Point,
    buffers: Buffers,
    body: Sequence[BodyStep],
    wanted: Collection[int],
    known: dict[int, Value],
) -> dict[int, Value]:
    """Emits the steps that ``wanted`` need at ``point``.

    Args:
        point: where.
        buffers: of the kernel.
        body: of the group.
        wanted: numbers of the values asked for.
        known: values that are there already, such as reductions and the product; not changed.

    Returns:
        ``known`` and all values emitted.
    """
    values = dict(known)
    for number in needed(body, wanted, known):
        values[number] = _emit(point, buffers, body[number], values)
    return values


def needed(body: Sequence[BodyStep], wanted: Collection[int], known: Collection[int]) -> list[int]:
    """Numbers of the steps to emit for ``wanted``, in order, given ``known`` values."""
    live = set(wanted) - set(known)
    for number in range(len(body) - 1, -1, -1):
        if number in live:
            live.update(a for a in arguments(body[number]) if a not in known)
    return sorted(live)


def arguments(step: BodyStep) -> tuple[int, ...]:
    """Numbers of the values a step uses."""
    match step:
        case ScalarStep(args=args):
            return args
        case GatherStep(index=index):
            return (index,)
        case ReduceStep(arg=arg):
            return (arg,)
        case LoadStep() | ConstStep() | ProductStep():
            return ()
        case _:
            assert_never(step)


def store(point: Point, buffers: Buffers, step: StoreStep, value: Value) -> None:
    """Writes ``value``, a vector along the lane axis or a scalar, to the array."""
    b = point.b
    buffer = buffers.of(step.array)
    if scalar_of(value.type) is I1:
        value = b.convert(ConvertOp.ZEXT, value, with_elem(value.type, I8))
    base = point.base(step.view)
    if point.axis is None:
        b.store(buffer, base, value, point.mask)
        return
    value = b.splat(value, point.lanes)
    stride = point.step(step.view)
    if stride == 1:
        b.store(buffer, base, value, point.mask)
    else:
        b.store(buffer, point.spread(base, stride), value, point.mask)


def load(point: Point, buffers: Buffers, step: LoadStep) -> Value:
    """The element, or the elements of all lanes, that ``step`` reads."""
    b = point.b
    stride = point.step(step.view)
    base = point.base(step.view)
    if step.array == IOTA:
        index = base if stride == 0 else point.spread(base, stride)
        return _from_index(b, index, step.type)
    buffer = buffers.of(step.array)
    if step.blocks is not None:
        return _decoded(point, buffer, step, base)
    if stride == 0:
        mask = None if point.axis is not None else point.mask
        value = b.load(buffer, base, 1, mask)
    elif stride == 1:
        value = b.load(buffer, base, point.lanes, point.mask)
    else:
        value = b.load(buffer, point.spread(base, stride), point.lanes, point.mask)
    return from_memory(b, value, step.type)


def _decoded(point: Point, buffer: Buffer, step: LoadStep | GatherStep, base: Value) -> Value:
    """The numbers from number ``base``, an address of lane 0 or those of all lanes.

    Lanes that follow each other in one block are decoded as a run; where ``point`` is masked, its
    lanes outside read number 0.
    """
    b, block = point.b, step.blocks
    assert block is not None
    stride = point.step(step.view)
    mask = point.mask
    if isinstance(base.type, VecType):
        where = base
    elif stride == 0:
        where, mask = base, None if point.axis is not None else mask
    elif mask is None and _in_runs(point, step, stride):
        return _rounded(b, decode(b, buffer, block, base, point.lanes), step.type)
    else:
        where = point.spread(base, stride)
    if mask is not None:
        where = b.select(mask, where, b.const(where.type, 0))
    return _rounded(b, decode_at(b, buffer, block, where), step.type)


def _in_runs(point: Point, step: LoadStep | GatherStep, stride: int) -> bool:
    """Whether the numbers of all lanes are a run that ``decode`` takes."""
    if stride != 1 or not point.aligned or point.lanes not in LANES:
        return False
    others = [s for a, s in enumerate(step.view.strides) if a != point.axis]
    if isinstance(step, GatherStep):
        others.append(step.stride)
    return all(s % point.lanes == 0 for s in (*others, step.view.offset))


def _rounded(b: Builder, value: Value, elem: ScalarType) -> Value:
    """Decoded numbers in the type of the step."""
    return b.convert(ConvertOp.FLOAT, value, with_elem(value.type, elem))


def from_memory(b: Builder, value: Value, elem: ScalarType) -> Value:
    """A loaded element as a value of its type: bytes become booleans."""
    if elem is not I1:
        return value
    return b.compare(CmpOp.NE, value, b.const(value.type, 0))


def vectors(b: Builder, values: Sequence[Value]) -> list[Value]:
    """Operands of one width: scalars are repeated where any other is a vector."""
    lanes = max([v.type.lanes for v in values if isinstance(v.type, VecType)], default=1)
    return [b.splat(v, lanes) for v in values]


def access_of(
    body: Sequence[BodyStep], stores: Sequence[StoreStep], extra: Collection[int] = ()
) -> dict[int, Access]:
    """How each array is used by a group; ``extra`` arrays are read."""
    read = {s.array for s in body if isinstance(s, (LoadStep, GatherStep)) and s.array != IOTA}
    read.update(extra)
    access = dict.fromkeys(read, Access.READ)
    for s in stores:
        access[s.array] = Access.READ_WRITE if s.array in read else Access.WRITE
    return access


def _emit(point: Point, buffers: Buffers, step: BodyStep, values: dict[int, Value]) -> Value:
    b = point.b
    match step:
        case LoadStep():
            return load(point, buffers, step)
        case ConstStep(value=number, type=elem):
            return b.const(elem, number)
        case ScalarStep(fn=fn, args=args):
            return fn(b, *vectors(b, [values[a] for a in args]))
        case GatherStep():
            return _gather(point, buffers, step, values[step.index])
        case ReduceStep() | ProductStep():
            raise InternalError("body: a reduction or product must be known where it is used")
        case _:
            assert_never(step)


def _gather(point: Point, buffers: Buffers, step: GatherStep, index: Value) -> Value:
    b = point.b
    low, high = b.const(index.type, 0), b.const(index.type, step.size - 1)
    index = b.binary(BinOp.MIN_S, b.binary(BinOp.MAX_S, index, low), high)
    wide = with_elem(index.type, b.kernel.index_type)
    moved = b.scaled(b.convert(ConvertOp.SEXT, index, wide), step.stride)
    base, stride = point.base(step.view), point.step(step.view)
    buffer = buffers.of(step.array)
    if step.blocks is not None:
        if isinstance(moved.type, VecType):
            base = point.spread(base, stride) if stride else b.splat(base, point.lanes)
        return _decoded(point, buffer, step, b.add(base, moved))
    if isinstance(moved.type, VecType):
        where = point.spread(base, stride) if stride else b.splat(base, point.lanes)
        value = b.load(buffer, b.add(where, moved), point.lanes, point.mask)
    else:
        start = b.add(base, moved)
        if stride == 0:
            mask = None if point.axis is not None else point.mask
            value = b.load(buffer, start, 1, mask)
        elif stride == 1:
            value = b.load(buffer, start, point.lanes, point.mask)
        else:
            value = b.load(buffer, point.spread(start, stride), point.lanes, point.mask)
    return from_memory(b, value, step.type)


def _from_index(b: Builder, index: Value, elem: ScalarType) -> Value:
    """An index as a number of type ``elem``."""
    type_ = with_elem(index.type, elem)
    if elem.kind == "float":
        return b.convert(ConvertOp.SINT_TO_FLOAT, index, type_)
    if elem is I1:
        return b.compare(CmpOp.NE, index, b.const(index.type, 0))
    narrow = elem.bits < b.kernel.index_type.bits
    return b.convert(ConvertOp.TRUNC if narrow else ConvertOp.SEXT, index, type_)
