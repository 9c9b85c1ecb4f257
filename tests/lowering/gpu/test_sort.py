"""Sorts by interpreted GPU kernels: short lines together, tiles and merges of long ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from vkjit.lowering.target import MINIMAL_GPU, Target

from .test_memory_bound import LARGE, results

TINY = replace(LARGE, name="tiny", max_workgroup=(4, 4, 4), max_invocations=4, max_grid=(3, 3, 99))
CRAMPED = replace(LARGE, name="cramped", shared_bytes=256)


@pytest.mark.parametrize("target", [LARGE, MINIMAL_GPU, TINY, CRAMPED], ids=lambda t: t.name)
@pytest.mark.parametrize("shape", [(1, 1), (9, 2), (2, 16), (5, 17), (2, 70), (1, 130)], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_sorts(target: Target, shape: tuple[int, int], axis: int) -> None:
    x = np.random.default_rng(1).integers(-9, 9, shape).astype(np.float32)
    x[0, 0] = np.nan
    (got,), kernels = results(lambda v: jnp.argsort(v, axis=axis), (x,), target)
    np.testing.assert_array_equal(got, np.argsort(x, axis=axis, kind="stable"))
    assert kernels[0].name == "sort_tile"


@pytest.mark.parametrize("length", [16, 17, 33, 100])
def test_each_merge_doubles_the_runs(length: int) -> None:
    x: Any = np.random.default_rng(2).integers(0, 50, length).astype(np.int32)
    (got,), kernels = results(jnp.argsort, (x,), TINY)
    np.testing.assert_array_equal(got, np.argsort(x, kind="stable"))
    merges = (-(-length // 16) - 1).bit_length()
    assert [k.name for k in kernels] == ["sort_tile"] + ["sort_merge"] * merges


def test_keys_of_64_bits() -> None:
    with vj.enable_x64():
        x = np.random.default_rng(3).normal(size=(2, 60)) * 1e-300
        (got,), kernels = results(jnp.argsort, (x,), CRAMPED)
    np.testing.assert_array_equal(got, np.argsort(x, axis=1))
    assert len(kernels) > 1
