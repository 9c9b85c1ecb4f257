"""The benchmarks' random blocks hold the numbers that GGUF's own library reads out of them."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from benchmarks.packed import BITS, Packed, random_blocks


@pytest.mark.parametrize("kind", list(BITS))
def test_numbers_are_ggmls(kind: str) -> None:
    matrix = random_blocks(np.random.default_rng(1), kind, (40, 512), 0.05)
    raw = matrix.raw().view(np.uint8)
    wanted = quants.dequantize(raw, GGMLQuantizationType[kind])
    assert matrix.shape == wanted.shape == (40, 512)
    np.testing.assert_array_equal(matrix.numbers(), wanted)
    assert abs(matrix.numbers().std() - 0.05) < 0.003
    # Codes from -8 to 7 have the mean -1/2, which is 0.11 of their deviation.
    assert abs(matrix.numbers().mean()) < 0.006


def test_a_stack_moves_blocks_and_numbers_alike() -> None:
    stack = random_blocks(np.random.default_rng(1), "Q4_K", (6, 256), 1.0, layers=3)
    assert stack.shape == (3, 6, 256)
    for raw, numbers in zip(stack.raw(), stack.numbers(), strict=True):
        np.testing.assert_array_equal(Packed(stack.kind, raw).numbers(), numbers)
    assert len({numbers.tobytes() for numbers in stack.numbers()}) == 3
