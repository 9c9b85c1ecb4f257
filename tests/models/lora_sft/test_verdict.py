"""The verdict on synthetic results: who is blamed, what interacts, what cannot be told."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

from vkjit_models.lora_sft.sweep_config import SEED
from vkjit_models.lora_sft.sweep_outcome import Outcome
from vkjit_models.lora_sft.verdict import blame, effects_on, judge

RATE, DECAY, RANK = "optimizer.learning_rate", "optimizer.weight_decay", "lora.rank"
RATES, DECAYS = (1e-4, 1e-3, 1e-2), (0.0, 0.01, 0.1)


def grid(
    loss: Callable[..., float | None], **levels: tuple[Any, ...]
) -> tuple[list[Outcome], list[str]]:
    """A run for each combination; a loss of None is a run that diverged."""
    names = {"rate": RATE, "decay": DECAY, "rank": RANK, "seed": SEED}
    factors = [names[name] for name in levels]
    found: list[Outcome] = []
    for point in itertools.product(*levels.values()):
        value = loss(*point)
        name = ",".join(map(str, point))
        status = "diverged" if value is None else "finished"
        number = math.nan if value is None else value
        values = dict(zip(factors, point, strict=True))
        found.append(Outcome(name, values, status, 10, 3.0, number, probe_change=number - 3.0))
    return found, factors


def said(outcomes: list[Outcome], factors: list[str]) -> str:
    return "\n".join(judge(outcomes, factors).sentences)


def test_a_rate_that_diverges_at_every_decay_is_blamed() -> None:
    runs = grid(
        lambda r, d: None if r == 1e-2 else 2.0 - 100 * r + d / 100, rate=RATES, decay=DECAYS
    )
    text = said(*runs)
    assert (
        "learning_rate=0.01 diverged in 3 of 3 runs, at every weight_decay; 0.0001, 0.001 in 0 of 6"
        in text
    )
    assert "weight_decay did not matter for divergence" in text
    assert "(9 pairs of runs)" in text


def test_a_decay_that_diverges_at_every_rate_is_blamed() -> None:
    text = said(*grid(lambda r, d: None if d == 0.1 else 2.0, rate=RATES, decay=DECAYS))
    assert "weight_decay=0.1 diverged in 3 of 3 runs, at every learning_rate" in text
    assert "learning_rate did not matter for divergence" in text


def test_a_combination_that_diverges_is_blamed_on_no_factor_alone() -> None:
    runs, factors = grid(
        lambda r, d: None if r == 1e-2 and d == 0.1 else 2.0, rate=RATES, decay=DECAYS
    )
    text = said(runs, factors)
    assert "1 of 9 runs diverged and no factor alone decides which: 0.01,0.1." in text
    assert "learning_rate and weight_decay weigh most" in text
    assert "learning_rate alone does not decide: 0 of 3 at 0.0001" in text
    found = blame(runs, factors, RATE)
    assert (found.separates, found.matched, found.switched) == (False, 9, 2)


def test_factors_that_only_changed_together_cannot_be_told_apart() -> None:
    runs, factors = grid(
        lambda r, d: None if r == 1e-2 else 2.0, rate=(1e-3, 1e-2), decay=(0.0, 0.1)
    )
    text = said([runs[0], runs[3]], factors)
    assert "learning_rate and weight_decay never changed alone" in text


def test_all_or_none() -> None:
    assert "All 9 runs diverged" in said(*grid(lambda r, d: None, rate=RATES, decay=DECAYS))
    assert "No run diverged (0 of 9)" in said(*grid(lambda r, d: 1.0, rate=RATES, decay=DECAYS))
    assert judge([], []).sentences == ()


def test_missing_and_failed_runs_are_counted_and_left_out() -> None:
    runs, factors = grid(lambda r, d: None if r == 1e-2 else 2.0 - r, rate=RATES, decay=DECAYS)
    runs[0] = Outcome(runs[0].name, runs[0].values, "missing")
    runs[8] = Outcome(runs[8].name, runs[8].values, "failed", note="no memory")
    text = said(runs, factors)
    assert "2 of 9 runs are missing or failed" in text
    assert "learning_rate=0.01 diverged in 2 of 2 runs" in text
    assert "Not every combination has a final held-out loss (5 runs have)" in text


def test_one_level_says_nothing() -> None:
    text = said(*grid(lambda r, d: 2.0 - r, rate=RATES, decay=(0.0,)))
    assert "weight_decay had one level: nothing can be said of it." in text
    assert "learning_rate explains 100%" in text


def test_main_effects_are_ranges_and_shares_of_the_variance() -> None:
    runs, _ = grid(lambda r, d: 2.0 + math.log10(r) / 10 + d, rate=(1e-4, 1e-3), decay=(0.0, 0.2))
    found = effects_on("loss", runs, (RATE, DECAY))
    spread = {one.factor: one.spread for one in found.main}
    assert spread == pytest.approx({DECAY: 0.2, RATE: 0.1})
    assert [one.factor for one in found.main] == [DECAY, RATE]
    assert [one.share for one in found.main] == pytest.approx([0.8, 0.2])
    assert found.interactions[0].share == pytest.approx(0.0, abs=1e-12)
    assert found.complete


def test_effects_are_adjusted_where_a_run_is_missing() -> None:
    runs, _ = grid(lambda r, d: 2.0 + 100 * r, rate=RATES, decay=DECAYS)
    found = effects_on("loss", [one for one in runs if one.name != "0.01,0.1"], (RATE, DECAY))
    shares = {one.factor: one.share for one in found.main}
    # The means of the decays differ, for they are over different rates; the decay does nothing.
    assert shares[DECAY] == pytest.approx(0.0, abs=1e-12)
    assert {one.factor: one.spread for one in found.main}[DECAY] > 0.1
    assert not found.complete


def test_an_interaction_larger_than_the_main_effects_is_named() -> None:
    text = said(*grid(lambda r, k: 2.0 + (r == 1e-3) * (k == 8) + (r != 1e-3) * (k != 8),
                      rate=(1e-4, 1e-3), rank=(4, 8)))  # fmt: skip
    assert "learning_rate and rank interact" in text
    assert "100% of the variance" in text


def test_seeds_are_the_yardstick() -> None:
    noise = {(0.0, 0): 0.01, (0.0, 1): -0.01, (0.1, 0): -0.01, (0.1, 1): 0.01}
    runs, factors = grid(
        lambda r, d, s: 2.0 + 100 * r + noise[d, s] + 0.5 * s,
        rate=(1e-4, 1e-3), decay=(0.0, 0.1), seed=(0, 1),
    )  # fmt: skip
    text = said(runs, factors)
    assert "learning_rate explains" in text
    assert "times the seeds' noise" in text
    assert "weight_decay explains 0%" in text
    assert "within the noise of the seeds" in text
    found = effects_on("loss", runs, (RATE, DECAY))
    assert found.noise == pytest.approx(math.sqrt(8 * 1e-4 / 3))


def test_a_loss_that_does_not_react_raises_an_alarm() -> None:
    alarms = judge(*grid(lambda r, d: 2.00001 + d, rate=RATES, decay=DECAYS)).alarms
    assert len(alarms) == 1
    assert "learning_rate must matter, but in 9 of 9 pairs" in alarms[0]
    assert "equal to 4 decimals" in alarms[0]


def test_a_decay_that_does_nothing_to_the_bit_raises_an_alarm() -> None:
    alarms = judge(*grid(lambda r, d: 2.0 - 100 * r, rate=RATES, decay=DECAYS)).alarms
    assert len(alarms) == 1
    assert "weight_decay changed nothing: in all 9 pairs" in alarms[0]


def test_equal_levels_are_one() -> None:
    runs, factors = grid(lambda r, d: 2.0, rate=(1, 1.0, 2), decay=(0,))
    assert [rate.runs for rate in blame(runs, factors, RATE).rates] == [2, 1]
