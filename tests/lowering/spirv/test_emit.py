"""Emitted modules: valid by SPIRV-Tools, with exactly the capabilities that they use."""

from __future__ import annotations

import dataclasses

import pytest

from vkjit.errors import InternalError
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import BarrierScope, Kernel, MatLayout
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
    CmpOp,
    ConvertOp,
    MatType,
    MatUse,
    ScalarType,
    Space,
    UnOp,
    VecType,
)
from vkjit.lowering.spirv import tables
from vkjit.lowering.spirv.emit import FLOAT_MODES, emit
from vkjit.lowering.spirv.grammar import Capability, Decoration, ExecutionMode, Op
from vkjit.lowering.spirv.module import float_bits
from vkjit.lowering.spirv.validate import disassemble, validate
from vkjit.lowering.target import ALL_SCALARS, MINIMAL_GPU, Addressing, Target

MODES = list(Addressing)
FULL = dataclasses.replace(MINIMAL_GPU, storage=ALL_SCALARS, arithmetic=ALL_SCALARS)


def target(addressing: Addressing, *features: str) -> Target:
    return dataclasses.replace(FULL, addressing=addressing, features=frozenset(features))


def instructions(words) -> list[tuple[Op, tuple[int, ...]]]:
    """All instructions with their operands."""
    found, at = [], 5
    while at < len(words):
        size = words[at] >> 16
        found.append((Op(words[at] & 0xFFFF), tuple(words[at + 1 : at + size])))
        at += size
    return found


def capabilities(words) -> set[str]:
    return {Capability(o[0]).name for op, o in instructions(words) if op is Op.Capability}


def extensions(words) -> set[str]:
    def text(operands: tuple[int, ...]) -> str:
        return b"".join(w.to_bytes(4, "little") for w in operands).rstrip(b"\0").decode()

    return {text(o) for op, o in instructions(words) if op is Op.Extension}


def count(words, op: Op) -> int:
    return sum(found is op for found, _ in instructions(words))


def add_one(elem: ScalarType = F32) -> Kernel:
    b = Builder("add_one")
    x = b.buffer("x", elem, 64, Access.READ)
    y = b.buffer("y", elem, 64, Access.WRITE)
    i = b.add(b.scaled(b.workgroup_id(), 32), b.local_id())
    b.store(y, i, b.add(b.load(x, i), b.const(elem, 1)))
    return b.finish((2, 1, 1), (32, 1, 1), origin=("add at model.py:3",))


def copy(elem: ScalarType, lanes: int, step: int = 4) -> Kernel:
    b = Builder("copy")
    x = b.buffer("x", elem, 64, Access.READ)
    y = b.buffer("y", elem, 64, Access.WRITE)
    i = b.scaled(b.local_id(), step)
    b.store(y, i, b.load(x, i, lanes))
    return b.finish((1, 1, 1), (8, 1, 1))


def widen(elem: ScalarType, wide: ScalarType, op: ConvertOp) -> Kernel:
    b = Builder("widen")
    x = b.buffer("x", elem, 8, Access.READ)
    y = b.buffer("y", wide, 8, Access.WRITE)
    i = b.local_id()
    b.store(y, i, b.convert(op, b.load(x, i), wide))
    return b.finish((1, 1, 1), (8, 1, 1))


def rounded(elem: ScalarType) -> Kernel:
    """f32 to a narrower float and back, which no buffer holds."""
    b = Builder("rounded")
    x = b.buffer("x", F32, 8, Access.READ_WRITE)
    narrow = b.convert(ConvertOp.FLOAT, b.load(x, b.local_id()), elem)
    b.store(x, b.local_id(), b.convert(ConvertOp.FLOAT, narrow, F32))
    return b.finish((1, 1, 1), (8, 1, 1))


def reversed_through_shared() -> Kernel:
    b = Builder("reverse")
    x = b.buffer("x", F32, 8, Access.READ_WRITE)
    s = b.scratch("s", F32, 8, Space.SHARED)
    i = b.local_id()
    b.store(s, i, b.load(x, i))
    b.barrier()
    b.store(x, i, b.load(s, b.sub(b.index(7), i)))
    return b.finish((1, 1, 1), (8, 1, 1))


def subgroup_kernel(op: BinOp, elem: ScalarType) -> Kernel:
    b = Builder("subgroup")
    x = b.buffer("x", elem, 8, Access.READ)
    y = b.buffer("y", elem, 8, Access.WRITE)
    i = b.local_id()
    total = b.subgroup_reduce(op, b.load(x, i))
    b.barrier(BarrierScope.SUBGROUP)
    b.store(y, i, b.subgroup_shuffle(total, 1))
    return b.finish((1, 1, 1), (8, 1, 1))


def coop(elem: ScalarType, acc: ScalarType) -> Kernel:
    b = Builder("coop")
    a = b.buffer("a", elem, 64, Access.READ)
    w = b.buffer("w", elem, 64, Access.READ)
    c = b.buffer("c", acc, 64, Access.WRITE)
    s = b.scratch("s", acc, 64, Space.SHARED)
    eight = b.index(8)
    total = b.mat_fill(MatType(acc, 8, 8, MatUse.ACC))
    with b.loop(b.index(0), eight, eight, carried=(total,)) as loop:
        ma = b.mat_load(a, loop.index, eight, MatLayout.ROW, MatType(elem, 8, 8, MatUse.A))
        mw = b.mat_load(w, b.index(0), eight, MatLayout.COLUMN, MatType(elem, 8, 8, MatUse.B))
        loop.yields(b.mat_mul_add(ma, mw, loop.carried[0]))
    b.mat_store(s, b.index(0), eight, MatLayout.ROW, loop.results[0])
    b.barrier()
    b.store(c, b.local_id(), b.load(s, b.local_id()))
    return b.finish((1, 1, 1), (8, 1, 1))


def atomics(elem: ScalarType) -> Kernel:
    b = Builder("atomics")
    x = b.buffer("x", elem, 1, Access.READ_WRITE)
    b.atomic_add(x, b.index(0), b.const(elem, 1))
    return b.finish((1, 1, 1), (8, 1, 1))


BASE = {"Shader"}
EXACT = [
    ("f32", add_one(F32), BASE, set()),
    ("f64", add_one(F64), BASE | {"Float64"}, set()),
    ("i64", add_one(I64), BASE | {"Int64"}, set()),
    ("f16", add_one(F16), BASE | {"Float16", "StorageBuffer16BitAccess"}, set()),
    ("i8", add_one(I8), BASE | {"Int8", "StorageBuffer8BitAccess"}, set()),
    ("copy f16", copy(F16, 4), BASE | {"StorageBuffer16BitAccess"}, set()),
    ("copy bf16", copy(BF16, 2), BASE | {"StorageBuffer16BitAccess"}, set()),
    ("copy i8", copy(I8, 1), BASE | {"StorageBuffer8BitAccess"}, set()),
    ("f16 to f32", widen(F16, F32, ConvertOp.FLOAT), BASE | {"StorageBuffer16BitAccess"}, set()),
    ("f32 to f16 and back", rounded(F16), BASE | {"Float16"}, set()),
    ("i8 to i32", widen(I8, I32, ConvertOp.SEXT), BASE | {"StorageBuffer8BitAccess"}, set()),
    (
        "i16 to f32",
        widen(I16, F32, ConvertOp.SINT_TO_FLOAT),
        BASE | {"StorageBuffer16BitAccess", "Int16"},
        set(),
    ),
    ("shared", reversed_through_shared(), BASE, set()),
    (
        "subgroup sum",
        subgroup_kernel(BinOp.ADD, F32),
        BASE | {"GroupNonUniform", "GroupNonUniformArithmetic", "GroupNonUniformShuffle"},
        set(),
    ),
    (
        "subgroup max with NaN",
        subgroup_kernel(BinOp.MAX, F32),
        BASE
        | {
            "GroupNonUniform",
            "GroupNonUniformArithmetic",
            "GroupNonUniformShuffle",
            "GroupNonUniformVote",
        },
        set(),
    ),
    ("atomic i32", atomics(I32), BASE, set()),
    (
        "atomic i64",
        atomics(I64),
        BASE | {"Int64", "Int64Atomics"},
        set(),
    ),
    (
        "atomic f32",
        atomics(F32),
        BASE | {"AtomicFloat32AddEXT"},
        {"SPV_EXT_shader_atomic_float_add"},
    ),
    (
        "coop f16",
        coop(F16, F32),
        BASE | {"CooperativeMatrixKHR", "VulkanMemoryModel", "Float16", "StorageBuffer16BitAccess"},
        {"SPV_KHR_cooperative_matrix"},
    ),
    (
        "coop bf16",
        coop(BF16, F32),
        BASE
        | {
            "CooperativeMatrixKHR",
            "VulkanMemoryModel",
            "BFloat16TypeKHR",
            "BFloat16CooperativeMatrixKHR",
            "StorageBuffer16BitAccess",
        },
        {"SPV_KHR_cooperative_matrix", "SPV_KHR_bfloat16"},
    ),
    (
        "coop i8",
        coop(I8, I32),
        BASE | {"CooperativeMatrixKHR", "VulkanMemoryModel", "Int8", "StorageBuffer8BitAccess"},
        {"SPV_KHR_cooperative_matrix"},
    ),
]


@pytest.mark.parametrize("addressing", MODES, ids=lambda m: m.value)
@pytest.mark.parametrize(
    ("kernel", "wanted", "wanted_extensions"), [c[1:] for c in EXACT], ids=[c[0] for c in EXACT]
)
def test_capabilities_and_extensions_are_exact(kernel, wanted, wanted_extensions, addressing):
    words = emit(kernel, target(addressing))
    validate(words)
    if addressing is Addressing.DEVICE_ADDRESS:
        narrow = {F16: "Float16", BF16: "Int16", I16: "Int16", I8: "Int8"}
        wanted = wanted | {"PhysicalStorageBufferAddresses"}
        wanted |= {narrow[b.elem] for b in kernel.buffers if b.elem in narrow}
    assert capabilities(words) == wanted
    assert extensions(words) == wanted_extensions


@pytest.mark.parametrize("addressing", MODES, ids=lambda m: m.value)
@pytest.mark.parametrize("op", [op for op in UnOp if op not in tables.UNEXPANDED])
def test_every_unary_operation_is_valid(op: UnOp, addressing: Addressing):
    is_int = op in (UnOp.NOT, UnOp.POPCOUNT, UnOp.CLZ)
    for lanes in (1, 2, 3, 4):
        b = Builder("unary")
        x = b.buffer("x", I32 if is_int else F32, 64, Access.READ_WRITE)
        i = b.scaled(b.local_id(), 4)
        b.store(x, i, b.unary(op, b.load(x, i, lanes)))
        validate(emit(b.finish((1, 1, 1), (8, 1, 1)), target(addressing)))


@pytest.mark.parametrize("op", list(BinOp))
@pytest.mark.parametrize("lanes", [1, 4])
def test_every_binary_operation_is_valid(op: BinOp, lanes: int):
    ints = op in tables.INT_BINARY or op in tables.GLSL_INT_BINARY or op is BinOp.REM_S
    floats = op in tables.FLOAT_BINARY or op in tables.GLSL_FLOAT_BINARY
    floats = floats or op in (BinOp.MIN, BinOp.MAX)
    assert ints or floats
    for elem in [I32] * ints + [F32] * floats:
        b = Builder("binary")
        x = b.buffer("x", elem, 64, Access.READ_WRITE)
        i = b.scaled(b.local_id(), 4)
        value = b.load(x, i, lanes)
        b.store(x, i, b.binary(op, value, value))
        validate(emit(b.finish((1, 1, 1), (8, 1, 1)), FULL))


@pytest.mark.parametrize("op", [op for op in tables.SUBGROUP_INT if op is not BinOp.ADD])
def test_every_subgroup_reduction_of_integers_is_valid(op: BinOp):
    validate(emit(subgroup_kernel(op, I32), FULL))


def test_every_comparison_is_valid():
    b = Builder("compare")
    x = b.buffer("x", F32, 8, Access.READ)
    n = b.buffer("n", I32, 8, Access.READ)
    y = b.buffer("y", I32, 8, Access.WRITE)
    i = b.local_id()
    f, k = b.load(x, i), b.load(n, i)
    found = b.const(I1, True)
    for op in CmpOp:
        found = b.binary(BinOp.AND, found, b.compare(op, k, b.index(3)))
        if op in tables.FLOAT_COMPARE:
            found = b.binary(BinOp.XOR, found, b.compare(op, f, b.const(F32, 0.5)))
    found = b.compare(CmpOp.EQ, found, b.unary(UnOp.NOT, found))
    b.store(y, i, b.convert(ConvertOp.ZEXT, found, I32))
    words = emit(b.finish((1, 1, 1), (8, 1, 1)), FULL)
    validate(words)
    assert count(words, Op.Constant) == 5  # 0.5, 3, and 0, 1, 2, which values and members share


@pytest.mark.parametrize("addressing", MODES, ids=lambda m: m.value)
def test_lanes_masks_gather_and_scatter_are_valid(addressing: Addressing):
    b = Builder("lanes")
    x = b.buffer("x", F32, 64, Access.READ)
    y = b.buffer("y", F32, 64, Access.WRITE)
    local = b.scratch("tmp", F32, 16, Space.LOCAL)
    i = b.scaled(b.local_id(), 4)
    index = b.add(b.splat(i, 4), b.iota(4))
    mask = b.compare(CmpOp.LT, index, b.const(VecType(I32, 4), 30))
    gathered = b.load(x, index, mask=mask)
    scalar_mask = b.compare(CmpOp.LT, i, b.index(20))
    whole = b.load(x, i, 4, mask=scalar_mask)
    b.store(local, b.index(0), b.add(gathered, whole))
    low = b.shuffle(gathered, whole, (0, 5))
    swapped = b.insert(b.load(local, b.index(0), 4), b.extract(low, 1), 2)
    total = b.add(b.reduce(BinOp.ADD, swapped), b.reduce(BinOp.MAX, low))
    b.store(y, index, b.add(swapped, b.splat(total, 4)), mask=mask)
    b.store(y, i, total, mask=scalar_mask)
    validate(emit(b.finish((1, 1, 1), (8, 1, 1)), target(addressing)))


def test_nested_control_flow_is_valid():
    b = Builder("nested")
    x = b.buffer("x", F32, 64, Access.READ)
    y = b.buffer("y", F32, 64, Access.WRITE)
    zero = b.const(F32, 0.0)
    with b.loop(b.index(0), b.index(8), carried=(zero, zero), hint="row") as outer:
        branch = b.branch(b.compare(CmpOp.LT, outer.index, b.local_id()), (F32,))
        with branch.then() as region:
            with b.loop(b.index(7), b.index(-1), b.index(-1), carried=(zero,)) as inner:
                inner.yields(b.add(inner.carried[0], b.load(x, inner.index)))
            region.yields = (inner.results[0],)
        with branch.otherwise() as region:
            region.yields = (outer.carried[1],)
        outer.yields(b.add(outer.carried[0], branch.results[0]), outer.carried[0])
    b.store(y, b.local_id(), outer.results[1])
    words = emit(b.finish((1, 1, 1), (8, 1, 1)), FULL)
    validate(words)
    assert count(words, Op.LoopMerge) == 2
    assert count(words, Op.SelectionMerge) == 1


def test_vectors_are_loaded_at_once_only_where_aligned():
    def loads(step: int, addressing: Addressing) -> int:
        words = emit(copy(F32, 4, step), target(addressing))
        validate(words)
        return count(words, Op.Load) - 1 - 3 * (addressing is Addressing.DEVICE_ADDRESS)

    assert loads(4, Addressing.DESCRIPTOR) == 1
    assert loads(2, Addressing.DESCRIPTOR) == 4
    # A physical pointer may point to a vector at any element.
    assert loads(4, Addressing.DEVICE_ADDRESS) == 1
    assert loads(2, Addressing.DEVICE_ADDRESS) == 1


def test_barriers_cover_buffers_only_when_they_carry_data():
    words = emit(reversed_through_shared(), FULL)
    assert "AcquireRelease|UniformMemory|WorkgroupMemory" not in disassemble(words)
    barrier = [o for op, o in instructions(words) if op is Op.ControlBarrier]
    constants = {o[1]: o[2] for op, o in instructions(words) if op is Op.Constant}
    assert [constants[barrier[0][2]]] == [0x148]  # x is read and written in this kernel


def test_float_modes_follow_the_features_of_the_target():
    features = tuple(f"{name}_{t}" for name in FLOAT_MODES for t in ("f16", "f32"))
    words = emit(add_one(F32), target(Addressing.DESCRIPTOR, *features))
    validate(words)
    modes = {
        (ExecutionMode(o[1]).name, o[2])
        for op, o in instructions(words)
        if op is Op.ExecutionMode and o[1] != ExecutionMode.LocalSize
    }
    assert modes == {
        ("SignedZeroInfNanPreserve", 32),
        ("DenormPreserve", 32),
        ("RoundingModeRTE", 32),
    }


def test_disassembly_names_buffers_and_the_origin():
    text = disassemble(emit(add_one(), target(Addressing.DESCRIPTOR)))
    assert '"add at model.py:3"' in text
    assert "%x = OpVariable" in text
    assert "NoContraction" in text


def test_emission_is_deterministic():
    assert emit(coop(F16, F32), FULL) == emit(coop(F16, F32), FULL)


@pytest.mark.parametrize("op", [op for op in UnOp if op in tables.UNEXPANDED])
def test_operations_without_instruction_are_refused(op: UnOp):
    b = Builder("refused")
    x = b.buffer("x", F32, 8, Access.READ_WRITE)
    b.store(x, b.local_id(), b.unary(op, b.load(x, b.local_id())))
    with pytest.raises(InternalError, match=f"{op.value} on f32 has no instruction"):
        emit(b.finish((1, 1, 1), (8, 1, 1)), FULL)


def test_a_broken_module_is_refused_with_its_text():
    words = emit(add_one(), target(Addressing.DESCRIPTOR))
    at = next(i for i, w in enumerate(words) if w == 5 << 16 | Op.FAdd)
    words[at] = 5 << 16 | Op.IAdd
    with pytest.raises(InternalError, match=r"Expected int scalar.*(?s:.)*OpIAdd"):
        validate(words)


def test_floats_round_to_their_pattern():
    assert float_bits(1.0, 16) == 0x3C00
    assert float_bits(1e9, 16) == 0x7C00
    assert float_bits(-1e300, 32) == 0xFF800000
    assert float_bits(-0.0, 64) == 1 << 63


def test_drivers_may_not_rewrite_arithmetic_fma_or_rounding():
    """Products, sums, fma and conversions between floats: all of them are decorated."""
    b = Builder("precise")
    x = b.buffer("x", F32, 8, Access.READ_WRITE)
    value = b.load(x, b.local_id())
    value = b.fma(value, b.add(value, value), b.mul(value, value))
    half = b.convert(ConvertOp.FLOAT, b.binary(BinOp.DIV, value, value), F16)
    b.store(x, b.local_id(), b.convert(ConvertOp.FLOAT, half, F32))
    words = emit(b.finish((1, 1, 1), (8, 1, 1)), FULL)
    decorated = [
        o for op, o in instructions(words) if op is Op.Decorate and o[1] == Decoration.NoContraction
    ]
    assert len(decorated) == 6


@pytest.mark.parametrize(("step", "loads"), [(4, 1), (6, 4)])
def test_shared_memory_is_made_of_vectors_where_all_accesses_are_aligned(
    step: int, loads: int
) -> None:
    b = Builder("shared")
    x = b.buffer("x", F32, 8, Access.READ)
    y = b.buffer("y", F32, 8 * 4, Access.WRITE)
    tile = b.scratch("tile", F32, 8 * 8, Space.SHARED)
    i = b.local_id()
    b.store(tile, b.scaled(i, step), b.load(x, i))
    b.barrier()
    b.store(y, b.scaled(i, 4), b.load(tile, b.scaled(i, step), 4))
    words = emit(b.finish((1, 1, 1), (8, 1, 1)), target(Addressing.DESCRIPTOR))
    validate(words)
    # One load of x, one of the builtin index, and those of the tile.
    assert count(words, Op.Load) == 2 + loads
    assert count(words, Op.CompositeConstruct) == (loads > 1)
