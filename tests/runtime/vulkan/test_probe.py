"""The probe tells rounding once from rounding twice."""

from __future__ import annotations

import numpy as np

from vkjit.runtime.reference import ReferenceDevice
from vkjit.runtime.vulkan import probe


def test_rounding_twice_would_show() -> None:
    a, b, c = probe._operands()
    assert np.count_nonzero(a * b + c == probe._fused(a, b, c)) == 0


def test_the_interpreter_rounds_once() -> None:
    assert probe.has_fused_fma(ReferenceDevice())
