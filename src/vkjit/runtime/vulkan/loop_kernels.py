"""Kernels of this package's own: they advance the arguments of loops, and copy bytes.

The body of a replayed loop is recorded twice, for even and for odd turns, each with its own table
of arguments. While one runs, one workgroup or a few compute the table of the other: no barrier more
than the body has, and nothing for the host to do.
"""

from __future__ import annotations

import functools
import math

from vkjit.lowering.artifact import Range
from vkjit.lowering.gpu.grid import each_item
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Kernel, Value
from vkjit.lowering.kernel.types import (
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
)
from vkjit.lowering.legalize import legalize
from vkjit.lowering.target import Target

INVOCATIONS = 64
"""Size of a workgroup of the kernels that advance; one invocation for each argument."""
HEAD = 2
"""Words of 8 bytes before the addresses of a table: its turn, and one unused."""
MOVE = 4
"""Words for each argument: stride, first, step, ring; as many before the first, the count."""
_UNBOUNDED = 1 << 20  # the length of a buffer bounds nothing
_WORD_BYTES = (4, 2, 1)
_LANES = 4


def can_advance(target: Target) -> bool:
    """Whether a device can compute addresses."""
    return I64 in target.arithmetic and I64 in target.storage


@functools.cache
def begin_kernel(target: Target) -> Kernel:
    """``base[i] = source[i]``, and the table ``even`` of turn 0; the turn of ``odd`` is 0, too."""
    b = Builder("vkjit_begin_loop")
    moves = b.buffer("moves", I64, _UNBOUNDED, Access.READ)
    source = b.buffer("source", I64, _UNBOUNDED, Access.READ)
    base = b.buffer("base", I64, _UNBOUNDED, Access.WRITE)
    even = b.buffer("even", I64, _UNBOUNDED, Access.WRITE)
    odd = b.buffer("odd", I64, _UNBOUNDED, Access.WRITE)
    i = _invocation(b)
    with b.branch(_is_one(b, moves, i)).then():
        address = b.load(source, i)
        b.store(base, i, address)
        b.store(even, b.offset(i, HEAD), b.add(address, _moved(b, moves, i, b.index(0))))
    with b.branch(b.compare(CmpOp.EQ, i, b.index(0))).then():
        for table in (even, odd):
            b.store(table, b.index(0), b.const(I64, 0))
    return legalize(b.finish((1, 1, 1), (INVOCATIONS, 1, 1)), target)


@functools.cache
def advance_kernel(target: Target) -> Kernel:
    """The table ``later`` of the turn after that of ``now``."""
    b = Builder("vkjit_advance_loop")
    moves = b.buffer("moves", I64, _UNBOUNDED, Access.READ)
    base = b.buffer("base", I64, _UNBOUNDED, Access.READ)
    now = b.buffer("now", I64, _UNBOUNDED, Access.READ)
    later = b.buffer("later", I64, _UNBOUNDED, Access.WRITE)
    i = _invocation(b)
    turn = b.offset(b.convert(ConvertOp.TRUNC, b.load(now, b.index(0)), I32), 1)
    with b.branch(_is_one(b, moves, i)).then():
        address = b.add(b.load(base, i), _moved(b, moves, i, turn))
        b.store(later, b.offset(i, HEAD), address)
    with b.branch(b.compare(CmpOp.EQ, i, b.index(0))).then():
        b.store(later, b.index(0), b.convert(ConvertOp.SEXT, turn, I64))
    return legalize(b.finish((1, 1, 1), (INVOCATIONS, 1, 1)), target)


def _invocation(b: Builder) -> Value:
    return b.add(b.scaled(b.workgroup_id(), INVOCATIONS), b.local_id())


def _is_one(b: Builder, moves: Buffer, i: Value) -> Value:
    """Whether argument ``i`` is one of those there are."""
    count = b.convert(ConvertOp.TRUNC, b.load(moves, b.index(0)), I32)
    return b.compare(CmpOp.LT, i, count)


def _moved(b: Builder, moves: Buffer, i: Value, turn: Value) -> Value:
    """Bytes by which argument ``i`` lies further on in a turn."""
    row = b.scaled(b.offset(i, 1), MOVE)
    stride = b.load(moves, row)
    first, step, ring = (
        b.convert(ConvertOp.TRUNC, b.load(moves, b.offset(row, n)), I32) for n in (1, 2, 3)
    )
    slot = b.binary(BinOp.REM_S, b.add(first, b.mul(step, turn)), ring)
    is_negative = b.compare(CmpOp.LT, slot, b.index(0))
    slot = b.select(is_negative, b.add(slot, ring), slot)
    return b.mul(stride, b.convert(ConvertOp.SEXT, slot, I64))


def copy_kernel(source: Range, target: Range, device: Target) -> Kernel:
    """Copies the bytes of a range, in words as wide as both ranges are aligned in every turn."""
    numbers = [source.size]
    for place in (source, target):
        numbers += [place.offset, *(move.stride for move in place.moves)]
    aligned = math.gcd(*numbers)
    elem = {4: I32, 2: I16, 1: I8}[next(n for n in _WORD_BYTES if aligned % n == 0)]
    lanes = _LANES if aligned % (_LANES * elem.bytes) == 0 else 1
    return _copy(source.size // elem.bytes, elem, lanes, device)


@functools.cache
def _copy(count: int, elem: ScalarType, lanes: int, device: Target) -> Kernel:
    b = Builder(f"vkjit_copy_{count}_{elem.name}", device.index_type)
    source = b.buffer("source", elem, count, Access.READ)
    target = b.buffer("target", elem, count, Access.WRITE)

    def visit(number: Value) -> None:
        i = b.scaled(number, lanes)
        b.store(target, i, b.load(source, i, lanes))

    return legalize(b.finish(*each_item(b, count // lanes, device, visit)), device)
