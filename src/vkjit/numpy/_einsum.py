"""Einstein summation: parse, reduce each operand, contract pairs greedily, transpose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from vkjit.errors import ArgumentError, ShapeError
from vkjit.ir.avals import Aval
from vkjit.ir.primitive import Value
from vkjit.numpy import _core, _linalg
from vkjit.numpy._core import ArrayLike, DTypeLike
from vkjit.numpy._elementwise import multiply
from vkjit.numpy._reduce import sum as sum_
from vkjit.numpy._shape import squeeze, transpose
from vkjit.numpy._take import diagonal
from vkjit.ops.structural import broadcast
from vkjit.trace import aval_of

__all__ = [
    "einsum",
]


Label = str
"""A letter, or ``.0``, ``.1``... for axes that an ellipsis stands for, counted from the last."""


@final
@dataclass(frozen=True)
class Term:
    """An operand and the label of each of its axes."""

    value: Value
    labels: tuple[Label, ...]


def einsum(
    subscripts: str,
    /,
    *operands: ArrayLike,
    precision: object = None,
    preferred_element_type: DTypeLike = None,
    optimize: object = None,
) -> Value:
    """Sum of products over named axes, ``"bik,bkj->bij"``.

    Repeated letters within an operand take its diagonal, ``...`` broadcasts leading axes, axes of
    size 1 broadcast. More than two operands are contracted pair by pair, cheapest first.

    Args:
        subscripts: letters for the axes of each operand, separated by commas; after ``->`` those
            of the result; without it the letters that occur once, in alphabetical order.
        operands: arrays; promoted to one dtype.
        precision: of float32 products; see ``default_matmul_precision``.
        preferred_element_type: dtype that products accumulate in and the result has.
        optimize: accepted for compatibility; the order is always the greedy one.

    Raises:
        ArgumentError: the subscripts cannot be read or do not fit the number of operands.
        ShapeError: a letter stands for different sizes, or an operand has another rank.
    """
    if not isinstance(subscripts, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError("einsum: the first argument is the subscripts, a string")
    values = _core.promoted("einsum", *_core.beside(*operands))
    terms, output = _parse(subscripts, values)
    sizes = _sizes(subscripts, terms)
    terms = [_without_ones(_diagonalised(t), sizes) for t in terms]
    while len(terms) > 1:
        first, second = _cheapest(terms, output, sizes)
        rest = [t for i, t in enumerate(terms) if i not in (first, second)]
        needed = {*output, *(label for t in rest for label in t.labels)}
        how = preferred_element_type, precision
        merged = _contract(terms[first], terms[second], needed, how)
        terms = [*rest, merged]
    result = _arranged(_summed(terms[0], set(output)), output, sizes)
    return (
        result
        if preferred_element_type is None
        else _core.cast(result, _core.dtype_or(preferred_element_type, aval_of(result).dtype))
    )


def _parse(subscripts: str, values: Sequence[Value]) -> tuple[list[Term], tuple[Label, ...]]:
    text = subscripts.replace(" ", "")
    inputs, arrow, output = text.partition("->")
    parts = inputs.split(",")
    if len(parts) != len(values):
        raise ArgumentError(
            f"einsum: {subscripts!r} names {len(parts)} operands, given {len(values)}; "
            "give one per comma-separated part"
        )
    ranks = [aval_of(v).ndim for v in values]
    labels = [_labels(subscripts, p, r) for p, r in zip(parts, ranks, strict=True)]
    terms = [Term(v, x) for v, x in zip(values, labels, strict=True)]
    dots = max((sum(x.startswith(".") for x in group) for group in labels), default=0)
    ellipsis = tuple(f".{i}" for i in reversed(range(dots)))
    if not arrow:
        letters = [x for group in labels for x in group if not x.startswith(".")]
        once = sorted({x for x in letters if letters.count(x) == 1})
        return terms, (*ellipsis, *once)
    return terms, _output(subscripts, output, ellipsis, {x for g in labels for x in g})


def _labels(subscripts: str, part: str, rank: int) -> tuple[Label, ...]:
    before, dots, after = part.partition("...")
    if not (before + after).isalpha() and before + after:
        raise ArgumentError(f"einsum: {part!r} in {subscripts!r}; expected letters and one '...'")
    hidden = rank - len(before) - len(after)
    if hidden < 0 or (hidden and not dots):
        raise ShapeError(
            f"einsum: {part!r} in {subscripts!r} has {len(before) + len(after)} letters for an "
            f"operand with {rank} axes; expected a letter per axis or '...'"
        )
    return (*before, *(f".{i}" for i in reversed(range(hidden))), *after)


def _output(
    subscripts: str, text: str, ellipsis: tuple[Label, ...], known: set[Label]
) -> tuple[Label, ...]:
    before, dots, after = text.partition("...")
    letters = before + after
    if len(set(letters)) != len(letters) or not set(letters) <= known:
        raise ArgumentError(
            f"einsum: result {text!r} in {subscripts!r} repeats a letter or has one that no "
            "operand has; name each letter of an operand at most once"
        )
    return (*before, *(ellipsis if dots else ()), *after)


def _sizes(subscripts: str, terms: Sequence[Term]) -> dict[Label, int]:
    sizes: dict[Label, int] = {}
    for term in terms:
        for label, size in zip(term.labels, aval_of(term.value).shape, strict=True):
            known = sizes.get(label, 1)
            if known != size and 1 not in (known, size):
                shapes = ", ".join(str(aval_of(t.value)) for t in terms)
                raise ShapeError(
                    f"einsum: {label!r} in {subscripts!r} is {known} and {size} in operands "
                    f"{shapes}; expected one size or 1"
                )
            sizes[label] = size if known == 1 else known
    return sizes


def _diagonalised(term: Term) -> Term:
    """The operand with each label once: the diagonal of axes that share one."""
    value, labels = term.value, list(term.labels)
    for label in dict.fromkeys(labels):
        while labels.count(label) > 1:
            first = labels.index(label)
            second = labels.index(label, first + 1)
            shape = aval_of(value).shape
            if shape[first] != shape[second]:
                value = _repeated(value, first, second)
            value = diagonal(value, 0, first, second)
            labels = [x for i, x in enumerate(labels) if i not in (first, second)] + [label]
    return Term(value, tuple(labels))


def _repeated(value: Value, first: int, second: int) -> Value:
    """Two axes, one of size 1, brought to the same size."""
    shape = list(aval_of(value).shape)
    shape[first] = shape[second] = max(shape[first], shape[second])
    return _core.broadcast_value(value, tuple(shape))


def _without_ones(term: Term, sizes: dict[Label, int]) -> Term:
    """The operand without axes of size 1 that other operands have larger: they broadcast."""
    shape = aval_of(term.value).shape
    ones = tuple(i for i, x in enumerate(term.labels) if shape[i] == 1 and sizes[x] != 1)
    kept = tuple(x for i, x in enumerate(term.labels) if i not in ones)
    return Term(squeeze(term.value, ones), kept) if ones else term


def _cheapest(
    terms: Sequence[Term], output: tuple[Label, ...], sizes: dict[Label, int]
) -> tuple[int, int]:
    """The pair whose product costs the fewest multiplications; the smaller result breaks ties."""

    def cost(pair: tuple[int, int]) -> tuple[int, int]:
        here = {*terms[pair[0]].labels, *terms[pair[1]].labels}
        needed = {*output, *(x for i, t in enumerate(terms) if i not in pair for x in t.labels)}
        return math.prod(sizes[x] for x in here), math.prod(sizes[x] for x in here & needed)

    return min(((i, j) for j in range(len(terms)) for i in range(j)), key=cost)


def _summed(term: Term, needed: set[Label]) -> Term:
    """The operand without the labels that nothing else needs."""
    gone = tuple(i for i, x in enumerate(term.labels) if x not in needed)
    if not gone:
        return term
    kept = tuple(x for x in term.labels if x in needed)
    dtype = aval_of(term.value).dtype
    return Term(sum_(term.value, axis=gone, dtype=dtype), kept)


def _contract(left: Term, right: Term, needed: set[Label], how: tuple[DTypeLike, object]) -> Term:
    """The product of two operands; ``how`` are the dtype of its sums and its precision."""
    left = _summed(left, needed | set(right.labels))
    right = _summed(right, needed | set(left.labels))
    shared = [x for x in left.labels if x in right.labels]
    batch = [x for x in shared if x in needed]
    inner = [x for x in shared if x not in needed]
    if not inner:
        labels = (*left.labels, *(x for x in right.labels if x not in left.labels))
        spread = [_spread(t, labels) for t in (left, right)]
        return Term(multiply(*spread), labels)
    summed = _axes(left, inner), _axes(right, inner)
    together = _axes(left, batch), _axes(right, batch)
    value = _linalg.contracted(left.value, right.value, summed, together, *how)
    free = [x for t in (left, right) for x in t.labels if x not in shared]
    return Term(value, (*batch, *free))


def _axes(term: Term, labels: Sequence[Label]) -> tuple[int, ...]:
    return tuple(term.labels.index(x) for x in labels)


def _spread(term: Term, labels: tuple[Label, ...]) -> Value:
    """The operand with axes in the order of ``labels``, of size 1 where it has none."""
    present = [x for x in labels if x in term.labels]
    value = transpose(term.value, [term.labels.index(x) for x in present])
    shape = iter(aval_of(value).shape)
    return _core.reshaped(value, tuple(next(shape) if x in present else 1 for x in labels))


def _arranged(term: Term, output: tuple[Label, ...], sizes: dict[Label, int]) -> Value:
    """The result's axes in order, repeated where only axes of size 1 were left."""
    present = [x for x in output if x in term.labels]
    value = transpose(term.value, [term.labels.index(x) for x in present])
    of: Aval = aval_of(value)
    shape = tuple(sizes[x] for x in output)
    if of.shape == shape:
        return value
    return broadcast(value, shape, tuple(i for i, x in enumerate(output) if x in present))
