"""The verifier: the facts of good kernels, and a clear message for each kind of fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vkjit.errors import InternalError
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.check import verify
from vkjit.lowering.kernel.nodes import (
    BarrierScope,
    Binary,
    Compare,
    Const,
    Convert,
    Extract,
    Fma,
    Load,
    MatLayout,
    Select,
    Store,
    Unary,
    Value,
)
from vkjit.lowering.kernel.parse import parse
from vkjit.lowering.kernel.types import (
    F16,
    F32,
    F64,
    I1,
    I32,
    I64,
    Access,
    BinOp,
    Buffer,
    CmpOp,
    ConvertOp,
    MatType,
    MatUse,
    Space,
    UnOp,
    VecType,
)

GOOD = """\
kernel sum grid=(4,1,1) workgroup=(32,1,1) index=i32 {
  buffer x: f16[128] r
  buffer y: f32[4] w
  buffer n: i32[4] r
  scratch tile: f32[32] shared
  scratch own: f32[3] local
  %0: i32 = workgroup_id 0
  %1: i32 = local_id 0
  %2: i32 = const 0
  %3: i32 = load n[%0]
  %4: i32 = const 1
  %5: f32 = const 0.0
  for %i.6: i32 in %2..%3 step %4 carry (%c.7: f32 = %5) -> (%r.8: f32) {
    %9: f16 = load x[%1]
    %10: f32 = convert float %9
    store tile[%1], %10
    barrier workgroup
    %11: f32 = add %c.7, %10
    yield %11
  }
  store y[%0], %r.8
}
"""


def test_facts() -> None:
    facts = verify(parse(GOOD))
    assert facts.types == {F16, F32, I32}
    assert facts.storage == {F16, F32, I32}
    assert facts.reads == (True, False, True)
    assert facts.writes == (False, True, False)
    assert (facts.shared_bytes, facts.local_bytes, facts.lanes) == (128, 12, 1)
    assert facts.barriers
    assert (facts.subgroup, facts.coop, facts.atomics) == (False, False, False)


def test_facts_of_subgroups_matrices_and_atomics() -> None:
    b = Builder("f", I32)
    x = b.buffer("x", F32, 64, Access.READ_WRITE)
    type_ = MatType(F32, 8, 8, MatUse.ACC)
    b.mat_store(x, b.index(0), b.index(8), MatLayout.ROW, b.mat_fill(type_))
    b.atomic_add(x, b.lane(), b.const(F32, 1.0))
    facts = verify(b.finish(grid=(1, 1, 1), workgroup=(32, 1, 1)))
    assert facts.subgroup
    assert facts.coop
    assert facts.atomics
    assert facts.reads == facts.writes == (True,)


Body = Callable[[Builder, Buffer, Value], object]


def broken(body: Body, access: Access = Access.READ_WRITE) -> str:
    """The message about a kernel with a faulty body."""
    b = Builder("bad", I32)
    x = b.buffer("x", F32, 64, access)
    value = b.load(x, b.local_id()) if access is not Access.WRITE else b.const(F32, 1.0)
    body(b, x, value)
    with pytest.raises(InternalError) as caught:
        verify(b.finish(grid=(1, 1, 1), workgroup=(32, 1, 1)))
    return str(caught.value)


def put(b: Builder, node: object) -> None:
    b._append(node)  # type: ignore[arg-type]


def whole(b: Builder) -> Value:
    return b.const(I32, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda b, v: Binary(BinOp.ADD, v, whole(b)), "expected f32"),
        (lambda b, v: Binary(BinOp.AND, v, v), "operands of type f32, expected bool or int"),
        (lambda b, v: Binary(BinOp.DIV, whole(b), whole(b)), "expected float"),
        (lambda b, _: Unary(UnOp.EXP, whole(b)), "operands of type i32, expected float"),
        (lambda _, v: Unary(UnOp.CLZ, v), "operands of type f32, expected int"),
        (lambda b, v: Fma(v, v, whole(b)), "operands of types f32, f32, i32"),
        (lambda _, v: Compare(CmpOp.LT_U, v, v), "operands of type f32, expected int"),
        (lambda b, v: Select(whole(b), v, v), "condition of type i32, expected i1"),
        (lambda _, v: Convert(ConvertOp.SEXT, v, I64), "sext from f32 to i64"),
        (lambda b, _: Convert(ConvertOp.ZEXT, whole(b), I32), "expected a wider int"),
        (lambda b, _: Convert(ConvertOp.TRUNC, whole(b), I64), "expected a narrower int"),
        (lambda b, v: Extract(b.splat(v, 4), 4), "lane 4 of vec<f32,4>"),
        (lambda _, v: Const(VecType(F32, 2), (1.0, 2.0, 3.0)), "3 constants for vec<f32,2>"),
        (lambda _, v: Const(I32, 1.5), "constant 1.5 of type i32"),
        (lambda _, v: Const(I32, 1 << 32), "constant 4294967296 of type i32"),
        (lambda b, _: Load(b.kernel.buffers[0], b.const(I64, 0), F32), "index of type i64"),
        (lambda b, _: Load(b.kernel.buffers[0], whole(b), F64), "f64 in x, which holds f32"),
        (
            lambda b, _: Load(b.kernel.buffers[0], whole(b), VecType(F32, 4), b.const(I1, True)),
            "mask of type i1, expected vec<i1,4>",
        ),
        (lambda b, v: Store(b.kernel.buffers[0], b.iota(4), v), "index of type vec<i32,4> for f32"),
    ],
)
def test_operand_types(make: Callable[[Builder, Value], object], message: str) -> None:
    assert message in broken(lambda b, _, v: put(b, make(b, v)))


def test_a_value_from_another_kernel() -> None:
    other = Builder("other", I32).const(F32, 1.0)
    message = broken(lambda b, _, v: b.add(v, other))
    assert "Binary: uses Const (f32) before or outside its scope; near\n" in message
    assert "f32 = add %" in message


def test_a_value_from_inside_a_loop() -> None:
    def body(b: Builder, x: Buffer, v: Value) -> None:
        with b.loop(b.index(0), b.index(4)) as loop:
            inner = b.add(v, v)
            loop.yields()
        b.store(x, b.index(0), inner)

    assert "Store: uses Binary (f32) before or outside its scope" in broken(body)


def test_yields_must_match_what_is_carried() -> None:
    def body(b: Builder, x: Buffer, v: Value) -> None:
        with b.loop(b.index(0), b.index(4), carried=[v]) as loop:
            loop.yields(loop.index)

    assert "For: yields [i32], expected [f32]" in broken(body)


def test_a_branch_without_yields() -> None:
    def body(b: Builder, x: Buffer, v: Value) -> None:
        b.branch(b.const(I1, True), [F32])

    assert "If: yields [], expected [f32]" in broken(body)


def test_rights_of_buffers() -> None:
    def store(b: Builder, x: Buffer, v: Value) -> None:
        b.store(x, b.index(0), v)

    assert "writes buffer x, which is read only" in broken(store, Access.READ)

    def load(b: Builder, x: Buffer, _: Value) -> None:
        b.load(x, b.index(0))

    assert "reads buffer x, which is write only" in broken(load, Access.WRITE)


def test_memory_of_another_kernel() -> None:
    other = Builder("other", I32).scratch("away", F32, 4)
    message = broken(lambda b, _, v: b.store(other, b.index(0), v))
    assert "away is not among the buffers and scratch" in message


def test_more_lanes_than_the_target_has() -> None:
    b = Builder("wide", I32)
    x = b.buffer("x", F32, 64, Access.READ_WRITE)
    b.store(x, b.index(0), b.load(x, b.index(8), lanes=8))
    kernel = b.finish(grid=(1, 1, 1))
    assert verify(kernel).lanes == 8
    with pytest.raises(InternalError, match="vec<f32,8>, expected at most 4 lanes"):
        verify(kernel, max_lanes=4)


def barrier_under(cond: Callable[[Builder], Value], scope: BarrierScope) -> Body:
    def body(b: Builder, x: Buffer, v: Value) -> None:
        with b.branch(b.compare(CmpOp.LT, cond(b), b.index(3))).then():
            b.barrier(scope)

    return body


@pytest.mark.parametrize(
    ("cond", "scope"),
    [
        (lambda b: b.local_id(), BarrierScope.WORKGROUP),
        (lambda b: b.subgroup_id(), BarrierScope.WORKGROUP),
        (lambda b: b.lane(), BarrierScope.SUBGROUP),
        (
            lambda b: b.load(b.scratch("s", I32, 1, Space.SHARED), b.index(0)),
            BarrierScope.WORKGROUP,
        ),
    ],
)
def test_a_barrier_that_some_may_skip(
    cond: Callable[[Builder], Value], scope: BarrierScope
) -> None:
    assert f"barrier {scope.value} inside a loop or branch" in broken(barrier_under(cond, scope))


@pytest.mark.parametrize(
    ("cond", "scope"),
    [
        (lambda b: b.workgroup_id(), BarrierScope.WORKGROUP),
        (lambda b: b.subgroup_id(), BarrierScope.SUBGROUP),
        (lambda b: b.load(b.buffer("n", I32, 1, Access.READ), b.index(0)), BarrierScope.WORKGROUP),
        (lambda b: b.local_id(1), BarrierScope.WORKGROUP),
    ],
)
def test_a_barrier_that_all_reach(cond: Callable[[Builder], Value], scope: BarrierScope) -> None:
    b = Builder("good", I32)
    x = b.buffer("x", F32, 64, Access.READ_WRITE)
    barrier_under(cond, scope)(b, x, b.const(F32, 0.0))
    assert verify(b.finish(grid=(1, 1, 1), workgroup=(32, 1, 1))).barriers


def test_a_carried_value_becomes_different_in_the_second_iteration() -> None:
    def body(b: Builder, x: Buffer, v: Value) -> None:
        with b.loop(b.index(0), b.index(4), carried=[b.index(0)]) as loop:
            with b.branch(b.compare(CmpOp.EQ, loop.carried[0], b.index(0))).then():
                b.barrier()
            loop.yields(b.local_id())

    assert "barrier workgroup inside a loop or branch" in broken(body)
