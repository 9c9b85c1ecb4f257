"""Quirks of drivers are read here and nowhere else."""

from __future__ import annotations

import dataclasses
import warnings

import pytest

from vkjit.errors import EmulationWarning
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.check import verify
from vkjit.lowering.kernel.nodes import If, Kernel
from vkjit.lowering.kernel.types import F16, F32, I32, Access, BinOp, UnOp
from vkjit.lowering.kernel.walk import all_nodes
from vkjit.lowering.legalize import FUSED_FMA, INEXACT_DIVISION, legalize
from vkjit.lowering.target import MINIMAL_GPU, Quirk


def division() -> Kernel:
    b = Builder("f", index_type=I32)
    x = b.buffer("x", F32, 4, Access.READ_WRITE)
    i = b.workgroup_id()
    root = b.unary(UnOp.SQRT, b.load(x, i))
    b.store(x, i, b.binary(BinOp.DIV, root, b.load(x, i)))
    return b.finish(grid=(4, 1, 1))


def branches(kernel: Kernel) -> int:
    return sum(isinstance(node, If) for node in all_nodes(kernel.body))


def test_division_is_corrected_only_where_the_driver_needs_it() -> None:
    quirk = Quirk(INEXACT_DIVISION, link="", removal="")
    faulty = dataclasses.replace(MINIMAL_GPU, quirks=(quirk,))
    assert branches(legalize(division(), MINIMAL_GPU)) == 0
    corrected = legalize(division(), faulty)
    verify(corrected)
    assert branches(corrected) > 0


def test_a_fused_multiply_add_makes_the_correction_short() -> None:
    quirk = Quirk(INEXACT_DIVISION, link="", removal="")
    faulty = dataclasses.replace(MINIMAL_GPU, quirks=(quirk,))
    fusing = dataclasses.replace(faulty, features=frozenset({FUSED_FMA}))
    short, long = (legalize(division(), target) for target in (fusing, faulty))
    verify(short)
    assert branches(short) == 0
    assert len(list(all_nodes(short.body))) < len(list(all_nodes(long.body))) / 4


def test_emulated_arithmetic_is_told_of_once() -> None:
    target = dataclasses.replace(
        MINIMAL_GPU, name="without halves", storage=MINIMAL_GPU.storage | {F16}
    )
    b = Builder("double", index_type=I32)
    x = b.buffer("x", F16, 4, Access.READ_WRITE)
    i = b.workgroup_id()
    b.store(x, i, b.add(b.load(x, i), b.load(x, i)))
    kernel = b.finish(grid=(4, 1, 1))
    with pytest.warns(EmulationWarning, match="without halves: arithmetic in f16 is emulated"):
        legalize(kernel, target)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        legalize(kernel, target)
