"""Random kernels: whatever types and nodes meet, the CPU computes what the interpreter does."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.kernels import DTYPES as ALL_DTYPES
from tests.runtime.kernels import check
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Kernel, Value
from vkjit.lowering.kernel.types import (
    F32,
    F64,
    I1,
    I8,
    I16,
    I32,
    I64,
    Access,
    BinOp,
    CmpOp,
    ConvertOp,
    ScalarType,
    UnOp,
    lanes_of,
    scalar_of,
    with_elem,
)

TASKS = 3
DTYPES = {elem: ALL_DTYPES[elem] for elem in (I8, I16, I32, I64, F32, F64)}
INT_OPS = (
    BinOp.ADD, BinOp.SUB, BinOp.MUL, BinOp.MIN_S, BinOp.MIN_U, BinOp.MAX_S, BinOp.MAX_U,
    BinOp.AND, BinOp.OR, BinOp.XOR,
)  # fmt: skip
FLOAT_OPS = (BinOp.ADD, BinOp.SUB, BinOp.MUL, BinOp.DIV, BinOp.MIN, BinOp.MAX)
FLOAT_UNARY = (UnOp.NEG, UnOp.ABS, UnOp.FLOOR, UnOp.CEIL, UnOp.ROUND_EVEN, UnOp.TRUNC)
SIGNED = (CmpOp.EQ, CmpOp.NE, CmpOp.LT, CmpOp.LE, CmpOp.GT, CmpOp.GE)


class Maker:
    """Grows a pool of values of one width, by type, with random nodes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.b = Builder("random", index_type=I64)
        self.lanes = self.random.choice((1, 2, 3, 8, 16))
        self.pool: list[Value] = []

    def of(self, elem: ScalarType) -> Value:
        """A value of the pool with this element type, else a constant."""
        found = [v for v in self.pool if scalar_of(v.type) is elem]
        if found and self.random.random() < 0.9:
            return self.random.choice(found)
        type_ = with_elem(self.pool[0].type, elem)
        if elem is I1:
            return self.b.const(type_, self.random.random() < 0.5)
        number = self.random.randint(-5, 5)
        return self.b.const(type_, number if elem.kind == "int" else number / 4)

    def arithmetic(self) -> Value:
        elem = scalar_of(self.random.choice(self.pool).type)
        if elem is I1:
            op = self.random.choice((BinOp.AND, BinOp.OR, BinOp.XOR))
        else:
            op = self.random.choice(FLOAT_OPS if elem.kind == "float" else INT_OPS)
        return self.b.binary(op, self.of(elem), self.of(elem))

    def unary(self) -> Value:
        x = self.random.choice(self.pool)
        elem = scalar_of(x.type)
        if elem.kind == "float":
            return self.b.unary(self.random.choice(FLOAT_UNARY), x)
        if elem is I1:
            return self.b.unary(UnOp.NOT, x)
        return self.b.unary(self.random.choice((UnOp.NEG, UnOp.NOT, UnOp.POPCOUNT, UnOp.CLZ)), x)

    def compare(self) -> Value:
        elem = scalar_of(self.random.choice(self.pool).type)
        if elem is I1:
            return self.b.compare(CmpOp.NE, self.of(elem), self.of(elem))
        op = self.random.choice(SIGNED if elem.kind == "float" else tuple(CmpOp))
        return self.b.compare(op, self.of(elem), self.of(elem))

    def select(self) -> Value:
        elem = scalar_of(self.random.choice(self.pool).type)
        return self.b.select(self.of(I1), self.of(elem), self.of(elem))

    def convert(self) -> Value:
        x = self.random.choice(self.pool)
        source, target = scalar_of(x.type), self.random.choice((I8, I16, I32, I64, F32, F64))
        if source.kind == "float" and target.kind == "float":
            op = ConvertOp.FLOAT
        elif source.kind == "float":
            return self.arithmetic()  # out of range is undefined
        elif target.kind == "float":
            unsigned = source is I1 or self.random.random() < 0.5
            op = ConvertOp.UINT_TO_FLOAT if unsigned else ConvertOp.SINT_TO_FLOAT
        elif source.bits < target.bits:
            extend = source is not I1 and self.random.random() < 0.5
            op = ConvertOp.SEXT if extend else ConvertOp.ZEXT
        elif source.bits > target.bits:
            op = ConvertOp.TRUNC
        else:
            return x
        return self.b.convert(op, x, with_elem(x.type, target))

    def shuffle(self) -> Value:
        x = self.random.choice(self.pool)
        if lanes_of(x.type) == 1:
            return x
        picks = [self.random.randrange(2 * self.lanes) for _ in range(self.lanes)]
        return self.b.shuffle(x, self.of(scalar_of(x.type)), picks)

    def loop(self) -> Value:
        """A running combination over a few iterations; only integers, so that bits stay equal."""
        x = self.of(self.random.choice((I16, I32, I64)))
        with self.b.loop(
            self.b.index(self.random.randint(0, 1)), self.b.index(self.random.randint(1, 4)),
            carried=(x,),
        ) as loop:  # fmt: skip
            (value,) = loop.carried
            turn = self.b.convert(ConvertOp.TRUNC, loop.index, scalar_of(x.type))
            loop.yields(self.b.add(self.b.mul(value, value), self.b.splat(turn, self.lanes)))
        return loop.results[0]

    def branch(self) -> Value:
        elem = scalar_of(self.random.choice(self.pool).type)
        a, b = self.of(elem), self.of(elem)
        odd = self.b.binary(BinOp.AND, self.b.workgroup_id(), self.b.index(1))
        made = self.b.branch(self.b.compare(CmpOp.EQ, odd, self.b.index(1)), (a.type,))
        with made.then() as region:
            region.yields = (a,)
        with made.otherwise() as region:
            twice = a if elem is I1 else self.b.add(a, b)
            region.yields = (twice,)
        return made.results[0]

    def kernel(self) -> Kernel:
        """Reads one array of each type, computes, and stores the last value of each type."""
        i = self.b.scaled(self.b.workgroup_id(), self.lanes)
        for elem in DTYPES:
            source = self.b.buffer(f"in_{elem}", elem, TASKS * self.lanes, Access.READ)
            self.pool.append(self.b.load(source, i, self.lanes))
        kinds: list[Callable[[], Value]] = [
            self.arithmetic, self.arithmetic, self.unary, self.compare, self.select, self.convert,
            self.shuffle, self.loop, self.branch,
        ]  # fmt: skip
        for _ in range(40):
            self.pool.append(self.random.choice(kinds)())
        for elem in DTYPES:
            last = [v for v in self.pool if scalar_of(v.type) is elem][-1]
            target = self.b.buffer(f"out_{elem}", elem, TASKS * self.lanes, Access.WRITE)
            self.b.store(target, i, last)
        return self.b.finish((TASKS, 1, 1))


@given(seed=st.integers(0, 1 << 30))
def test_random_kernels(seed: int) -> None:
    maker = Maker(seed)
    kernel = maker.kernel()
    rng = np.random.default_rng(seed)
    inputs: list[np.ndarray] = []
    for elem, dtype in DTYPES.items():
        count = TASKS * maker.lanes
        if elem.kind == "float":
            inputs.append((rng.standard_normal(count) * 4).astype(dtype))
        else:
            limits = np.iinfo(dtype)
            inputs.append(rng.integers(limits.min, limits.max, count, dtype, endpoint=True))
    check(kernel, *inputs, *(np.zeros_like(x) for x in inputs))
