"""The text of schedules: stable, and read back."""

from __future__ import annotations

import pytest

from vkjit.errors import ConfigError
from vkjit.lowering.plan.schedule import (
    GpuContract,
    NaiveSchedule,
    SkinnySchedule,
    TiledSchedule,
    parse_schedule,
)

TEXTS: dict[GpuContract, str] = {
    NaiveSchedule(4, 32): "naive(rows=4, columns=32)",
    SkinnySchedule(8, 4, 16, along_k=False, split_k=2): (
        "skinny(team=8, columns=4, beside=16, along_k=0, split_k=2)"
    ),
    TiledSchedule(128, 64, 16, 8, 4, 2, 3): (
        "tiled(block_m=128, block_n=64, block_k=16, tile_m=8, tile_n=4, stages=2, split_k=3, "
        "slices=1, unroll=8)"
    ),
}


@pytest.mark.parametrize("schedule", TEXTS, ids=lambda s: type(s).__name__)
def test_text_round_trip(schedule: GpuContract) -> None:
    assert schedule.text() == TEXTS[schedule]
    assert parse_schedule(TEXTS[schedule]) == schedule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("square(rows=4)", "expected one of .*naive.*tiled"),
        ("naive(rows=4", "expected one of"),
        ("naive(rows=four, columns=2)", "expected one of"),
        ("naive(rows=4)", "expected the numbers rows, columns"),
        ("naive(rows=4, columns=2, depth=1)", "expected the numbers rows, columns"),
    ],
)
def test_other_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_schedule(text)
