"""What a product with its epilogue is, in float64, and how far a device may be from it.

The product is NumPy's in float64. The epilogue runs in the interpreter of kernels, at the product
and at both ends of the product's error bound: what moves there may move on the device.

The bound of a sum of ``k`` products is ``min(gamma(k), 8 sqrt(k) u)`` of the sum of the magnitudes,
``u`` the unit roundoff of the accumulator (N. Higham and T. Mary, "A New Approach to Probabilistic
Rounding Error Analysis", SIAM J. Sci. Comput. 41 (2019), theorem 2.4 with lambda = 8), and what the
group's precision adds to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from vkjit.blocks import BlockType, decode, drawn
from vkjit.lowering.compile import lower_group
from vkjit.lowering.kernel.interpret import run
from vkjit.lowering.kernel.interpret_ops import DTYPES
from vkjit.lowering.kernel.specs import Precision
from vkjit.lowering.kernel.types import F16, F32, I1, I32, ScalarType
from vkjit.lowering.kernel.views import View, dense
from vkjit.lowering.plan.groups import ArrayInfo, LoadStep, LoopGroup, ScalarStep, StoreStep
from vkjit.lowering.target import ALL_SCALARS, Target, TargetKind
from vkjit.lowering.templates.context import TemplateContext
from vkjit.tuning.case import Case

Array = npt.NDArray[Any]
Arrays = dict[int, Array]

_JUDGE = Target(
    name="tuning-judge",
    kind=TargetKind.GPU,
    index_type=I32,
    storage=ALL_SCALARS,
    arithmetic=ALL_SCALARS,
    max_workgroup=(256, 256, 64),
    max_invocations=256,
)
"""The interpreter, one invocation for each element."""

_finfo: Callable[[np.dtype[Any]], Any] = ml_dtypes.finfo
_LAMBDA = 8.0
_SPLIT = {
    Precision.HIGHEST: 0.0,
    Precision.HIGH: 3 * 2.0**-17,
    Precision.BFLOAT16: 2.0**-7,
    Precision.F16X3: 3 * 2.0**-21,
}
"""Error of one product of float32, by what may stand for it: twice the bound of rounding operands
to the sum of their parts and of dropping the product of the low parts."""
_FUNCTION_ULPS = 32.0
"""Two results of an elementary function, each within 16 ulp: what ``legalize`` is tested to."""


_LARGEST_SCALE = 2.0**-13
"""Of blocks; times 63 * 127 it is below 1."""


class Values(Enum):
    """Kinds of inputs."""

    RANDOM = "random"  # uniform in [-1, 1), integers in [-8, 8]
    SPECIAL = "special"  # random, with NaN, infinities, both zeros and huge numbers among them
    LARGE = "large"  # up to where no sum overflows the accumulator


@final
@dataclass(frozen=True, slots=True)
class Wanted:
    """The elements of one store in float64 (integers: as they are), and their allowed error."""

    values: Array
    allowed: Array


def inputs(case: Case, values: Values, seed: int) -> Arrays:
    """Contents of the arrays that a case reads."""
    rng = np.random.default_rng(seed)
    found: Arrays = {}
    in_blocks = case.blocks
    for array in case.reads:
        info, blocks = case.infos[array], in_blocks.get(array)
        if blocks is None:
            found[array] = _filled(rng, info, values, case)
        else:
            found[array] = random_blocks(rng, info, blocks)
    return found


def random_values(rng: np.random.Generator, info: ArrayInfo) -> Array:
    """Uniform in [-1, 1); integers in [-8, 8]."""
    dtype, size = DTYPES[info.elem], info.length
    if info.elem is I1:
        return rng.integers(0, 2, size).astype(np.bool_)
    if info.elem.kind == "int":
        return rng.integers(-8, 9, size).astype(dtype)
    return _uniform(rng, size).astype(dtype)


def random_blocks(rng: np.random.Generator, info: ArrayInfo, blocks: BlockType) -> Array:
    """Any codes, and scales that keep all numbers below 1."""
    dtype = DTYPES[info.elem]
    count = info.length * dtype.itemsize // blocks.nbytes
    scales = _LARGEST_SCALE / 2, _LARGEST_SCALE
    return drawn(blocks, (count,), rng, scales).view(dtype)


def _uniform(rng: np.random.Generator, size: int) -> Array:
    return rng.random(size, np.float32) * np.float32(2) - np.float32(1)


def _filled(rng: np.random.Generator, info: ArrayInfo, values: Values, case: Case) -> Array:
    dtype, size = DTYPES[info.elem], info.length
    if values is Values.LARGE and info.elem.kind == "float":
        large = _uniform(rng, size).astype(np.float64) * _large(info.elem, case)
        return large.astype(dtype)
    found = random_values(rng, info)
    if info.elem.kind != "float":
        return found
    if values is Values.SPECIAL:
        huge = _huge(info.elem, case)
        # Parts of float16 take no infinities, like no numbers beyond 65504.
        ends = [huge, -huge] if case.group.precision is Precision.F16X3 else [np.inf, -np.inf]
        picks = rng.permutation(size)[: min(5, size)]
        special = np.array([np.nan, *ends, -0.0, huge])
        found[picks] = special[: len(picks)].astype(dtype)
    return found


def _large(elem: ScalarType, case: Case) -> float:
    """The largest inputs of which no sum overflows."""
    group = case.group
    room = min(largest(group.accumulate), largest(group.body[0].type))
    return min(_huge(elem, case), math.sqrt(room / (4.0 * max(group.k, 1))))


def _huge(elem: ScalarType, case: Case) -> float:
    """Half the largest number that the group's products take."""
    return 0.5 * largest(F16 if case.group.precision is Precision.F16X3 else elem)


def largest(elem: ScalarType) -> float:
    """The largest finite number of a float type."""
    return float(_finfo(DTYPES[elem]).max)


def unit(elem: ScalarType) -> float:
    """Unit roundoff of a float type."""
    return float(_finfo(DTYPES[elem]).eps) / 2


def tiny(elem: ScalarType) -> float:
    """The smallest normal number of a float type: devices may flush what is below to zero."""
    return float(_finfo(DTYPES[elem]).smallest_normal)


def sum_bound(case: Case) -> float:
    """Error of the sums of a product, relative to the sums of magnitudes."""
    group, length = case.group, max(case.group.k, 1)
    u = unit(group.accumulate)
    certain = length * u / (1 - length * u) if length * u < 1 else math.inf
    split = _SPLIT[group.precision] if group.lhs.type is group.rhs.type is F32 else 0.0
    return min(certain, _LAMBDA * math.sqrt(length) * u) + split


# -- the result -----------------------------------------------------------------------------------


def wanted(case: Case, arrays: Arrays) -> list[Wanted]:
    """What each store of the group has to write, for given contents of the arrays it reads."""
    group = case.group
    with np.errstate(all="ignore"):
        product, error = _product(case, arrays)
        kind = DTYPES[group.body[0].type]
        if group.body[0].type.kind != "float":
            exact = _epilogue(case, arrays, product.astype(kind))
            return [Wanted(v, np.zeros(v.shape)) for v in exact]
        middle, low, high = (
            _epilogue(case, arrays, p.astype(kind))
            for p in (product, product - error, product + error)
        )
        return [
            _spread(case, store, *found)
            for store, *found in zip(group.stores, middle, low, high, strict=True)
        ]


def _product(case: Case, arrays: Arrays) -> tuple[Array, Array]:
    """The sums, and how far a device may be from each."""
    group = case.group
    exact = group.accumulate.kind != "float"
    wide = np.dtype[Any](np.int64 if exact else np.float64)
    lhs, rhs = (strided(_numbers(arrays, s), s.view).astype(wide) for s in (group.lhs, group.rhs))
    product = lhs @ rhs
    if exact:
        # Sums wrap in the accumulator; narrowing keeps the low bits.
        return product.astype(DTYPES[group.accumulate]), np.zeros(product.shape)
    magnitude = np.abs(lhs) @ np.abs(rhs)
    error = sum_bound(case) * magnitude
    error += unit(group.body[0].type) * 2 * np.abs(product)
    return product, error + tiny(group.body[0].type)


def _numbers(arrays: Arrays, step: LoadStep) -> Array:
    """The numbers of an operand's array, in the operand's type where they lie in blocks."""
    array = arrays[step.array]
    if step.blocks is None:
        return array
    return decode(step.blocks, array.view(step.blocks.dtype)).astype(DTYPES[step.type])


def _spread(case: Case, store: StoreStep, middle: Array, low: Array, high: Array) -> Wanted:
    """The result of one store and its error, from results at and around the product."""
    elem = case.infos[store.array].elem
    if elem.kind != "float":
        moved = np.abs(high.astype(np.float64) - low.astype(np.float64))
        return Wanted(middle, moved)
    value = middle.astype(np.float64)
    ends = [_distance(end.astype(np.float64), value) for end in (low, high)]
    size = np.abs(value)
    finite = size[np.isfinite(size)]
    # What an elementary function was given may have been larger than what became of it.
    common = float(np.median(finite)) if finite.size else 0.0
    steps = [s for s in case.group.body if isinstance(s, ScalarStep) and s.type.kind == "float"]
    inside = sum(unit(s.type) for s in steps) * _FUNCTION_ULPS
    allowed = np.maximum(*ends) + inside * (size + common) + 2 * unit(elem) * size + tiny(elem)
    return Wanted(value, np.where(np.isnan(allowed), 0.0, allowed))


def _distance(end: Array, value: Array) -> Array:
    """How far ``end`` is from ``value``: infinitely where only one of them is a number."""
    same = (end == value) | (np.isnan(end) & np.isnan(value))
    apart = np.abs(end - value)
    return np.where(same, 0.0, np.where(np.isnan(apart), np.inf, apart))


def _epilogue(case: Case, arrays: Arrays, product: Array) -> list[Array]:
    """What each store writes, given the product, by the interpreter."""
    group = case.group
    if len(group.body) == 1:
        return [product for _ in group.stores]
    shape = (*group.batch, group.m, group.n)
    number = len(case.infos)
    infos = [*case.infos, ArrayInfo(group.body[0].type, product.size)]
    first = LoadStep(number, dense(shape), group.body[0].type)
    stores: list[StoreStep] = []
    memory = dict(arrays)
    memory[number] = np.ascontiguousarray(product).reshape(-1)
    for store in group.stores:
        elem = case.infos[store.array].elem
        stores.append(StoreStep(store.value, len(infos), dense(shape)))
        memory[len(infos)] = np.zeros(product.size, DTYPES[elem])
        infos.append(ArrayInfo(elem, product.size))
    loop = LoopGroup(shape, 0, (first, *group.body[1:]), tuple(stores))
    kernels, _ = lower_group(loop, None, TemplateContext(_JUDGE, infos))
    for item in kernels:
        run(item.kernel, [memory[a] for a in item.arrays])
    return [memory[store.array].reshape(shape) for store in stores]


def strided(array: Array, view: View) -> Array:
    """The elements of a view."""
    if view.size == 0:
        return np.zeros(view.shape, array.dtype)
    steps = [stride * array.itemsize for stride in view.strides]
    return np.lib.stride_tricks.as_strided(array[view.offset :], view.shape, steps, writeable=False)


# -- comparing ------------------------------------------------------------------------------------


def excess(got: Array, want: Wanted) -> float:
    """The largest error as a share of what is allowed; above 1 the result is wrong.

    NaN must be met by NaN and infinities by themselves, unless their neighbours differ in kind.
    """
    if got.size == 0:
        return 0.0
    with np.errstate(all="ignore"):
        found, value = got.astype(np.float64), want.values.astype(np.float64)
        error = _distance(found, value)
        share = error / np.where(want.allowed > 0, want.allowed, np.nan)
        share = np.where(np.isnan(share), np.inf, share)
        share = np.where(np.isinf(want.allowed) | (error == 0), 0.0, share)
    return float(share.max())
