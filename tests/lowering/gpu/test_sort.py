"""Sorts by interpreted GPU kernels: short lines together, tiles and merges of long ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from vkjit.lowering.target import MINIMAL_GPU, Target
from vkjit.ops.sort import argsort

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


@pytest.mark.parametrize("k", [1, 3, 4, 7])
@pytest.mark.parametrize("shape", [(1, 17), (3, 100), (2, 257)], ids=str)
def test_the_first_few_are_selected(shape: tuple[int, int], k: int) -> None:
    x: Any = np.random.default_rng(4).integers(0, 9, shape).astype(np.int32)
    (got,), kernels = results(lambda v: argsort(v, 1, descending=True, count=k), (x,), TINY)
    np.testing.assert_array_equal(got, np.argsort(-x, axis=1, kind="stable")[:, :k])
    selects = all(kernel.name == "sort_tile" for kernel in kernels)
    assert selects == (4 * k <= 16)


def test_cotangents_of_the_first_few() -> None:
    x: Any = np.random.default_rng(5).permutation(90).reshape(3, 30).astype(np.float32)
    weights: Any = np.array([4, 2, 1], np.float32)
    grad = vj.grad(lambda v, w: (vj.lax.top_k(v, 3)[0] * w).sum())
    for target in (TINY, MINIMAL_GPU):
        (got,), _ = results(grad, (x, weights), target)
        ranks = np.argsort(np.argsort(-x, axis=1), axis=1)
        np.testing.assert_array_equal(got, np.where(ranks < 3, 4 / 2.0**ranks, 0))
