"""Products as groups, without tracing: any layout, batch and epilogue, and what they give."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.specs import Precision
from vkjit.lowering.kernel.types import BF16, F16, F32, ConvertOp, ScalarType, UnOp, with_elem
from vkjit.lowering.kernel.views import View, dense, dense_strides
from vkjit.lowering.plan.groups import (
    ArrayInfo,
    BodyStep,
    ContractGroup,
    LoadStep,
    ProductStep,
    ScalarStep,
    StoreStep,
)

Array = np.ndarray[Any, Any]

DTYPES = {F16: np.dtype(np.float16), BF16: np.dtype(ml_dtypes.bfloat16), F32: np.dtype(np.float32)}
BITS = {F16: 11, BF16: 8, F32: 24}
LHS, RHS, OUT, BIAS, RESIDUAL = range(5)


@dataclass(frozen=True)
class Case:
    """A product and its epilogue. Layouts: ``n`` as written, ``t`` stored the other way round.

    ``epilogue``: none, or ``full``: tanh of the product and a bias along n, plus a residual.
    ``extra`` lengthens the rows of the operands in memory, so that they are not dense.
    """

    m: int
    n: int
    k: int
    layouts: str = "nn"
    batch: tuple[int, ...] = ()
    elem: ScalarType = F16
    accumulate: ScalarType = F32
    out: ScalarType | None = None
    precision: Precision = Precision.HIGHEST
    epilogue: str = ""
    extra: int = 0
    shared_rhs: bool = False
    inputs: tuple[Array, ...] = field(default=(), compare=False, hash=False)

    @property
    def product(self) -> ScalarType:
        return self.out or self.elem

    def group(self) -> ContractGroup:
        lhs = LoadStep(LHS, self._view(self.m, self.k, self.layouts[0], self.batch), self.elem)
        batch = (1,) * len(self.batch) if self.shared_rhs else self.batch
        view = self._view(self.k, self.n, self.layouts[1], batch)
        if self.shared_rhs:
            strides = (*(0 for _ in self.batch), *view.strides[-2:])
            view = View((*self.batch, self.k, self.n), strides, view.offset)
        rhs = LoadStep(RHS, view, self.elem)
        whole = dense((*self.batch, self.m, self.n))
        body: list[BodyStep] = [ProductStep(self.product)]
        if self.epilogue:
            bias = View(whole.shape, (*(0 for _ in self.batch), 0, 1))
            body += [
                LoadStep(BIAS, bias, F32),
                ScalarStep(_tanh_of_sum, (0, 1), F32),
                LoadStep(RESIDUAL, whole, F32),
                ScalarStep(_sum_as(self.product), (2, 3), self.product),
            ]
        stores = (StoreStep(len(body) - 1, OUT, whole),)
        sizes = (self.batch, self.m, self.n, self.k)
        return ContractGroup(
            *sizes, lhs, rhs, self.accumulate, tuple(body), stores, (), self.precision
        )

    def _view(self, rows: int, columns: int, layout: str, batch: tuple[int, ...]) -> View:
        inner = (rows, columns) if layout == "n" else (columns, rows)
        strides = dense_strides((*batch, inner[0], inner[1] + self.extra))
        view = View((*batch, *inner), strides)
        axes = [*range(len(batch)), len(batch), len(batch) + 1]
        if layout == "t":
            axes[-2:] = axes[:-3:-1]
        return view.permuted(axes)

    def arrays(self) -> list[ArrayInfo]:
        """What the group reads and writes, by number."""
        views = self.group()
        lengths = [_length(views.lhs.view), _length(views.rhs.view)]
        whole = math.prod(self.batch) * self.m * self.n
        made = [ArrayInfo(self.elem, n) for n in lengths] + [ArrayInfo(self.product, whole)]
        if self.epilogue:
            made += [ArrayInfo(F32, self.n), ArrayInfo(F32, whole)]
        return made

    def data(self, scale: float = 1.0) -> list[Array]:
        """Random contents, one array for each, NaN where results go."""
        rng = np.random.default_rng(self.m + self.n + self.k)
        made: list[Array] = []
        for number, info in enumerate(self.arrays()):
            dtype = DTYPES[info.elem]
            values = rng.standard_normal(info.length) * (scale if number < OUT else 1.0)
            made.append(values.astype(dtype))
        made[OUT][:] = np.nan
        return made

    def expected(self, data: list[Array]) -> Array:
        """The result in float64."""
        group = self.group()
        a, b = (_seen(x, s.view) for x, s in zip(data, (group.lhs, group.rhs), strict=False))
        with np.errstate(all="ignore"):
            made = np.matmul(a, b)
            if self.epilogue:
                whole = (*self.batch, self.m, self.n)
                made = np.tanh(made + data[BIAS].astype(np.float64))
                made = made + data[RESIDUAL].astype(np.float64).reshape(whole)
        return made

    def bound(self, data: list[Array]) -> Array:
        """How far each element may be off: rounding of parts, of sums in any order, of results."""
        group = self.group()
        a, b = (_seen(x, s.view) for x, s in zip(data, (group.lhs, group.rhs), strict=False))
        size = np.matmul(np.abs(a), np.abs(b))
        sums = self.k * 2.0 ** -BITS[self.accumulate]
        parts = {
            Precision.HIGHEST: 0.0,
            Precision.HIGH: 3 * 2.0**-16,
            Precision.F16X3: 3 * 2.0**-22,
            Precision.BFLOAT16: 2 * 2.0**-8,
        }[self.precision]
        error = size * (sums + parts) + 1e-30
        if self.elem is F16 or self.precision is Precision.F16X3:
            error = error + self.k * 2.0**-24  # numbers too small for float16
        if self.epilogue:  # the product is rounded first; no step after it makes that larger
            error = error + np.abs(np.matmul(a, b)) * 2.0 ** -BITS[self.product] + 1e-6
        return error + (np.abs(self.expected(data)) + 1e-6) * 2.0 ** -BITS[self.product] * 1.01

    def check(self, data: list[Array]) -> None:
        """Compares the result in ``data`` with float64."""
        want, got = self.expected(data).ravel(), data[OUT].astype(np.float64)
        off = np.abs(got - want) - self.bound(data).ravel()
        assert np.isfinite(got).all()
        worst = int(off.argmax())
        assert off[worst] <= 0, f"element {worst}: {got[worst]}, not {want[worst]}"


def _length(view: View) -> int:
    last = [(size - 1) * step for size, step in zip(view.shape, view.strides, strict=True)]
    return 1 + sum(last) if view.size else 0


def _seen(x: Array, view: View) -> Array:
    wide = x.astype(np.float64)
    strides = [8 * s for s in view.strides]
    return np.lib.stride_tricks.as_strided(wide[view.offset :], view.shape, strides)


def _tanh_of_sum(b: Builder, x: Value, y: Value) -> Value:
    wide = b.convert(ConvertOp.FLOAT, x, with_elem(x.type, F32))
    return b.unary(UnOp.TANH, b.add(wide, y))


def _sum_as(elem: ScalarType):
    def add(b: Builder, x: Value, y: Value) -> Value:
        return b.convert(ConvertOp.FLOAT, b.add(x, y), with_elem(x.type, elem))

    return add
