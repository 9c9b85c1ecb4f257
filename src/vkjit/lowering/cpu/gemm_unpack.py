"""Numbers of operands that lie in quantized blocks, as products take them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import final

from vkjit.blocks import BlockType
from vkjit.errors import InternalError
from vkjit.lowering.cpu.gemm_blocks import PIECE, Rows, transpose
from vkjit.lowering.cpu.gemm_operand import Source
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.decode import decode, decode_at
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import (
    F32,
    BinOp,
    ConvertOp,
    Memory,
    ScalarType,
    scalar_of,
    with_elem,
)
from vkjit.lowering.plan.groups import LoadStep

Numbers = Iterator[tuple[Value, Value]]
"""Steps of the sum, and the numbers of all rows there."""


def numbers_from(b: Builder, memory: Memory, step: LoadStep, start: Value, lanes: int) -> Value:
    """``lanes`` consecutive numbers of one block, in the type of the step."""
    return as_read(b, decode(b, memory, _block(step), start, lanes), step)


def numbers_at(b: Builder, memory: Memory, step: LoadStep, where: Value) -> Value:
    """The numbers at any indices, in the type of the step."""
    return as_read(b, decode_at(b, memory, _block(step), where), step)


def as_read(b: Builder, number: Value, step: LoadStep) -> Value:
    """A decoded float32 in the type of the step."""
    if step.type is F32:
        return number
    return b.convert(ConvertOp.FLOAT, number, with_elem(number.type, step.type))


def widened(b: Builder, x: Value, elem: ScalarType) -> Value:
    """A loaded value as ``elem``: floats are converted, other types must match."""
    have = scalar_of(x.type)
    if have is elem:
        return x
    if have.kind != "float" or elem.kind != "float":
        raise InternalError(f"gemm: operand of type {have} summed in {elem}, expected one type")
    return b.convert(ConvertOp.FLOAT, x, with_elem(x.type, elem))


def _block(step: LoadStep) -> BlockType:
    if step.blocks is None:
        raise InternalError(f"gemm: array {step.array} holds numbers, expected blocks")
    return step.blocks


@final
class BlockRows:
    """``lanes`` rows of an operand whose blocks lie along the sum, from index ``first`` on.

    With ``ragged`` some of them may lie beyond the last row, which then stands for them.
    """

    def __init__(
        self, b: Builder, source: Source, first: Value, lanes: int, *, ragged: bool
    ) -> None:
        self._b = b
        self._step = source.step
        self._block = _block(source.step)
        self._start = self._units_at(source.base)
        apart = source.across // self._block.size * (self._block.nbytes // self._block.unit)
        rows = [b.index(i) for i in range(lanes)]
        if ragged:
            last = b.index(source.size - 1)
            rows = [b.binary(BinOp.MIN_S, b.add(first, row), last) for row in rows]
        else:
            self._start = b.add(self._start, b.scaled(first, apart))
        places = tuple(b.scaled(row, apart) for row in rows)
        self._rows = Rows(b, source.memory, self._block, places)

    def swept(
        self,
        steps: tuple[Value, Value],
        elem: ScalarType,
        carried: Sequence[Value],
        body: Callable[[Numbers, Sequence[Value]], Sequence[Value]],
    ) -> tuple[Value, ...]:
        """Runs ``body`` for each piece of ``steps[1]`` steps of the sum from ``steps[0]`` on.

        It is given the piece as ``elem``, steps counted from ``steps[0]``, and the carried values;
        it returns these for the next piece. The result is those after the last.
        """
        b, start, count = self._b, *steps
        bounds = b.index(0), count, b.index(self._block.size)
        with b.loop(*bounds, carried, hint="k") as blocks:
            at = b.add(self._start, self._units_at(b.add(start, blocks.index)))
            if self._rows.pieces == 1:
                numbers = self._numbers(at, b.index(0), blocks.index, elem)
                blocks.yields(*body(numbers, blocks.carried))
            else:
                pieces = b.index(0), b.index(self._rows.pieces), b.index(1)
                with b.loop(*pieces, blocks.carried, hint="piece") as piece:
                    k = b.add(blocks.index, b.scaled(piece.index, PIECE))
                    numbers = self._numbers(at, piece.index, k, elem)
                    piece.yields(*body(numbers, piece.carried))
                blocks.yields(*piece.results)
        return blocks.results

    def _numbers(self, at: Value, piece: Value, k: Value, elem: ScalarType) -> Numbers:
        b = self._b
        for position, number in enumerate(self._rows.numbers(at, piece)):
            yield b.offset(k, position), widened(b, as_read(b, number, self._step), elem)

    def _units_at(self, number: Value) -> Value:
        return units_at(self._b, self._block, number)


def turned_rows(
    b: Builder, source: Source, at: tuple[Value, Value], lanes: int, elem: ScalarType
) -> Generator[list[Value]]:
    """``PIECE`` numbers of ``lanes`` rows whose blocks lie across: for each row, some vectors.

    Args:
        b: builder.
        source: the operand, in ``Layout.ACROSS``.
        at: first step of the sum, which is a row, and first number in it, a multiple of ``PIECE``.
        lanes: of a vector, and rows.
        elem: what the numbers are given as.

    Yields:
        for each ``lanes`` numbers a vector of each row.
    """
    block = _block(source.step)
    row, column = at
    start = b.add(source.base, b.add(b.scaled(row, source.along), column))
    units = block.nbytes // block.unit
    apart = tuple(b.index(i * (source.along // block.size * units)) for i in range(lanes))
    piece = b.index(0)
    if block.size > PIECE:
        inside = b.binary(BinOp.AND, column, b.index(block.size - 1))
        piece = b.binary(BinOp.SHR_L, inside, b.index(PIECE.bit_length() - 1))
    found: list[Value] = []
    rows = Rows(b, source.memory, block, apart)
    for number in rows.numbers(units_at(b, block, start), piece):
        found.append(widened(b, as_read(b, number, source.step), elem))
        if len(found) == lanes:
            yield transpose(b, found)
            found = []


def units_at(b: Builder, block: BlockType, number: Value) -> Value:
    """Units before the block that holds ``number``."""
    if number is b.index(0):
        return number
    shift = b.const(number.type, block.size.bit_length() - 1)
    return b.scaled(b.binary(BinOp.SHR_L, number, shift), block.nbytes // block.unit)
