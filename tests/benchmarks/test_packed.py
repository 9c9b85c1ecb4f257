"""The benchmarks' packed bases: their numbers are ggml's, and steps on blocks are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from benchmarks import llama_1b5, lora_step
from benchmarks.case import Case, Check, numpy_namespace, tree_leaves
from benchmarks.frameworks import make_host
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


@pytest.mark.parametrize("module", [lora_step, llama_1b5], ids=["lora_step", "llama_1b5"])
@pytest.mark.parametrize("participant", ["vkjit", "vkjit-numbers"])
def test_steps_on_blocks_have_the_gradient_of_their_numbers(
    monkeypatch: pytest.MonkeyPatch, module: Any, participant: str
) -> None:
    monkeypatch.setenv("VKJIT_DEVICE", "cpu")
    case = next(c for c in module.CASES if c.blocks is not None and c.check)
    job = make_host(participant, "cpu").differentiated(module, case)
    job.call()
    check = Check(case, module.program(numpy_namespace(), case), module.inputs(case))
    assert check.error(job.outputs()) < case.tolerance


def test_blocks_take_less_than_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKJIT_DEVICE", "cpu")
    case = next(c for c in llama_1b5.CASES if c.check)
    predicted = {}
    for participant in ("vkjit", "vkjit-numbers"):
        job = make_host(participant, "cpu").prepare(llama_1b5, case)
        job.call()
        predicted[participant] = job.predicted()
    packed = [x for x in case_leaves(case) if isinstance(x, Packed)]
    saved = sum(x.first.numbers().nbytes * max(x.layers, 1) - x.raw().nbytes for x in packed)
    assert predicted["vkjit-numbers"] - predicted["vkjit"] >= 0.9 * saved


def test_the_command_line_makes_the_full_case_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(llama_1b5.SIZES, "2,128")
    small = next(c for c in llama_1b5.cases() if not c.check)
    full = next(c for c in llama_1b5.CASES if not c.check)
    assert (small.params["layers"], small.params["tokens"], small.tokens) == (2, 128, 128)
    assert small.flop < 0.01 * full.flop
    assert small.params["width"] == full.params["width"] == 1536


def case_leaves(case: Case) -> list[Any]:
    return tree_leaves(list(llama_1b5.inputs(case)))
