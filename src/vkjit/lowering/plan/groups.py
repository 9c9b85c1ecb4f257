"""Groups: the loop nests that a program becomes, each computed by one kernel.

A group has an *index space*, a tuple of sizes. Its *body* is a list of steps over one point of that
space; step ``i`` defines value ``i`` and may use values before it. Memory is read and written
through views whose axes are the axes of the index space.

In a ``LoopGroup`` the last ``reduced`` axes are folded by reductions. A value is *full* when it
depends on a reduced axis, else it is a *row* value; reductions turn full values into row values,
and full values may use row values freely. Softmax is one such group with two reductions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, assert_never, final

import numpy as np

from vkjit.blocks import BlockType
from vkjit.ir.control import Branch, Call, Scan, Transfer, While
from vkjit.ir.program import Var
from vkjit.lowering.kernel.specs import KeyRule, Precision, ReduceRule, ScalarFn
from vkjit.lowering.kernel.types import Number, ScalarType
from vkjit.lowering.kernel.views import View

IOTA = -1
"""Array id of the virtual memory whose element at index ``i`` is ``i``."""


@final
@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """A flat array in memory: element type (``i1`` arrays are stored as ``i8``) and length."""

    elem: ScalarType
    length: int


@final
@dataclass(frozen=True, slots=True)
class LoadStep:
    """The element of ``array`` at ``view``; of ``IOTA`` the index itself, as ``type``.

    With ``blocks`` the array holds dense blocks, and the view counts the numbers in them.
    """

    array: int
    view: View
    type: ScalarType
    blocks: BlockType | None = None


@final
@dataclass(frozen=True, slots=True, eq=False)
class ConstStep:
    """A constant; equal to constants of the same bits.

    Groups that are equal share kernels, so 0.0 and -0.0 must differ, which compare equal.
    """

    value: Number
    type: ScalarType

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConstStep) and self._bits == other._bits

    def __hash__(self) -> int:
        return hash(self._bits)

    @property
    def _bits(self) -> tuple[ScalarType, str]:
        return self.type, repr(self.value)


@final
@dataclass(frozen=True, slots=True)
class ScalarStep:
    """``fn`` of earlier values, point by point."""

    fn: ScalarFn
    args: tuple[int, ...]
    type: ScalarType


@final
@dataclass(frozen=True, slots=True)
class GatherStep:
    """The element of ``array`` at ``view`` moved by ``stride`` times value ``index``.

    ``index`` is an ``i32`` value, clamped to [0, ``size`` - 1]; the view has stride 0 along the
    axes that only the index depends on. ``blocks`` is that of ``LoadStep``.
    """

    array: int
    view: View
    index: int
    stride: int
    size: int
    type: ScalarType
    blocks: BlockType | None = None


@final
@dataclass(frozen=True, slots=True)
class ReduceStep:
    """A row value: value ``arg`` folded over the reduced axes."""

    rule: ReduceRule
    arg: int
    type: ScalarType


@final
@dataclass(frozen=True, slots=True)
class ProductStep:
    """The element of the product in a ``ContractGroup``, in the output's type; always step 0."""

    type: ScalarType


BodyStep = LoadStep | ConstStep | ScalarStep | GatherStep | ReduceStep | ProductStep


@final
@dataclass(frozen=True, slots=True)
class StoreStep:
    """Value ``value`` written to ``array`` at ``view``.

    The view of a row value has stride 0 along the reduced axes; it is written once per row.
    """

    value: int
    array: int
    view: View


@final
@dataclass(frozen=True, slots=True)
class LoopGroup:
    """A loop nest over ``shape`` whose last ``reduced`` axes are folded; ``reduced`` may be 0."""

    shape: tuple[int, ...]
    reduced: int
    body: tuple[BodyStep, ...]
    stores: tuple[StoreStep, ...]
    origin: tuple[str, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class ContractGroup:
    """``product[b..., m, n] = sum_k lhs[b..., m, k] * rhs[b..., k, n]`` and an epilogue.

    ``lhs`` and ``rhs`` are views of arrays over (b..., m, k) and (b..., k, n). The index space of
    body and stores is (b..., m, n); body[0] is the ``ProductStep``. Sums run in ``accumulate``;
    ``precision`` says what may stand for a product of float32.
    """

    batch: tuple[int, ...]
    m: int
    n: int
    k: int
    lhs: LoadStep
    rhs: LoadStep
    accumulate: ScalarType
    body: tuple[BodyStep, ...]
    stores: tuple[StoreStep, ...]
    origin: tuple[str, ...] = ()
    precision: Precision = Precision.HIGHEST


@final
@dataclass(frozen=True, slots=True)
class ScatterAddGroup:
    """``target[a, indices[i], c] += updates[a, i, c]`` for i in order; target is updated in place.

    ``updates`` is a view over (outer, count, inner), ``indices`` an i32 view over (count,); the
    target is dense (outer, size, inner). Indices outside [0, size) are dropped.
    """

    outer: int
    size: int
    inner: int
    count: int
    target: int
    indices: LoadStep
    updates: LoadStep
    origin: tuple[str, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class SetRowsGroup:
    """``target[a, indices[i], c] = updates[a, i, c]``; target is updated in place.

    Views and sizes are those of ``ScatterAddGroup``; no index inside [0, size) occurs twice.
    """

    outer: int
    size: int
    inner: int
    count: int
    target: int
    indices: LoadStep
    updates: LoadStep
    origin: tuple[str, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class ScanGroup:
    """Running reduction of ``source``, a view over (outer, length, inner), along the middle axis.

    The result is stored densely in ``target``.
    """

    outer: int
    length: int
    inner: int
    reverse: bool
    rule: ReduceRule
    source: LoadStep
    target: int
    target_type: ScalarType
    origin: tuple[str, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class SortGroup:
    """The i32 positions along the middle axis of ``source`` in the order of their keys.

    ``source`` is a view over (outer, length, inner). Of each line the first ``count`` positions are
    stored in ``target``, dense over (outer, count, inner). Equal keys keep their order.
    """

    outer: int
    length: int
    inner: int
    count: int
    key: KeyRule
    source: LoadStep
    target: int
    origin: tuple[str, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class InverseGroup:
    """``target[a, order[a, i, c], c] = i``, and ``count`` at the places that no i names.

    ``order`` is an i32 view over (outer, count, inner) whose lines name no place twice; the target
    is dense (outer, length, inner).
    """

    outer: int
    length: int
    inner: int
    count: int
    order: LoadStep
    target: int
    origin: tuple[str, ...] = ()


Group = (
    LoopGroup
    | ContractGroup
    | ScatterAddGroup
    | SetRowsGroup
    | ScanGroup
    | SortGroup
    | InverseGroup
)


def reads(group: Group) -> tuple[LoadStep | GatherStep, ...]:
    """All steps of a group that read memory, operands of products included."""
    match group:
        case LoopGroup():
            given: tuple[LoadStep, ...] = ()
        case ContractGroup():
            given = (group.lhs, group.rhs)
        case ScatterAddGroup() | SetRowsGroup():
            return (group.indices, group.updates)
        case ScanGroup() | SortGroup():
            return (group.source,)
        case InverseGroup():
            return (group.order,)
        case _:
            assert_never(group)
    return (*[s for s in group.body if isinstance(s, (LoadStep, GatherStep))], *given)


@final
@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A step that runs programs, ``inner``, or calls the host.

    ``operands`` and ``results`` are dense whole arrays, one for each argument and result of the
    equation; no result is named twice. ``types`` are those of the operands on the host.
    """

    control: Scan | While | Branch | Call | Transfer
    inner: tuple[Partition, ...]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    types: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]
    origin: tuple[str, ...] = ()


Work = Group | ControlGroup
"""What runs one after another: groups, which become kernels, and what decides how often they do."""


@final
@dataclass(frozen=True, slots=True)
class Partition:
    """Groups in the order in which they run, and the arrays between them.

    Arrays 0 ... ``inputs`` - 1 are the program's parameters; ``results`` names the array of each
    result, dense and whole, no array twice and no parameter among them. ``stored`` names the array
    of each variable that lies in memory, be it as a view, ``made`` the group by which a
    variable is computed; what is in neither is computed by its readers.
    """

    arrays: tuple[ArrayInfo, ...]
    inputs: int
    results: tuple[int, ...]
    groups: tuple[Work, ...]
    stored: Mapping[Var, int] = field(default_factory=dict[Var, int], compare=False)
    made: Mapping[Var, int] = field(default_factory=dict[Var, int], compare=False)
