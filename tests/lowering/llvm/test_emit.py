"""The LLVM text of plans: what is shared, what is told apart, and what is refused."""

from __future__ import annotations

import re

import pytest

from vkjit.errors import InternalError
from vkjit.lowering.artifact import Copy, Launch, Plan, PlannedBuffer, Range, Role
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Kernel
from vkjit.lowering.kernel.types import (
    F32,
    F64,
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
from vkjit.lowering.llvm import spelling
from vkjit.lowering.llvm.module import emit
from vkjit.lowering.target import MINIMAL_GPU, REFERENCE


def add(name: str = "add", length: int = 16) -> Kernel:
    b = Builder(name, index_type=I64)
    x = b.buffer("x", F32, length, Access.READ)
    z = b.buffer("z", F32, length, Access.WRITE)
    i = b.index(0)
    value = b.load(x, i, length)
    b.store(z, i, b.add(value, value))
    return b.finish((1, 1, 1))


def plan(*steps: Launch | Copy, donated: int | None = None) -> Plan:
    """Two inputs and two outputs of 1 KiB; the first output may take over an input."""
    buffers = (
        PlannedBuffer(Role.INPUT, 1024, 0),
        PlannedBuffer(Role.INPUT, 1024, 1),
        PlannedBuffer(Role.OUTPUT, 1024, 0, donated),
        PlannedBuffer(Role.OUTPUT, 1024, 1),
    )
    return Plan("p", buffers, steps, frozenset(), 4096)


def at(buffer: int, offset: int = 0, size: int = 64) -> Range:
    return Range(buffer, offset, size)


def functions(text: str) -> list[str]:
    return re.findall(r"define internal void @(\w+)", text)


def test_a_kernel_as_text() -> None:
    text = emit(plan(Launch(add(length=4), (at(0), at(2)))), REFERENCE)
    body = text[text.index("define internal") : text.index("define void @run")]
    assert body == (
        "define internal void @k0(ptr noalias readonly %args, i64 %begin, i64 %end) #0 {\n"
        "entry:\n"
        "  %v0 = getelementptr inbounds ptr, ptr %args, i64 0\n"
        "  %v1 = load ptr, ptr %v0, align 8, !invariant.load !0, !nonnull !0, !noundef !0, "
        "!dereferenceable !{i64 16}\n"
        "  %v2 = getelementptr inbounds ptr, ptr %args, i64 1\n"
        "  %v3 = load ptr, ptr %v2, align 8, !invariant.load !0, !nonnull !0, !noundef !0, "
        "!dereferenceable !{i64 16}\n"
        "  br label %task\n"
        "task:\n"
        "  %t = phi i64 [ %begin, %entry ], [ %t.next, %done ]\n"
        "  %v4 = getelementptr inbounds float, ptr %v1, i64 0\n"
        "  %v5 = load <4 x float>, ptr %v4, align 4, !alias.scope !6, !noalias !7\n"
        "  %v6 = fadd <4 x float> %v5, %v5\n"
        "  %v7 = getelementptr inbounds float, ptr %v3, i64 0\n"
        "  store <4 x float> %v6, ptr %v7, align 4, !alias.scope !9, !noalias !10\n"
        "  br label %done\n"
        "done:\n"
        "  %t.next = add nuw nsw i64 %t, 1\n"
        "  %more = icmp slt i64 %t.next, %end\n"
        "  br i1 %more, label %task, label %exit\n"
        "exit:\n"
        "  ret void\n"
        "}\n"
    )


def test_equal_kernels_are_one_function() -> None:
    steps = (
        Launch(add("first"), (at(0), at(2))),
        Launch(add("second"), (at(1), at(3))),
        Launch(add("third", 8), (at(1), at(3, 512))),
    )
    text = emit(plan(*steps), REFERENCE)
    assert functions(text) == ["k0", "k1"]
    assert "first" not in text  # names are for people: equal plans are one cache entry
    assert len(re.findall(r"ptr @k0, i64 1, ", text)) == 2


def scopes(text: str) -> set[str]:
    return set(re.findall(r"!alias\.scope (!\d+)", text))


def test_arguments_that_share_memory_share_a_scope() -> None:
    apart = emit(plan(Launch(add(), (at(2, 0), at(2, 64)))), REFERENCE)
    overlapping = emit(plan(Launch(add(), (at(2, 0), at(2, 32)))), REFERENCE)
    assert len(scopes(apart)) == 2
    assert len(scopes(overlapping)) == 1


def test_an_output_that_takes_over_an_input_shares_its_scope() -> None:
    launch = Launch(add(), (at(1), at(2)))
    assert len(scopes(emit(plan(launch), REFERENCE))) == 2
    assert len(scopes(emit(plan(launch, donated=0), REFERENCE))) == 2
    assert len(scopes(emit(plan(launch, donated=1), REFERENCE))) == 1


def test_both_forms_of_a_kernel_may_be_needed() -> None:
    kernel = add()
    steps = (Launch(kernel, (at(0), at(2))), Launch(kernel, (at(2), at(2))))
    assert functions(emit(plan(*steps), REFERENCE)) == ["k0", "k1"]


def test_steps_are_tables() -> None:
    text = emit(plan(Copy(at(0, 128), at(3, 64)), Launch(add(), (at(0), at(2)))), REFERENCE)
    assert (
        "[2 x { ptr, i64, i64, i64 }] [{ ptr, i64, i64, i64 } { ptr inttoptr (i64 0 to ptr), "
        "i64 64, i64 0, i64 2 }, "
        "{ ptr, i64, i64, i64 } { ptr @k0, i64 1, i64 2, i64 2 }]"
    ) in text
    assert (
        "[4 x [2 x i64]] [[2 x i64] [i64 0, i64 128], [2 x i64] [i64 3, i64 64], "
        "[2 x i64] [i64 0, i64 0], [2 x i64] [i64 2, i64 0]]"
    ) in text


def test_what_a_cpu_cannot_run_is_refused() -> None:
    matrix = Builder("matrix", index_type=I64)
    matrix.mat_fill(MatType(F32, 8, 8, MatUse.ACC))
    group = Builder("group", index_type=I64).finish((1, 1, 1), (64, 1, 1))
    for kernel, message in (
        (matrix.finish((1, 1, 1)), "MatFill in matrix"),
        (group, r"group has workgroups of \(64, 1, 1\)"),
    ):
        with pytest.raises(InternalError, match=message):
            emit(plan(Launch(kernel, ())), REFERENCE)
    with pytest.raises(InternalError, match="gets 32 bytes"):
        emit(plan(Launch(add(), (at(0, size=32), at(2)))), REFERENCE)
    with pytest.raises(InternalError, match="minimal-gpu is a gpu"):
        emit(plan(), MINIMAL_GPU)


def test_values_must_stand_before_their_uses() -> None:
    b = Builder("wrong", index_type=I64)
    z = b.buffer("z", F32, 16, Access.WRITE)
    with b.loop(b.index(0), b.index(4)) as loop:
        inside = b.convert(ConvertOp.SINT_TO_FLOAT, loop.index, F32)
        loop.yields()
    b.store(z, b.index(0), inside)
    kernel = b.finish((1, 1, 1))
    kernel.body.nodes[:0] = [kernel.body.nodes.pop()]  # the store first
    with pytest.raises(InternalError, match="used before it is computed in wrong"):
        emit(plan(Launch(kernel, (at(2),))), REFERENCE)


def test_every_operation_has_a_spelling() -> None:
    own = {UnOp.NEG, UnOp.NOT, UnOp.CLZ, UnOp.RSQRT}
    expanded = {UnOp.ERF_INV}  # by legalize, in every type
    assert set(spelling.UNARY_INTRINSICS) | set(spelling.LIBM_UNARY) | own | expanded == set(UnOp)
    for op in BinOp:
        named = op in spelling.BINARY_INTRINSICS or op in spelling.LIBM_BINARY
        instruction = spelling.binary_opcode(op, F32) or spelling.binary_opcode(op, I32)
        assert named != (instruction is not None), op
    for op in CmpOp:
        assert spelling.compare_opcode(op, I32).startswith("icmp ")
    for op in ConvertOp:
        assert spelling.convert_opcode(op, F32, F64)
    with pytest.raises(InternalError, match="unsigned comparison"):
        spelling.compare_opcode(CmpOp.LT_U, F32)
    with pytest.raises(InternalError, match="reduction by sub"):
        spelling.reduction(BinOp.SUB, VecType(F32, 4))


@pytest.mark.parametrize(
    ("type_", "value", "text"),
    [
        (F32, 0.1, "0x3FB99999A0000000"),
        (F64, 0.1, "0x3FB999999999999A"),
        (F32, float("-inf"), "0xFFF0000000000000"),
        (F32, 1e60, "0x7FF0000000000000"),
        (I32, 0xFFFFFFFF, "-1"),
        (I1, True, "true"),
        (VecType(I32, 3), (1, 2, 3), "<i32 1, i32 2, i32 3>"),
        (VecType(F32, 8), 1.0, "splat (float 0x3FF0000000000000)"),
    ],
)
def test_constants(type_: object, value: object, text: str) -> None:
    assert spelling.constant(type_, value) == text  # pyright: ignore[reportArgumentType]
