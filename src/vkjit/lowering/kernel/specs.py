"""What a primitive asks of the templates: one closed union, matched by ``plan.partition``.

An op knows its spec and never a template; a template knows specs and never an op.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, final

from vkjit.blocks import BlockType
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import ScalarType
from vkjit.lowering.kernel.views import View

ScalarFn = Callable[..., Value]
"""``fn(builder, *operands) -> result``; operands and result are scalars or vectors of one width."""


class ReduceRule(Protocol):
    """An associative, commutative reduction over states of one or two values.

    ``index`` is the position along the reduced axes in row-major order, of the kernel's index type.
    """

    def initial(self, b: Builder, lanes: int) -> tuple[Value, ...]:
        """The state before any element: the identity in each lane."""
        ...

    def step(
        self, b: Builder, state: tuple[Value, ...], x: Value, index: Value
    ) -> tuple[Value, ...]:
        """The state after one more element per lane."""
        ...

    def merge(
        self, b: Builder, left: tuple[Value, ...], right: tuple[Value, ...]
    ) -> tuple[Value, ...]:
        """Two states combined."""
        ...

    def finish(self, b: Builder, state: tuple[Value, ...]) -> Value:
        """The result, in the value type of the output dtype."""
        ...


@final
@dataclass(frozen=True, slots=True)
class PointwiseSpec:
    """Each output element from the operands' elements at the same index."""

    scalar: ScalarFn


@final
@dataclass(frozen=True, slots=True)
class IotaSpec:
    """The position along ``axis``, as an integer or float of the output dtype."""

    axis: int


@final
@dataclass(frozen=True, slots=True)
class ViewSpec:
    """The operand at other indices; ``apply`` gives None where a copy is needed first."""

    apply: Callable[[View], View | None]


@final
@dataclass(frozen=True, slots=True)
class DecodeSpec:
    """The numbers of an array of ``blocks``: a view whose elements readers decode."""

    blocks: BlockType


@final
@dataclass(frozen=True, slots=True)
class PlaceSpec:
    """Operands written into regions of a new array.

    ``regions[i]`` views the row-major output for operand ``i`` (after the fill). ``fill`` says
    whether operand 0 is a scalar that fills the output first; regions then start at operand 1.
    """

    regions: tuple[View, ...]
    fill: bool


@final
@dataclass(frozen=True, slots=True)
class ReduceSpec:
    """Reduces ``axes`` of the operand."""

    axes: tuple[int, ...]
    rule: ReduceRule


@final
@dataclass(frozen=True, slots=True)
class ScanSpec:
    """Running reduction along ``axis``, from the end when ``reverse``."""

    axis: int
    reverse: bool
    rule: ReduceRule


class KeyRule(Protocol):
    """Elements as signed integers whose order is that of the sort; equal where elements tie."""

    @property
    def type(self) -> ScalarType:
        """Of the keys: ``i32`` or ``i64``."""
        ...

    def __call__(self, b: Builder, x: Value) -> Value:
        """The key of a scalar element."""
        ...


@final
@dataclass(frozen=True, slots=True)
class SortSpec:
    """The first ``count`` i32 positions along ``axis`` in the stable order of their keys."""

    axis: int
    count: int
    key: KeyRule


@final
@dataclass(frozen=True, slots=True)
class PutBackSpec:
    """``out[a, order[a, i, c], c] = operand[a, i, c]``, i along ``axis``, and 0 elsewhere."""

    axis: int


class Precision(Enum):
    """How far products of float32 operands may be from those of float32; sums stay float32.

    Other operands are multiplied as they are.
    """

    HIGHEST = "highest"
    """Products of float32."""
    HIGH = "high"
    """Three products of bfloat16 parts: errors of about 1e-5, the range of float32."""
    BFLOAT16 = "bfloat16"
    """One product of bfloat16: errors of about 4e-3."""
    F16X3 = "f16x3"
    """Three products of float16 parts: errors of about 1e-6, for operands below 65504."""


@final
@dataclass(frozen=True, slots=True)
class ContractSpec:
    """Batched product: output axes are batch, free axes of lhs, free axes of rhs.

    Sums run in ``accumulate``, the output is stored in its own dtype.
    """

    lhs_batch: tuple[int, ...]
    rhs_batch: tuple[int, ...]
    lhs_contract: tuple[int, ...]
    rhs_contract: tuple[int, ...]
    accumulate: ScalarType
    precision: Precision = Precision.HIGHEST


@final
@dataclass(frozen=True, slots=True)
class GatherSpec:
    """``out[a, i..., c] = operand[a, clamp(indices[i...]), c]``, indices i32 along ``axis``."""

    axis: int


@final
@dataclass(frozen=True, slots=True)
class ReorderSpec:
    """``out[a, i, c] = operand[a, clamp(order[a, i, c]), c]``, i along ``axis``; order is i32."""

    axis: int


@final
@dataclass(frozen=True, slots=True)
class ScatterAddSpec:
    """``out = operand; out[a, indices[i...], c] += updates[a, i..., c]`` in order of i.

    Operands are (operand, indices, updates); out-of-range indices are dropped.
    """

    axis: int


@final
@dataclass(frozen=True, slots=True)
class SetRowsSpec:
    """``out = operand; out[a, indices[i...], c] = updates[a, i..., c]``: a write.

    Operands are (operand, indices, updates), indices i32 along ``axis``, none inside twice;
    out-of-range ones are dropped.
    """

    axis: int


@final
@dataclass(frozen=True, slots=True)
class WriteSpec:
    """Operand 1 written over a region of operand 0; the result is operand 0 with the write done."""

    region: View


KernelSpec = (
    PointwiseSpec
    | IotaSpec
    | ViewSpec
    | DecodeSpec
    | PlaceSpec
    | ReduceSpec
    | ScanSpec
    | SortSpec
    | PutBackSpec
    | ContractSpec
    | GatherSpec
    | ReorderSpec
    | ScatterAddSpec
    | SetRowsSpec
    | WriteSpec
)
