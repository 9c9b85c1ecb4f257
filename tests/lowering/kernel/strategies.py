"""Random kernels: well typed, in bounds and free of races by construction."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.interpret_ops import DTYPES
from vkjit.lowering.kernel.nodes import BarrierScope, Kernel, Value
from vkjit.lowering.kernel.types import (
    BF16,
    F16,
    F32,
    F64,
    I1,
    I8,
    I16,
    I32,
    I64,
    Access,
    BinOp,
    Buffer,
    CmpOp,
    ConvertOp,
    ScalarType,
    Space,
    Type,
    UnOp,
    VecType,
    lanes_of,
    scalar_of,
    with_elem,
)

LENGTH = 64
FLOATS = (F16, BF16, F32, F64)
INTEGERS = (I8, I16, I32, I64)
_FLOAT_BINARY = (BinOp.ADD, BinOp.SUB, BinOp.MUL, BinOp.DIV, BinOp.MIN, BinOp.MAX)
_INT_BINARY = (
    BinOp.ADD, BinOp.SUB, BinOp.MUL, BinOp.AND, BinOp.OR, BinOp.XOR, BinOp.MIN_S, BinOp.MIN_U,
    BinOp.MAX_S, BinOp.MAX_U,
)  # fmt: skip
_SHIFTS = (BinOp.SHL, BinOp.SHR_L, BinOp.SHR_A)
_DIVISIONS = (BinOp.DIV_S, BinOp.DIV_U, BinOp.REM_S, BinOp.REM_U)
_FLOAT_UNARY = (UnOp.NEG, UnOp.ABS, UnOp.FLOOR, UnOp.CEIL, UnOp.ROUND_EVEN, UnOp.TRUNC, UnOp.SQRT)
_INT_UNARY = (UnOp.NEG, UnOp.NOT, UnOp.POPCOUNT, UnOp.CLZ)
_SIGNED_CMP = (CmpOp.EQ, CmpOp.NE, CmpOp.LT, CmpOp.LE, CmpOp.GT, CmpOp.GE)
_UNSIGNED_CMP = (CmpOp.LT_U, CmpOp.LE_U, CmpOp.GT_U, CmpOp.GE_U)


@dataclass
class Growth:
    """A kernel that grows by random nodes; ``values`` are those in scope."""

    b: Builder
    draw: st.DrawFn
    elems: tuple[ScalarType, ...]
    values: list[Value] = field(default_factory=list)

    def pick(self, type_: Type) -> Value:
        """A value of ``type_``: one in scope or a constant."""
        fitting = [v for v in self.values if v.type == type_]
        if fitting and self.draw(st.integers(0, 3)):
            return self.draw(st.sampled_from(fitting))
        return self.constant(type_)

    def constant(self, type_: Type) -> Value:
        elem = scalar_of(type_)
        if elem is I1:
            return self.b.const(type_, self.draw(st.booleans()))
        if elem.kind == "int":
            top = 1 << (elem.bits - 1)
            return self.b.const(type_, self.draw(st.integers(-top, top - 1)))
        special = st.sampled_from((0.0, -0.0, 1.0, -2.5, 0.125, 3.0))
        return self.b.const(type_, self.draw(special))

    def some_type(self) -> Type:
        elem = self.draw(st.sampled_from(self.elems))
        lanes = self.draw(st.sampled_from((1, 1, 2, 4)))
        return elem if lanes == 1 else VecType(elem, lanes)

    def grow(self, count: int, depth: int) -> None:
        for _ in range(count):
            kind = self.draw(st.integers(0, 11))
            if kind >= 10 and depth:
                self._branch(depth) if kind == 10 else self._loop(depth)
            else:
                self.values.append(self._value(kind))

    def _value(self, kind: int) -> Value:
        b, draw, type_ = self.b, self.draw, self.some_type()
        elem = scalar_of(type_)
        whole = elem.kind == "int"
        if kind in (0, 1):
            op = draw(st.sampled_from(_INT_BINARY if whole else _FLOAT_BINARY))
            return b.binary(op, self.pick(type_), self.pick(type_))
        if kind == 2:
            op = draw(st.sampled_from(_INT_UNARY if whole else _FLOAT_UNARY))
            return b.unary(op, self.pick(type_))
        if kind == 3:
            ops = _SIGNED_CMP + (_UNSIGNED_CMP if whole else ())
            return b.compare(draw(st.sampled_from(ops)), self.pick(type_), self.pick(type_))
        if kind == 4:
            cond = self.pick(with_elem(type_, I1) if draw(st.booleans()) else I1)
            return b.select(cond, self.pick(type_), self.pick(type_))
        if kind == 5:
            return self._converted(type_)
        if kind == 6 and whole:
            op = draw(st.sampled_from(_SHIFTS + _DIVISIONS))
            right = draw(st.integers(1, elem.bits - 1))
            return b.binary(op, self.pick(type_), b.const(type_, right))
        if kind == 6 and elem.bits > 16:  # in 32 bits a 16-bit fma rounds twice: see Narrow
            return b.fma(self.pick(type_), self.pick(type_), self.pick(type_))
        return self._lanes(type_, kind)

    def _lanes(self, type_: Type, kind: int) -> Value:
        b, draw = self.b, self.draw
        x = self.pick(type_)
        if not isinstance(type_, VecType):
            return b.splat(x, 4)
        if kind == 7:
            return b.extract(x, draw(st.integers(0, type_.lanes - 1)))
        if kind == 8:
            lane = draw(st.integers(0, type_.lanes - 1))
            return b.insert(x, self.pick(type_.elem), lane)
        picks = st.integers(0, 2 * type_.lanes - 1)
        lanes = draw(st.lists(picks, min_size=type_.lanes, max_size=type_.lanes))
        return b.shuffle(x, self.pick(type_), lanes)

    def _converted(self, type_: Type) -> Value:
        source = with_elem(type_, self.draw(st.sampled_from(self.elems)))
        x = self.pick(source)
        old, new = scalar_of(source), scalar_of(type_)
        if old.kind == new.kind == "float":
            return self.b.convert(ConvertOp.FLOAT, x, type_)
        if old.kind == new.kind:
            widening = self.draw(st.sampled_from((ConvertOp.SEXT, ConvertOp.ZEXT)))
            op = widening if new.bits > old.bits else ConvertOp.TRUNC
            return self.b.convert(op, x, type_) if new.bits != old.bits else x
        if old.kind == "int":
            op = self.draw(st.sampled_from((ConvertOp.SINT_TO_FLOAT, ConvertOp.UINT_TO_FLOAT)))
            return self.b.convert(op, x, type_)
        # Out of range is undefined: bring the float between 0 and 100 first.
        low, high = self.b.const(x.type, 0.0), self.b.const(x.type, 100.0)
        inside = self.b.compare(CmpOp.LT, x, high)
        x = self.b.select(inside, x, high)
        x = self.b.select(self.b.compare(CmpOp.GT, x, low), x, low)
        return self.b.convert(ConvertOp.FLOAT_TO_SINT, x, type_)

    def _loop(self, depth: int) -> None:
        types = [self.some_type() for _ in range(self.draw(st.integers(0, 2)))]
        inits = [self.pick(t) for t in types]
        b, outer = self.b, list(self.values)
        with b.loop(b.index(0), b.index(self.draw(st.integers(0, 3))), carried=inits) as loop:
            self.values += loop.carried
            self.grow(3, depth - 1)
            loop.yields(*[self.pick(t) for t in types])
        self.values = outer + list(loop.results)

    def _branch(self, depth: int) -> None:
        types = [self.some_type() for _ in range(self.draw(st.integers(0, 2)))]
        branch = self.b.branch(self.pick(I1), types)
        outer = list(self.values)
        for side in (branch.then, branch.otherwise):
            with side() as region:
                self.grow(2, depth - 1)
                region.yields = tuple(self.pick(t) for t in types)
            self.values = list(outer)
        self.values += branch.results


@st.composite
def kernels(
    draw: st.DrawFn,
    elems: tuple[ScalarType, ...] = (F32, I32, F64, I8, F16, BF16),
    index_types: tuple[ScalarType, ...] = (I32, I64),
) -> Kernel:
    """A kernel that reads one buffer for each element type and writes one for each, too."""
    index = draw(st.sampled_from(index_types))
    invocations = draw(st.sampled_from((1, 4)))
    b = Builder("random", index)
    inputs = [b.buffer(f"in{i}", e, LENGTH, Access.READ) for i, e in enumerate(elems)]
    outputs = [b.buffer(f"out{i}", e, LENGTH, Access.READ_WRITE) for i, e in enumerate(elems)]
    place = b.add(b.scaled(b.workgroup_id(), invocations), b.local_id())
    growth = Growth(b, draw, elems)
    growth.values += [b.load(m, place) for m in inputs]
    wide = b.scaled(place, 4)
    growth.values += [b.load(m, wide, lanes=4) for m in inputs[:2]]
    _exchange(growth, inputs[0], place, invocations)
    growth.grow(draw(st.integers(1, 12)), 2)
    for value in growth.values:
        _keep(b, outputs, place, value)
    return b.finish(grid=(16 // invocations, 1, 1), workgroup=(invocations, 1, 1))


def _exchange(growth: Growth, source: Buffer, place: Value, invocations: int) -> None:
    """Each invocation reads what its neighbour wrote to shared memory."""
    b = growth.b
    tile = b.scratch("tile", source.elem, invocations, Space.SHARED)
    b.store(tile, b.local_id(), growth.values[0])
    b.barrier(BarrierScope.WORKGROUP)
    last = b.index(invocations - 1)
    growth.values.append(b.load(tile, b.sub(last, b.local_id())))


def _keep(b: Builder, outputs: list[Buffer], place: Value, value: Value) -> None:
    """Adds a value to its output, so that it counts."""
    for output in outputs:
        if scalar_of(value.type) is output.elem:
            lanes = lanes_of(value.type)
            where = b.scaled(place, lanes)
            old = b.load(output, where, lanes=lanes)
            op = BinOp.XOR if output.elem.kind == "int" else BinOp.ADD
            b.store(output, where, b.binary(op, old, value))
            return


def arrays_for(kernel: Kernel, seed: int) -> list[np.ndarray]:
    """Contents for the buffers: small numbers, zeros and, in floats, the special values."""
    rng = np.random.default_rng(seed)
    made: list[np.ndarray] = []
    for buffer in kernel.buffers:
        dtype = DTYPES[buffer.elem]
        if buffer.elem.kind == "int":
            limits = np.iinfo(dtype)
            array = rng.integers(limits.min, limits.max, buffer.length, dtype, endpoint=True)
            array[::3] = rng.integers(-4, 5, len(array[::3]))
        else:
            array = rng.normal(scale=3.0, size=buffer.length).astype(dtype)
            array[::7] = rng.choice([np.nan, np.inf, -np.inf, -0.0, 0.0], len(array[::7]))
        made.append(array)
    return made
