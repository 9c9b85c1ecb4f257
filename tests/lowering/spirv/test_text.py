"""The disassembler: what SPIRV-Tools prints, without SPIRV-Tools; source names and lines."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from hypothesis import given

from tests.lowering.kernel.strategies import kernels
from vkjit.errors import InternalError
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Kernel
from vkjit.lowering.kernel.types import BF16, F16, F32, F64, Access, ScalarType
from vkjit.lowering.legalize import legalize
from vkjit.lowering.spirv.emit import emit
from vkjit.lowering.spirv.grammar import MAGIC, Op
from vkjit.lowering.spirv.operands import OPERANDS
from vkjit.lowering.spirv.text import text
from vkjit.lowering.spirv.validate import disassemble, validate
from vkjit.lowering.target import ALL_SCALARS, MINIMAL_GPU, Addressing

ORIGIN = ("exp at model.py:12", "mul at model.py:14", "result")


def scaled() -> Kernel:
    """Y = sum of 4 halves of x."""
    b = Builder("scaled")
    x = b.buffer("x", F32, 64, Access.READ)
    y = b.buffer("y", F32, 64, Access.WRITE)
    i = b.add(b.scaled(b.workgroup_id(), 32), b.local_id())
    with b.loop(b.index(0), b.index(4), carried=[b.const(F32, 0.0)], hint="k") as loop:
        half = b.mul(b.load(x, i), b.const(F32, 0.5))
        loop.yields(b.add(loop.carried[0], half))
    b.store(y, i, loop.results[0])
    return b.finish((2, 1, 1), (32, 1, 1), origin=ORIGIN)


FULL = replace(
    MINIMAL_GPU,
    storage=ALL_SCALARS,
    arithmetic=ALL_SCALARS - {BF16},
    addressing=Addressing.DESCRIPTOR,
    features=frozenset({"signed_zero_inf_nan_preserve_f32"}),
)


def same_as_the_tool(words: array[int]) -> None:
    assert lines(text(words, names=False)) == lines(disassemble(words, names=False))


def lines(found: str) -> list[str]:
    return [line.rstrip() for line in found.splitlines()]


@given(kernels())
def test_random_kernels_read_as_the_tool_prints_them(kernel: Kernel) -> None:
    same_as_the_tool(emit(legalize(kernel, FULL), FULL))


@pytest.mark.parametrize("addressing", list(Addressing), ids=lambda mode: mode.value)
def test_kernels_with_origin_are_valid_and_read_as_the_tool_prints_them(addressing: Addressing):
    words = emit(scaled(), replace(FULL, addressing=addressing))
    validate(words)
    same_as_the_tool(words)
    found = text(words)
    assert 'OpString "exp at model.py:12"' in found
    assert 'OpString "model.py"' in found
    assert found.count("OpLine %") == found.count("OpLabel")
    assert " 12 0" in found
    for name in ("%scaled = OpFunction %void None", "%k = OpPhi %uint", "%v3uint = OpTypeVector"):
        assert name in found


NUMBERS = (0.0, -0.0, 1.0, 0.1, -2.5e-38, 3e38, 1e-45, -1e-40, float("inf"), float("-inf"), 65504.0)


@pytest.mark.parametrize("elem", [F16, F32, F64], ids=repr)
def test_numbers_read_as_the_tool_prints_them(elem: ScalarType) -> None:
    b = Builder("numbers")
    y = b.buffer("y", elem, 64, Access.WRITE)
    for place, number in enumerate((*NUMBERS, float("nan"))):
        b.store(y, b.index(place), b.const(elem, number))
    same_as_the_tool(emit(b.finish((1, 1, 1), (1, 1, 1)), FULL))


def test_golden() -> None:
    found = text(emit(scaled(), FULL))
    body = found[found.index("     %scaled = OpFunction") :]
    assert body == GOLDEN


GOLDEN = """\
     %scaled = OpFunction %void None %7
          %8 = OpLabel
               OpLine %5 12 0
         %13 = OpLoad %v3uint %workgroup_id
         %14 = OpCompositeExtract %uint %13 0
         %16 = OpLoad %v3uint %local_id
         %17 = OpCompositeExtract %uint %16 0
         %19 = OpIMul %uint %14 %uint_32
         %20 = OpIAdd %uint %19 %17
               OpBranch %21
         %21 = OpLabel
               OpLine %5 12 0
          %k = OpPhi %uint %uint_0 %8 %46 %23
          %c = OpPhi %float %29 %8 %45 %23
         %35 = OpSLessThan %bool %k %uint_4
               OpLoopMerge %24 %23 None
               OpBranchConditional %35 %22 %24
         %22 = OpLabel
               OpLine %5 12 0
         %41 = OpAccessChain %36 %x %uint_0 %20
         %42 = OpLoad %float %41
         %44 = OpFMul %float %42 %43
         %45 = OpFAdd %float %c %44
               OpBranch %23
         %23 = OpLabel
               OpLine %5 12 0
         %46 = OpIAdd %uint %k %uint_1
               OpBranch %21
         %24 = OpLabel
               OpLine %5 12 0
         %50 = OpAccessChain %36 %y %uint_0 %20
               OpStore %50 %c
               OpReturn
               OpFunctionEnd
"""


def test_every_instruction_has_its_operands() -> None:
    assert set(OPERANDS) == set(Op)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(InternalError, match="no module"):
        text(array("I", [1, 2, 3, 4, 5, 6]))
    head = [MAGIC, 0x10500, 0, 1, 0]
    with pytest.raises(InternalError, match="past the end"):
        text(array("I", [*head, 5 << 16 | Op.Load]))
    with pytest.raises(InternalError, match="opcode 999 is not in the tables"):
        text(array("I", [*head, 1 << 16 | 999]))
    with pytest.raises(InternalError, match="1 words too many"):
        text(array("I", [*head, 2 << 16 | Op.Return, 7]))
