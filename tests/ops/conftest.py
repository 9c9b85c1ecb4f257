"""Operations outside a trace run in NumPy here: these tests are about definitions, not devices."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import pytest

from vkjit.ir.avals import Aval
from vkjit.ir.primitive import Primitive
from vkjit.trace import Hooks, aval_of


def _evaluate(prim: Primitive, values: Sequence[Any], outs: Sequence[Aval]) -> Sequence[Any]:
    return prim.evaluate_outs(*[np.asarray(v, aval_of(v).dtype) for v in values])


@pytest.fixture(scope="module", autouse=True)
def eager_in_numpy() -> Generator[None]:
    before = Hooks.eager
    Hooks.eager = staticmethod(_evaluate)
    yield
    Hooks.eager = staticmethod(before)
