"""What watches a run: divergence, movement of adapters, alarms, sums, ranges. No model runs."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vkjit.numpy as jnp
from vkjit_models.llama.model import Batch, LoraPair
from vkjit_models.lora_sft import alarms
from vkjit_models.lora_sft.config import StopSection
from vkjit_models.lora_sft.divergence import DivergenceGuard
from vkjit_models.lora_sft.evaluate import HeldOut, mean_range
from vkjit_models.lora_sft.movement import AdapterWatch, Movement, checksum
from vkjit_models.lora_sft.tally import FirstLosses, StepTally, Sums, WindowLoss, mean_change

# ------------------------------------------------------------------------------ divergence


def first_stop(losses: list[float], section: StopSection, skipped: Collection[int] = ()) -> Any:
    guard = DivergenceGuard(section)
    for step, loss in enumerate(losses, 1):
        stop = guard.see(step, loss, skipped=step in skipped)
        if stop is not None:
            return stop
    return None


def test_a_run_stops_after_patience_steps_above_factor_times_the_best() -> None:
    section = StopSection(factor=2.0, patience=3, smoothing=2)
    good = [4.0, 3.0, 2.0, 2.0]
    stop = first_stop([*good, 4.5, 9.0, 9.0, 9.0], section)
    assert (stop.kind, stop.step) == ("diverged", 7)
    assert "2 times the best smoothed one (2.0000)" in stop.message
    assert first_stop([*good, 9.0, 9.0, 3.9, 9.0, 9.0], section) is None
    assert first_stop([*good, *[4.0] * 9], section) is None


def test_a_run_that_starts_with_an_easy_window_has_not_diverged() -> None:
    uneven = [1.42, *[2.7, 2.9, 3.1, 3.5, 3.6] * 4]
    assert first_stop(uneven, StopSection(factor=2.0)) is None
    guard = DivergenceGuard(StopSection(factor=2.0, patience=3))
    guard.expect(2.7)
    stops = [guard.see(i, loss, skipped=False) for i, loss in enumerate([1.42, 2.7, 9, 12, 15], 1)]
    assert [stop.step for stop in stops if stop is not None] == [5]


def test_small_losses_and_a_factor_of_zero_never_stop() -> None:
    assert first_stop([0.1, 0.01, *[0.4] * 20], StopSection(patience=2)) is None
    assert first_stop([1.0, *[1e9] * 20], StopSection(factor=0.0, patience=2)) is None


def test_steps_that_are_not_finite_stop_a_run() -> None:
    section = StopSection(non_finite=3)
    stop = first_stop([1.0] * 9, section, skipped={3, 5, 6, 7})
    assert (stop.kind, stop.step) == ("not finite", 7)
    assert first_stop([1.0, math.nan, math.nan, 1.0, math.nan], section) is None
    assert first_stop([math.nan] * 3, section).step == 3


@given(st.lists(st.floats(0.1, 20.0), min_size=1, max_size=30), st.data())
def test_a_guard_goes_on_where_it_was_stored(losses: list[float], data: st.DataObject) -> None:
    section = StopSection(factor=1.5, patience=3, smoothing=4)
    cut = data.draw(st.integers(0, len(losses)))
    straight, first = DivergenceGuard(section), DivergenceGuard(section)
    for step, loss in enumerate(losses, 1):
        straight.see(step, loss, skipped=False)
        if step <= cut:
            first.see(step, loss, skipped=False)
    second = DivergenceGuard(section, first.stored())
    for step, loss in enumerate(losses[cut:], cut + 1):
        second.see(step, loss, skipped=False)
    assert second.stored() == straight.stored()


# -------------------------------------------------------------------------------- movement


def adapters(a: float, b: float) -> dict[str, LoraPair]:
    shape = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    return {"m.q": LoraPair(jnp.asarray(a * shape), jnp.asarray(b * shape))}


def test_checksums_norms_and_ratios_of_every_tensor() -> None:
    watch = AdapterWatch(adapters(1.0, 0.0))
    start = watch.measure(0, adapters(1.0, 0.0))
    assert start.still == ("m.q.A", "m.q.B")
    assert start.moved == 0.0
    watch.measure(5, adapters(1.0, 0.5))
    now = watch.measure(9, adapters(1.0, 0.25))
    a, b = now.tensors
    norm = math.sqrt(30.0)
    assert now.still == ("m.q.A",)
    assert (a.change, a.update_ratio, b.since_step) == (0.0, 0.0, 5)
    np.testing.assert_allclose([b.norm, b.change], [0.25 * norm] * 2, rtol=1e-6)
    np.testing.assert_allclose([b.change_ratio, b.update_ratio], [1.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose(now.moved, 0.25 / math.hypot(1.0, 0.25), rtol=1e-6)
    assert now.rows()[1]["sha256"] == checksum(np.asarray(adapters(1.0, 0.25)["m.q"].b))
    assert watch.measure(9, adapters(7.0, 7.0)) is now


def test_saves_between_two_evaluations_do_not_hide_how_far_the_adapters_came() -> None:
    watch = AdapterWatch(adapters(1.0, 0.0))
    assert watch.moved_since("probe", adapters(1.0, 0.0)) == 0.0
    for step in range(1, 9):
        watch.measure(step, adapters(1.0, 0.125 * step))
    far = 1.0 / math.hypot(1.0, 1.0)
    np.testing.assert_allclose(watch.moved_since("probe", adapters(1.0, 1.0)), far, rtol=1e-6)
    assert watch.moved_since("probe", adapters(1.0, 1.0)) == 0.0
    np.testing.assert_allclose(watch.moved_since("held-out", adapters(1.0, 1.0)), far, rtol=1e-6)
    watch.resume(8, adapters(1.0, 1.0))
    assert watch.moved_since("another", adapters(1.0, 1.0)) == 0.0


def test_a_checksum_sees_one_bit_and_no_layout() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert checksum(x) == checksum(np.asfortranarray(x))
    y = x.copy()
    y[1, 2] = np.nextafter(y[1, 2], np.float32(9.0))
    assert checksum(y) != checksum(x)


def test_frozen_modules_may_stand_still() -> None:
    watch = AdapterWatch(adapters(1.0, 1.0), frozen=["m.q"])
    assert watch.measure(30, adapters(1.0, 1.0)).still == ()


# ---------------------------------------------------------------------------------- alarms


def movement(step: int, moved: float, still: tuple[str, ...] = (), of: int = 2) -> Movement:
    state: Any = None
    return Movement(step, (state,) * of, still, moved)


def held_out(loss: float, **counts: int) -> HeldOut:
    return HeldOut(loss, 10, {}, dict(counts))


def test_a_tensor_that_did_not_move_is_an_error_after_k_steps() -> None:
    assert alarms.still_tensors(movement(19, 0.1, ("m.A",)), 20) == []
    assert alarms.still_tensors(movement(20, 0.1), 20) == []
    assert alarms.still_tensors(movement(20, 0.1, ("m.A",)), 0) == []
    (one,) = alarms.still_tensors(movement(20, 0.1, ("m.A",)), 20)
    assert (one.kind, one.level) == ("did not move", "error")
    assert "1 of 2 adapter tensors did not move in 20 steps" in one.message
    assert "m.A" in one.message


def test_losses_equal_to_four_decimals_although_the_adapters_moved() -> None:
    (one,) = alarms.flat_loss("probe", 0.1, 2.00004, 2.00001, 1e-4)
    assert (one.kind, one.level) == ("moved, loss flat", "warning")
    assert "probe loss is the same to 4 decimals (2.0000)" in one.message
    assert alarms.flat_loss("probe", 1e-5, 2.0, 2.0, 1e-4) == []
    assert alarms.flat_loss("probe", 0.1, 2.0, 2.0001, 1e-4) == []


def test_an_evaluation_that_does_not_see_the_adapter_is_an_error() -> None:
    (one,) = alarms.blind_evaluation(movement(9, 0.1), held_out(2.0), held_out(2.0), 1e-4)
    assert (one.kind, one.level) == ("evaluation blind", "error")
    assert alarms.blind_evaluation(movement(9, 1e-6), held_out(2.0), held_out(2.0), 1e-4) == []
    assert alarms.blind_evaluation(movement(9, 0.1), held_out(2.0), held_out(1.9), 1e-4) == []


def test_categories_with_few_labelled_tokens_are_named() -> None:
    (one,) = alarms.few_targets(held_out(2.0, sums=499, products=500), 500)
    assert "fewer than 500 labelled tokens: sums 499;" in one.message
    assert alarms.few_targets(held_out(2.0, sums=500), 500) == []


def test_weight_decay_that_cannot_matter() -> None:
    (one,) = alarms.weak_decay(1e-5, 0.1, 1000)
    assert "takes 1e-06 of the distance per step and 0.001 in the run" in one.message
    assert alarms.weak_decay(1e-5, 0.1, 100_000) == []
    assert alarms.weak_decay(1e-3, 0.1, 10) == []
    assert alarms.weak_decay(1e-3, 0.0, 10) == []


def test_what_is_said_of_a_finished_run() -> None:
    def said(move: Movement, off: float, on: float) -> str:
        return " ".join(x.message for x in alarms.outcome(move, held_out(off), held_out(on), 1e-4))

    assert "did not move" in said(movement(9, 0.0, ("A", "B")), 2.0, 2.0)
    assert "flat" in said(movement(9, 0.1), 2.0, 1.9999)
    assert "rose by 50.0%" in said(movement(9, 0.1), 2.0, 3.0)
    assert said(movement(9, 0.1, ("A",)), 2.0, 1.5) == ""


# ------------------------------------------------------------------------------------ sums


def batch_of(rows: list[int], categories: list[int]) -> Batch:
    segments = np.array([[0, 0, 0, 1], [2, 2, -1, -1]], np.int32)
    return Batch(None, None, None, segments, np.array(rows, np.int32), np.array(categories))


def test_a_step_is_summed_by_category_and_by_window() -> None:
    tally = StepTally(["a", "b", "c"])
    losses = np.array([1.0, 2.0, 4.0, 0.0], np.float32)
    tally.add([7, 3], batch_of([0, 1, 4, -1], [0, 1, 0, -1]), losses)
    tally.add([9, 8], batch_of([2, 5, -1, -1], [1, 1, -1, -1]), np.array([8.0, 16.0, 0.0, 0.0]))
    assert (tally.targets, tally.tokens) == (5, 12)
    assert tally.loss == 31.0 / 5.0
    row = tally.columns()
    assert (row["loss_a"], row["targets_a"]) == (2.5, 2)
    assert (row["loss_b"], row["targets_b"]) == (26.0 / 3.0, 3)
    assert math.isnan(row["loss_c"])
    assert tally.windows[:2] == [WindowLoss(7, 1.5, 2), WindowLoss(3, 4.0, 1)]
    assert [one.window for one in tally.windows] == [7, 3, 9, 8]


def test_a_window_is_compared_with_when_it_was_first_seen() -> None:
    first = FirstLosses()
    (new,) = first.changes(1, 0, [WindowLoss(4, 2.0, 3)])
    assert math.isnan(new["change"])
    first = FirstLosses(first.stored())
    again = first.changes(9, 1, [WindowLoss(4, 1.5, 3), WindowLoss(5, 9.0, 5)])
    assert (again[0]["first_loss"], again[0]["change"]) == (2.0, -0.5)
    assert mean_change(again) == -0.5
    (third,) = first.changes(12, 2, [WindowLoss(4, 1.0, 3)])
    assert third["first_loss"] == 2.0
    assert math.isnan(mean_change([new]))


# ---------------------------------------------------------------------------------- ranges


@pytest.mark.parametrize(
    ("records", "point"),
    [
        (2, 12.7062),
        (3, 4.3027),
        (4, 3.1824),
        (5, 2.7764),
        (6, 2.5706),
        (11, 2.2281),
        (31, 2.0423),
        (301, 1.9679),
    ],
)
def test_the_range_of_equal_records_is_students(records: int, point: float) -> None:
    means = np.arange(records, dtype=float)
    low, high = mean_range(Sums(7.0 * means, np.full(records, 7)))
    half = point * means.std(ddof=1) / math.sqrt(records)
    np.testing.assert_allclose(
        [(low + high) / 2, (high - low) / 2], [means.mean(), half], rtol=3e-3
    )


def test_one_record_has_no_range_and_records_without_targets_do_not_count() -> None:
    assert all(map(math.isnan, mean_range(Sums(np.array([3.0, 0.0]), np.array([2, 0])))))
    some = Sums(np.array([3.0, 0.0, 8.0]), np.array([2, 0, 3]))
    fewer = Sums(np.array([3.0, 8.0]), np.array([2, 3]))
    assert mean_range(some) == mean_range(fewer)


def test_the_range_covers_the_mean_of_uneven_records() -> None:
    random, covered, rounds = np.random.default_rng(3), 0, 400
    for _ in range(rounds):
        targets = random.integers(1, 60, 25)
        own = random.normal(2.0, 0.5, 25)  # what one record's targets have in common
        losses = np.array(
            [random.normal(m, 1.0, n).sum() for m, n in zip(own, targets, strict=True)]
        )
        low, high = mean_range(Sums(losses, targets))
        covered += low <= 2.0 <= high
    assert 0.91 <= covered / rounds <= 0.99
