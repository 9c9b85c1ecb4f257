"""Indices of elements as indices of vectors.

A sum shifted right is opaque to compilers, which must expect it to wrap: the constants in it no
longer become offsets of the instruction, and every access computes its address anew. An index of an
array never wraps, so sums and products are divided term by term here.
"""

from __future__ import annotations

from vkjit.lowering.kernel.nodes import Binary, Const, Value
from vkjit.lowering.kernel.types import BinOp
from vkjit.lowering.spirv.alignment import Multiples
from vkjit.lowering.spirv.arithmetic import combine, uniform
from vkjit.lowering.spirv.context import Context

_MOST_TERMS = 12  # index expressions are short; the rest of a longer one is shifted as a whole


def quotient(ctx: Context, multiples: Multiples, index: Value, lanes: int) -> int:
    """The id of ``index / lanes``, for an index that ``lanes``, a power of two, divides.

    Constants are added last: what is before them is the same for neighbouring accesses.
    """
    terms: list[int] = []
    constant = _collect(ctx, multiples, index, lanes, terms)
    if constant or not terms:
        terms.append(uniform(ctx, index.type, constant))
    total = terms[0]
    for term in terms[1:]:
        total = combine(ctx, BinOp.ADD, index.type, total, term)
    return total


def _collect(ctx: Context, multiples: Multiples, index: Value, lanes: int, terms: list[int]) -> int:
    """Appends the terms of ``index / lanes`` that vary, and returns the constant one."""
    if isinstance(index, Const) and isinstance(index.value, int):
        return index.value // lanes
    if isinstance(index, Binary) and len(terms) < _MOST_TERMS:
        a, b = index.a, index.b
        if index.op is BinOp.ADD and all(multiples.of(x) % lanes == 0 for x in (a, b)):
            return sum(_collect(ctx, multiples, x, lanes, terms) for x in (a, b))
        if index.op is BinOp.MUL and isinstance(b, Const) and multiples.of(b) % lanes == 0:
            assert isinstance(b.value, int)
            by, term = b.value // lanes, ctx.use(a)
            if by != 1:
                term = combine(ctx, BinOp.MUL, index.type, term, uniform(ctx, index.type, by))
            terms.append(term)
            return 0
    shift = uniform(ctx, index.type, lanes.bit_length() - 1)
    terms.append(combine(ctx, BinOp.SHR_L, index.type, ctx.use(index), shift))
    return 0
