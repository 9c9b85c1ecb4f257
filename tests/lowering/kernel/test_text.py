"""The text form: golden samples, exact constants, and the round trip of random kernels."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings

from tests.lowering.kernel.strategies import kernels
from vkjit.errors import InternalError
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.check import verify
from vkjit.lowering.kernel.nodes import Kernel, MatLayout
from vkjit.lowering.kernel.parse import parse, parse_type
from vkjit.lowering.kernel.text import text
from vkjit.lowering.kernel.types import (
    F16,
    F32,
    I1,
    I32,
    I64,
    Access,
    BinOp,
    CmpOp,
    ConvertOp,
    MatType,
    MatUse,
    UnOp,
    VecType,
)

LOOP = """\
kernel add_one grid=(1024,1,1) workgroup=(1,1,1) index=i64 {
  origin "add a.py:1"
  buffer x: f32[1024] r
  buffer y: f32[1024] w
  %0: i64 = workgroup_id 0
  %1: i64 = const 0
  %2: i64 = const 8
  %3: f32 = const 0.0
  %4: i64 = const 1
  for %i.5: i64 in %1..%2 step %4 carry (%c.6: f32 = %3) -> (%r.7: f32) {
    %8: f32 = load x[%0]
    %9: f32 = add %c.6, %8
    yield %9
  }
  store y[%0], %r.7
}
"""


def add_one() -> Kernel:
    b = Builder("add_one", index_type=I64)
    x = b.buffer("x", F32, 1024, Access.READ)
    y = b.buffer("y", F32, 1024, Access.WRITE)
    i = b.workgroup_id()
    with b.loop(b.index(0), b.index(8), carried=(b.const(F32, 0.0),)) as loop:
        loop.yields(b.add(loop.carried[0], b.load(x, i)))
    b.store(y, i, loop.results[0])
    return b.finish(grid=(1024, 1, 1), origin=("add a.py:1",))


def everything() -> Kernel:
    """One of each node that the loop above does not show."""
    b = Builder("all", index_type=I32)
    x = b.buffer("x", F32, 64, Access.READ_WRITE)
    h = b.buffer("h", F16, 256, Access.READ)
    tile = b.scratch("tile", F32, 64)
    i, one = b.local_id(), b.index(1)
    v = b.load(x, b.iota(4), mask=b.const(VecType(I1, 4), (True, False, True, True)))  # type: ignore[arg-type]
    v = b.shuffle(b.insert(v, b.extract(v, 1), 0), v, (0, 5, 2, 7))
    s = b.fma(b.reduce(BinOp.ADD, v), b.unary(UnOp.EXP, b.load(x, i)), b.const(F32, -0.0))
    whole = b.convert(ConvertOp.SINT_TO_FLOAT, i, F32)
    s = b.select(b.compare(CmpOp.LT_U, i, one), s, b.bitcast(b.bitcast(whole, I32), F32))
    s = b.subgroup_shuffle(b.subgroup_reduce(BinOp.MAX, s), 1)
    b.store(tile, b.lane(), s)
    b.barrier()
    with b.branch(b.compare(CmpOp.EQ, i, one)).then():
        b.atomic_add(x, b.subgroup_id(), s)
    left, right = MatType(F16, 8, 8, MatUse.A), MatType(F16, 8, 8, MatUse.B)
    stride = b.index(8)
    a = b.mat_load(h, one, stride, MatLayout.ROW, left)
    c = b.mat_load(h, one, stride, MatLayout.COLUMN, right)
    made = b.mat_mul_add(a, c, b.mat_fill(MatType(F16, 8, 8, MatUse.ACC)))
    wide = b.mat_convert(made, MatType(F32, 8, 8, MatUse.ACC))
    b.mat_store(x, b.index(0), stride, MatLayout.ROW, wide)
    b.store(x, i, b.extract(b.splat(s, 4), 2), mask=b.const(I1, True))
    kernel = b.finish(grid=(1, 1, 1), workgroup=(32, 1, 1))
    kernel.subgroup = 32
    return kernel


def test_the_text_of_a_loop() -> None:
    assert text(add_one()) == LOOP


def test_a_loop_reads_back() -> None:
    assert text(parse(LOOP)) == LOOP


def test_every_node_reads_back() -> None:
    source = text(everything())
    assert text(parse(source)) == source


@settings(max_examples=60, deadline=None)
@given(kernels())
def test_random_kernels_read_back(kernel: Kernel) -> None:
    verify(kernel)
    source = text(kernel)
    again = parse(source)
    assert text(again) == source
    assert verify(again) == verify(kernel)


@pytest.mark.parametrize("value", [math.inf, -math.inf, -0.0, 1e-45, 3.4028234663852886e38, 0.1])
def test_floats_read_back_to_the_same_bits(value: float) -> None:
    b = Builder("c")
    x = b.buffer("x", F32, 1, Access.WRITE)
    b.store(x, b.index(0), b.const(F32, value))
    again = parse(text(b.finish(grid=(1, 1, 1))))
    found = [n.value for n in again.body.nodes if getattr(n, "type", None) is F32]  # type: ignore[union-attr]
    assert repr(found) == repr([value])


def test_nan_reads_back() -> None:
    b = Builder("c")
    x = b.buffer("x", F32, 1, Access.WRITE)
    b.store(x, b.index(0), b.const(F32, math.nan))
    source = text(b.finish(grid=(1, 1, 1)))
    assert "const nan" in source
    assert text(parse(source)) == source


def test_types_read_back() -> None:
    for type_ in (F32, VecType(F16, 8), MatType(F16, 16, 8, MatUse.B)):
        assert parse_type(str(type_)) == type_


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("add %c.6, %8", "add %c.6, %77", "%77 is not defined"),
        ("load x[%0]", "fetch x[%0]", "no operation 'fetch'"),
        ("%9: f32", "%9: f64", "the operands give f32, not f64"),
        ("store y", "keep y", "no such statement"),
    ],
)
def test_a_wrong_line_is_named(old: str, new: str, message: str) -> None:
    with pytest.raises(InternalError, match=r"parse: line \d+: " + message):
        parse(LOOP.replace(old, new))
