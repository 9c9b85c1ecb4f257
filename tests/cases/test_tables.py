"""The case tables: each comes from a bug that a peer project had; see ``source`` in the tables.

A case is a dictionary: ``args`` makes NumPy arguments, ``fn(vj, *args)`` computes, ``want`` are the
right values; ``rtol``, ``atol``, ``dtype``, ``signed_zero`` say how they are compared; ``raises``
asks for an error; ``modes`` says whether it runs as it is, under ``jit`` or both. Compiled cases
run on the default device and on the Vulkan devices.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import vkjit
from tests import devices
from vkjit import tree
from vkjit.runtime import get_device

Case = dict[str, Any]

TABLES = ("gradients", "dtypes", "shapes", "numerics", "runtime", "device")
ERRORS = (TypeError, ValueError, RuntimeError, IndexError)
MISSING = {}
"""Cases of transformations that are not there yet, by what they need."""


SOFTWARE = {
    "num-no-fold-of-zero-times-x": "lp_build_div of Mesa's gallivm makes 0.0 / x 0.0, whatever x is"
}
"""Cases that fail in software drivers, and why."""
VULKAN = [name for name in devices.names() if name.startswith("vulkan:")]


def load(table: str) -> ModuleType:
    path = Path(__file__).parent / "tables" / f"{table}.py"
    spec = importlib.util.spec_from_file_location(f"cases_{table}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parameters() -> Iterator[Any]:
    for table in TABLES:
        for case in load(table).CASES:
            if case.get("hooks"):
                continue  # functions of the trainer: tests/models/test_cases.py
            missing = MISSING.get(case["id"])
            reason = f"no {missing} yet"
            absent = pytest.mark.xfail(strict=True, raises=AttributeError, reason=reason)
            marks = [absent] if missing else []
            modes = ("raises",) if "raises" in case else case.get("modes", ("plain", "jit"))
            for mode in modes:
                yield pytest.param(case, mode, id=f"{case['id']}-{mode}", marks=marks)


def leaves(x: Any) -> list[Any]:
    return [leaf for leaf in tree.leaves(x) if leaf is not None]


def comparable(x: Any) -> np.ndarray[Any, Any]:
    array = np.asarray(x)
    if array.dtype.kind in "biu":
        return array
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def assert_as_wanted(case: Case, result: Any, want: Any) -> None:
    got, wanted = leaves(result), leaves(want)
    assert len(got) == len(wanted), case["says"]
    names = case.get("dtype")
    if names is not None:
        expected = [names] * len(got) if isinstance(names, str) else list(names)
        assert [np.dtype(getattr(g, "dtype", type(g))).name for g in got] == expected
    for g, w in zip(map(comparable, got), map(comparable, wanted), strict=True):
        assert g.shape == w.shape, case["says"]
        if g.dtype.kind in "biu" and w.dtype.kind in "biu":
            assert np.array_equal(g.astype(object), w.astype(object)), (case["says"], g, w)
            continue
        rtol, atol = case.get("rtol", 1e-5), case.get("atol", 1e-6)
        np.testing.assert_allclose(g, w, rtol, atol, equal_nan=True, err_msg=case["says"])
        if case.get("signed_zero"):
            zero = w == 0
            assert np.array_equal(np.signbit(g)[zero], np.signbit(w)[zero]), case["says"]


def run(case: Case, mode: str) -> Any:
    arguments = case["args"]() if "args" in case else ()
    if mode == "jit":
        return vkjit.jit(lambda *a: case["fn"](vkjit, *a))(*arguments)
    arrays = (np.ndarray, np.generic)
    own = [vkjit.numpy.asarray(a) if isinstance(a, arrays) else a for a in arguments]
    return case["fn"](vkjit, *own)


def check(case: Case, mode: str) -> None:
    want = case["want"]() if callable(case["want"]) else case["want"]
    assert_as_wanted(case, run(case, mode), want)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("device", VULKAN, indirect=True, scope="session")
@pytest.mark.parametrize(("case", "mode"), [p for p in parameters() if p.values[1] == "jit"])
def test_compiled_case(case: Case, mode: str, device: str, request: pytest.FixtureRequest) -> None:
    if case["id"] in SOFTWARE and get_device(device).target.name.startswith("vulkan llvmpipe"):
        request.applymarker(pytest.mark.xfail(raises=AssertionError, reason=SOFTWARE[case["id"]]))
    with vkjit.default_device(device):
        check(case, mode)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("case", "mode"), list(parameters()))
def test_case(case: Case, mode: str) -> None:
    if mode != "raises":
        check(case, mode)
        return
    kinds = ERRORS if case["raises"] is True else case["raises"]
    try:
        result = run(case, "plain")
    except (NotImplementedError, RecursionError):
        raise
    except kinds:
        return
    assert "or_want" in case, f"no error; gave {result}"
    assert_as_wanted(case, result, case["or_want"])
