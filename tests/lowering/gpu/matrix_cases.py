"""Products with one operand layout, type and epilogue each: groups, data, results, bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import (
    BF16,
    F16,
    F32,
    BinOp,
    ConvertOp,
    ScalarType,
    UnOp,
    scalar_of,
    with_elem,
)
from vkjit.lowering.kernel.views import View, dense
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
EPSILON = {F16: 2.0**-11, BF16: 2.0**-8, F32: 2.0**-24}


def float_cast(elem: ScalarType) -> Callable[[Builder, Value], Value]:
    """A conversion to another float type."""

    def cast(b: Builder, x: Value) -> Value:
        if scalar_of(x.type) is elem:
            return x
        return b.convert(ConvertOp.FLOAT, x, with_elem(x.type, elem))

    return cast


def add(b: Builder, x: Value, y: Value) -> Value:
    """A sum."""
    return b.binary(BinOp.ADD, x, y)


def tanh(b: Builder, x: Value) -> Value:
    """A function that legalization writes out."""
    return b.unary(UnOp.TANH, x)


def logistic(b: Builder, x: Value) -> Value:
    """A function with a division, which some targets correct."""
    one = b.const(x.type, 1.0)
    return b.binary(BinOp.DIV, one, b.add(one, b.unary(UnOp.EXP, b.unary(UnOp.NEG, x))))


@dataclass(frozen=True)
class Case:
    """A product: sizes, storage of the operands, types, and what follows it."""

    m: int = 64
    n: int = 64
    k: int = 32
    batch: tuple[int, ...] = ()
    layout: str = "NN"
    elem: ScalarType = F16
    accumulate: ScalarType = F32
    epilogue: str = "none"

    @property
    def out(self) -> ScalarType:
        """Type of what is stored."""
        return F32 if self.epilogue == "float32" else self.elem


def group_of(case: Case) -> tuple[ContractGroup, list[ArrayInfo]]:
    """The group; arrays are lhs, rhs, bias, residual, result."""
    batch, rank = case.batch, len(case.batch)
    last = (*range(rank), rank + 1, rank)
    lhs = dense((*batch, case.m, case.k))
    if case.layout[0] == "T":
        lhs = dense((*batch, case.k, case.m)).permuted(last)
    rhs = dense((*batch, case.k, case.n))
    if case.layout[1] == "T":
        rhs = dense((*batch, case.n, case.k)).permuted(last)
    out = dense((*batch, case.m, case.n))
    body: list[BodyStep] = [ProductStep(case.elem)]
    if case.epilogue == "float32":
        body.append(ScalarStep(float_cast(F32), (0,), F32))
    elif case.epilogue == "logistic":
        body += [
            ScalarStep(float_cast(F32), (0,), F32),
            ScalarStep(logistic, (1,), F32),
            ScalarStep(float_cast(case.elem), (2,), case.elem),
        ]
    elif case.epilogue == "all":
        columns = View(out.shape, (*(0,) * (rank + 1), 1), 0)
        body += [
            LoadStep(2, columns, F32),
            ScalarStep(float_cast(F32), (0,), F32),
            ScalarStep(add, (1, 2), F32),
            ScalarStep(tanh, (3,), F32),
            LoadStep(3, out, case.elem),
            ScalarStep(float_cast(F32), (5,), F32),
            ScalarStep(add, (4, 6), F32),
            ScalarStep(float_cast(case.elem), (7,), case.elem),
        ]
    sizes = (lhs.size, rhs.size, case.n, out.size, out.size)
    elems = (case.elem, case.elem, F32, case.elem, case.out)
    arrays = [ArrayInfo(e, n) for e, n in zip(elems, sizes, strict=True)]
    group = ContractGroup(
        batch,
        case.m,
        case.n,
        case.k,
        LoadStep(0, lhs, case.elem),
        LoadStep(1, rhs, case.elem),
        case.accumulate,
        tuple(body),
        (StoreStep(len(body) - 1, 4, out),),
    )
    return group, arrays


def values_of(case: Case, arrays: list[ArrayInfo]) -> list[Array]:
    """Data for the inputs, NaN for what kernels write."""
    rng = np.random.default_rng(3)
    made: list[Array] = []
    for number, info in enumerate(arrays):
        x = rng.uniform(-1, 1, info.length) if number < 4 else np.full(info.length, np.nan)
        made.append(x.astype(DTYPES[info.elem]))
    return made


def stored_as(x: Array, layout: str) -> Array:
    """The operand in its logical order, whichever way it lies."""
    return np.swapaxes(x, -1, -2) if layout == "T" else x


def expected(case: Case, values: list[Array]) -> tuple[Array, Array]:
    """Results in float64, and the error allowed for each.

    A product may be off by the rounding of its k sums in the accumulation type, relative to the
    sum of the magnitudes of its terms, and by its own rounding; tanh and sums add roundings.
    """
    shape_a = (case.k, case.m) if case.layout[0] == "T" else (case.m, case.k)
    shape_b = (case.n, case.k) if case.layout[1] == "T" else (case.k, case.n)
    a = stored_as(values[0].astype(np.float64).reshape(*case.batch, *shape_a), case.layout[0])
    b = stored_as(values[1].astype(np.float64).reshape(*case.batch, *shape_b), case.layout[1])
    product, magnitude = a @ b, np.abs(a) @ np.abs(b)
    bound = (case.k + 1) * EPSILON[case.accumulate] * magnitude + EPSILON[case.elem] * (
        np.abs(product) + magnitude * EPSILON[case.accumulate]
    )
    if case.epilogue == "logistic":
        product = 1 / (1 + np.exp(-product))
        bound = bound + 8 * EPSILON[F32] + EPSILON[case.elem]
    if case.epilogue == "all":
        product = np.tanh(product + values[2].astype(np.float64))
        product = product + values[3].astype(np.float64).reshape(product.shape)
        bound = bound + 8 * EPSILON[F32] + 2 * EPSILON[case.elem] * (np.abs(product) + 1)
    return product.reshape(-1), bound.reshape(-1)
