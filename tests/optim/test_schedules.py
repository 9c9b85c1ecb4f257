"""Schedules against transformers (golden/ops/schedules.json) and at their ends."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import vkjit as vj
from vkjit.errors import ArgumentError
from vkjit.optim import schedules

TOTAL = 20
GOLDEN = {
    "cosine_warmup5_total20": schedules.cosine(1.0, TOTAL, 5),
    "linear_warmup5_total20": schedules.linear(1.0, TOTAL, 5),
    "constant_warmup4": schedules.constant(1.0, 4),
}


def values(schedule: schedules.Schedule, count: int) -> list[float]:
    compiled = vj.jit(schedule)
    return [float(compiled(np.int32(i))) for i in range(count)]


@pytest.mark.parametrize("name", GOLDEN)
def test_matches_transformers_up_to_the_last_step(name: str, shared: Path) -> None:
    want = json.loads((shared / "golden" / "ops" / "schedules.json").read_text())[name]
    want = want[: TOTAL + 1]  # past the end the cosine of transformers rises again; ours stays
    np.testing.assert_allclose(values(GOLDEN[name], len(want)), want, rtol=0, atol=2e-7)


def test_the_first_step_of_a_warmup_has_rate_zero_and_the_peak_comes_after_it() -> None:
    got = values(schedules.cosine(0.02, 10, 3), 4)
    np.testing.assert_allclose(got, [0.0, 0.02 / 3, 0.04 / 3, 0.02], rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", [schedules.linear, schedules.cosine])
def test_stays_at_the_end_value(kind: object) -> None:
    schedule = kind(0.5, 8, 2, end=0.1)  # type: ignore[operator]
    np.testing.assert_allclose(values(schedule, 12)[8:], 0.1, rtol=1e-6)


def test_join_counts_from_zero_in_each_part() -> None:
    joined = schedules.join(
        [schedules.constant(3.0), schedules.linear(1.0, 4), schedules.constant(7.0)], [2, 5]
    )
    np.testing.assert_allclose(values(joined, 7), [3, 3, 1, 0.75, 0.5, 7, 7], rtol=1e-6)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ArgumentError, match="warmup_steps=-1"):
        schedules.constant(1.0, -1)
    with pytest.raises(ArgumentError, match="2 schedules and 2 boundaries"):
        schedules.join([schedules.constant(1.0)] * 2, [1, 2])
    with pytest.raises(ArgumentError, match="rising"):
        schedules.join([schedules.constant(1.0)] * 3, [4, 4])
    with pytest.raises(ArgumentError, match="peak=0"):
        schedules.cosine(0, 10)
