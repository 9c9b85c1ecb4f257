"""Numbers of operands that lie in quantized blocks, as products take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import final

from vkjit.blocks import BlockType
from vkjit.errors import InternalError
from vkjit.lowering.cpu.gemm_blocks import Rows
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
        self._units = self._block.nbytes // self._block.unit
        self._start = self._units_at(source.base)
        apart = source.across // self._block.size * self._units
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
                    numbers = self._numbers(at, piece.index, blocks.index, elem)
                    piece.yields(*body(numbers, piece.carried))
                blocks.yields(*piece.results)
        return blocks.results

    def _numbers(self, at: Value, piece: Value, k: Value, elem: ScalarType) -> Numbers:
        b = self._b
        for position, number in self._rows.numbers(at, piece):
            yield b.add(k, position), widened(b, as_read(b, number, self._step), elem)

    def _units_at(self, number: Value) -> Value:
        """Units before the block that starts at ``number``."""
        b = self._b
        shift = b.const(number.type, self._block.size.bit_length() - 1)
        block = b.index(0) if number is b.index(0) else b.binary(BinOp.SHR_L, number, shift)
        return b.scaled(block, self._units)
