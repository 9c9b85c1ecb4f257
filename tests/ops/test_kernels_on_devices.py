"""Every primitive through the whole compiler on every device, against its NumPy definition.

Bounds are those of ``tests/tolerances.py``: relative to the sum of the magnitudes that a reduction
adds, and to the value itself elsewhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.oracles import EXACT, on_device
from tests.tolerances import Kind, assert_within, bound
from vkjit import dtypes
from vkjit.ir import primitive
from vkjit.ir.evaluate import evaluate
from vkjit.ir.primitive import Op, Sample
from vkjit.ops.registry import PRIMITIVES

from .strategies import draw, program_of

Array = np.ndarray[Any, Any]

every = pytest.mark.parametrize("prim", PRIMITIVES, ids=lambda p: p.name)

ROUNDED = {"rem", "add", "sub", "mul", "div", "sqrt", "cast", "integer_pow", "rsqrt"}
SUMS = {"reduce_sum", "cumsum", "scatter_add", "dot_general"}
PRODUCTS = {"reduce_prod", "cumprod"}
MOVES = (primitive.Kind.VIEW, primitive.Kind.PLACE, primitive.Kind.WRITE)


def kind_of(prim: Op) -> Kind:
    """How results of ``prim`` may differ."""
    if prim.name in EXACT or prim.name == "gather" or prim.traits.kind in MOVES:
        return Kind.EXACT
    if prim.name in ROUNDED:
        return Kind.ROUNDED
    return Kind.SUM if prim.name in SUMS | PRODUCTS else Kind.FUNCTION


def length_of(sample: Sample) -> int:
    """An upper bound of the terms in one result."""
    return max(a.size for a in sample.avals) if sample.prim.name in SUMS | PRODUCTS else 1


def scale_of(sample: Sample, values: list[Array]) -> Array | None:
    """The sum of the magnitudes of the terms, or None: the magnitude of the value.

    A remainder is the difference of two numbers as large as the dividend.
    """
    if sample.prim.name == "rem":
        return np.broadcast_to(np.abs(values[0]), program_of(sample).out_avals[0].shape)
    if sample.prim.name not in SUMS:
        return None
    floats = [np.abs(v) if dtypes.is_float(v.dtype) else v for v in values]
    return evaluate(program_of(sample), floats)[0]


def chosen(prim: type[Op], device: str) -> list[Sample]:
    """All samples on the reference; elsewhere a kernel costs 20 to 50 ms: one for each family."""
    samples = prim.samples()
    if device == "reference":
        return samples
    first: dict[object, Sample] = {}
    for sample in samples:
        kinds = frozenset(_family(a.dtype) for a in sample.avals)
        first.setdefault(kinds, sample)
    return list(first.values())


def _family(dtype: np.dtype[Any]) -> str:
    """Float, narrow float, bool, integer or narrow integer."""
    if dtype == dtypes.bool_:
        return "bool"
    wide = "" if dtype.itemsize == 4 else "narrow "
    return f"{wide}float" if dtypes.is_float(dtype) else f"{wide}int"


@every
def test_kernels_agree_with_the_definition(prim: type[Op], device: str) -> None:
    for sample in chosen(prim, device):
        values = draw(sample, 0)
        program = program_of(sample)
        (want,) = evaluate(program, values)
        (got,) = on_device(program, values, device)
        name = f"{sample.prim} of {', '.join(map(str, sample.avals))}"
        kind = kind_of(sample.prim)  # type: ignore[arg-type]
        tolerance = (
            bound(want.dtype, kind, length_of(sample)) if dtypes.is_float(want.dtype) else 0.0
        )
        assert_within(got, want, scale_of(sample, values), tolerance, name)
