"""Narrow numbers as raw 32-bit words: vectors of words, and matrices in arrays of words."""

from __future__ import annotations

import numpy as np
import pytest

from vkjit.errors import InternalError
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.check import verify
from vkjit.lowering.kernel.interpret import run
from vkjit.lowering.kernel.nodes import Kernel, MatLayout
from vkjit.lowering.kernel.parse import parse
from vkjit.lowering.kernel.text import text
from vkjit.lowering.kernel.types import (
    F16,
    F32,
    I16,
    I32,
    Access,
    MatType,
    MatUse,
    ScalarType,
    Type,
    VecType,
)
from vkjit.lowering.spirv.emit import emit
from vkjit.lowering.spirv.validate import disassemble, validate
from vkjit.lowering.target import ALL_SCALARS, Addressing, Target, TargetKind


def target(addressing: Addressing) -> Target:
    return Target(
        name="words",
        kind=TargetKind.GPU,
        index_type=I32,
        storage=ALL_SCALARS,
        arithmetic=ALL_SCALARS,
        addressing=addressing,
    )


def copies(length: int, stride: int) -> Kernel:
    """Eight halves from ``stride`` times the workgroup, to the eight behind each other."""
    b = Builder("copies")
    x = b.buffer("x", F16, length, Access.READ)
    y = b.buffer("y", F16, 8 * 3, Access.WRITE)
    words = b.load_words(x, b.scaled(b.workgroup_id(), stride), 4)
    b.store(y, b.scaled(b.workgroup_id(), 8), words)
    return b.finish(grid=(3, 1, 1))


def multiplies() -> Kernel:
    """A matrix of halves from shared words, plus itself, to a buffer of words."""
    b = Builder("multiplies")
    x = b.buffer("x", F16, 64, Access.READ)
    y = b.buffer("y", I32, 64, Access.WRITE)
    shared = b.scratch("tile", I32, 8 * 8)
    own = b.scaled(b.local_id(), 8)
    b.store(shared, own, b.load_words(x, own, 4))
    b.barrier()
    type_ = MatType(F16, 8, 8, MatUse.ACC)
    matrix = b.mat_load(shared, b.index(0), b.index(8), MatLayout.ROW, type_)
    b.mat_store(y, b.index(0), b.index(8), MatLayout.ROW, b.add(matrix, matrix))
    kernel = b.finish(grid=(1, 1, 1), workgroup=(8, 1, 1))
    kernel.subgroup = 8
    return kernel


@pytest.mark.parametrize("length", [64, 61])
def test_words_are_the_bits_of_narrow_numbers(length: int) -> None:
    kernel = copies(length, 16)
    verify(kernel, 4)
    x = np.arange(length, dtype=np.float16)
    y = np.zeros(24, np.float16)
    run(kernel, [x, y])
    np.testing.assert_array_equal(y.reshape(3, 8), [x[at : at + 8] for at in (0, 16, 32)])


def test_words_must_be_aligned() -> None:
    with pytest.raises(InternalError, match="x as i32: an index is not a whole number of them"):
        run(copies(64, 9), [np.zeros(64, np.float16), np.zeros(24, np.float16)])
    with pytest.raises(InternalError, match="expected an index known to be aligned to raw words"):
        emit(copies(64, 9), target(Addressing.DESCRIPTOR))


def test_matrices_lie_in_words() -> None:
    kernel = multiplies()
    verify(kernel, 4)
    x = np.arange(64, dtype=np.float16)
    y = np.zeros(64, np.int32)
    run(kernel, [x, y])
    np.testing.assert_array_equal(
        y.reshape(8, 8)[:, :4].copy().view(np.float16), 2 * x.reshape(8, 8)
    )


@pytest.mark.parametrize("kernel", [copies(64, 16), multiplies()], ids=lambda k: k.name)
@pytest.mark.parametrize("addressing", list(Addressing), ids=lambda mode: mode.value)
def test_modules_are_valid(kernel: Kernel, addressing: Addressing) -> None:
    validate(emit(kernel, target(addressing)))
    assert text(parse(text(kernel))) == text(kernel)


def test_shared_words_are_declared_as_vectors() -> None:
    lines = disassemble(emit(multiplies(), target(Addressing.DEVICE_ADDRESS))).split("\n")
    assert any("OpTypeArray %v4uint %uint_16" in line for line in lines)


@pytest.mark.parametrize(
    ("memory", "type_"), [(F16, VecType(I32, 2)), (I16, VecType(I32, 4))], ids=str
)
def test_vectors_of_words_read_narrower_numbers(memory: ScalarType, type_: Type) -> None:
    verify(parse(reading(memory, type_)))


@pytest.mark.parametrize(
    ("memory", "type_"),
    [(F16, I32), (F32, VecType(I32, 4)), (F16, VecType(F32, 2)), (I32, VecType(F16, 4))],
    ids=str,
)
def test_nothing_else_reads_another_type(memory: ScalarType, type_: Type) -> None:
    with pytest.raises(InternalError, match=f"in x, which holds {memory}"):
        verify(parse(reading(memory, type_)))


def reading(memory: ScalarType, type_: Type) -> str:
    source = text(copies(64, 16)).replace("f16[", f"{memory}[")
    return source.replace("vec<i32,4> = load", f"{type_} = load")
