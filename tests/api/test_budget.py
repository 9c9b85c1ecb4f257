"""Memory budgets: plans that fit, with the same results; errors that say what would; reports."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as vnp
from vkjit.api.budget import parse_budget
from vkjit.api.memory import HeldAs
from vkjit.errors import ArgumentError, MemoryBudgetError

LAYERS, WIDTH, ROWS = 10, 8, 128


def body(weights: list[Any], x: Any) -> Any:
    for w in weights:
        x = vnp.tanh(x @ w)
    return x


def step(weights: list[Any], x: Any, inner: Any = body) -> Any:
    value, grads = vj.value_and_grad(lambda ws: vnp.sum(inner(ws, x) ** 2))(weights)
    return value, [w - 0.1 * g for w, g in zip(weights, grads, strict=True)]


def arguments() -> tuple[list[Any], Any]:
    rng = np.random.default_rng(5)
    weights = [rng.normal(0, 0.3, (WIDTH, WIDTH)).astype(np.float32) for _ in range(LAYERS)]
    return weights, rng.normal(size=(ROWS, WIDTH)).astype(np.float32)


def budget(part: float) -> int:
    """All but the arena, and a part of that."""
    plan = vj.jit(step).lower(*arguments()).plan
    return plan.peak_bytes - int(plan.arena_bytes * (1 - part))


def equal(a: Any, b: Any) -> bool:
    pairs = zip(vj.tree.leaves(a), vj.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def test_a_budget_is_met_with_the_same_bits(device: str) -> None:
    with vj.default_device(device):
        limit = budget(0.6)
        bounded = vj.jit(step, memory_budget=limit)
        assert bounded.lower(*arguments()).memory().peak <= limit
        assert equal(bounded(*arguments()), vj.jit(step)(*arguments()))


def test_an_ample_budget_changes_nothing() -> None:
    plain = vj.jit(step).lower(*arguments())
    ample = vj.jit(step, memory_budget=plain.plan.peak_bytes).lower(*arguments())
    assert len(ample.program.eqns) == len(plain.program.eqns)


def test_the_same_call_gives_the_same_plan() -> None:
    plans = [vj.jit(step, memory_budget=budget(0.6)).lower(*arguments()) for _ in range(2)]
    assert plans[0].as_text() == plans[1].as_text()
    assert plans[0].as_text("plan") == plans[1].as_text("plan")


def test_the_smallest_budget_that_an_error_names_is_met() -> None:
    with pytest.raises(MemoryBudgetError, match="expected at least") as caught:
        vj.jit(step, memory_budget=budget(0.05))(*arguments())
    smallest = caught.value.smallest
    assert f"{smallest:,}" in str(caught.value)
    bounded = vj.jit(step, memory_budget=smallest)
    assert bounded.lower(*arguments()).memory().peak <= smallest < budget(0.75)
    assert equal(bounded(*arguments()), vj.jit(step)(*arguments()))


def test_an_error_says_what_takes_memory() -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        vj.jit(step, memory_budget=1000)(*arguments())
    text = str(caught.value)
    weights, x = arguments()
    given = sum(w.nbytes for w in weights) + x.nbytes
    assert f"{given:,}  arguments" in text
    assert re.search(
        rf"(saved|temporary|recomputed): \d+ of \w+ at {re.escape(__file__)}:\d+", text
    )
    rows = [int(n.replace(",", "")) for n in re.findall(r"^ +([\d,]+)  \w", text, re.MULTILINE)]
    assert sum(rows) == caught.value.smallest


def test_only_functions_with_a_budget_are_computed_again() -> None:
    def marked(weights: list[Any], x: Any) -> Any:
        return step(weights, x, vj.remat(body, budget=budget(0.7)))

    bounded = vj.jit(marked).lower(*arguments())
    assert bounded.memory().peak <= budget(0.7)
    assert equal(vj.jit(marked)(*arguments()), vj.jit(step)(*arguments()))

    def beside(weights: list[Any], x: Any) -> Any:
        first = vj.remat(lambda v: v * 2, budget=budget(0.7))(x)
        return step(weights, first)

    with pytest.raises(MemoryBudgetError):
        vj.jit(beside).lower(*arguments())


def test_remat_without_a_budget_is_checkpoint() -> None:
    text = str(vj.make_ir(vj.grad(lambda x: vnp.sum(vj.remat(vnp.sin)(x))))(np.ones(3)))
    assert text == str(
        vj.make_ir(vj.grad(lambda x: vnp.sum(vj.checkpoint(vnp.sin)(x))))(np.ones(3))
    )
    with pytest.raises(ArgumentError, match="expected one of both"):
        vj.remat(vnp.sin, budget="1GB", policy=lambda *_: True)


def test_two_budgets_of_one_call_count_as_the_smaller_one() -> None:
    inner = vj.remat(body, budget=budget(0.6))
    bounded = vj.jit(lambda w, x: step(w, x, inner), memory_budget=budget(0.9))
    assert bounded.lower(*arguments()).memory().peak <= budget(0.6)


def test_donated_arguments_need_no_memory_twice() -> None:
    donating = vj.jit(step, donate_argnums=0).lower(*arguments())
    limit = donating.plan.peak_bytes - donating.plan.arena_bytes // 3
    bounded = vj.jit(step, donate_argnums=0, memory_budget=limit).lower(*arguments())
    assert bounded.memory().peak <= limit
    assert bounded.memory().donated == donating.memory().donated > 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (4096, 4096),
        ("4GiB", 4 << 30),
        ("4GB", 4 * 10**9),
        ("1.5 MiB", 3 << 19),
        ("512mib", 512 << 20),
        ("100", 100),
        ("80%", 800),
        ("7 B", 7),
        (np.int64(5), 5),
    ],
)
def test_budgets_are_read(text: int | str, expected: int) -> None:
    assert parse_budget(text, limit=1000) == expected


@pytest.mark.parametrize(
    "text", [0, -1, True, 1.5, "", "many", "4 potatoes", "-3MB", "80%", "4iB", "0", "0.0MB"]
)
def test_other_budgets_are_refused(text: Any) -> None:
    with pytest.raises(ArgumentError, match="expected bytes"):
        parse_budget(text)


def test_no_budget_a_little_below_the_smallest_is_met() -> None:
    w, x = np.ones((64, 64), np.float32), np.ones((32, 64), np.float32)

    def loss(w: Any) -> Any:
        h = x
        for _ in range(8):
            h = vnp.tanh(vnp.sin(h @ w))
        return (h * h).sum()

    def peak(budget: int) -> int:
        return vj.jit(vj.grad(loss), memory_budget=budget).lower(w).memory().peak

    with pytest.raises(MemoryBudgetError) as refused:
        peak(1000)
    least = refused.value.smallest
    assert peak(least) == least
    with pytest.raises(MemoryBudgetError):
        peak(int(least * 0.99))


def test_a_budget_is_read_before_the_first_call() -> None:
    with pytest.raises(ArgumentError, match="expected bytes"):
        vj.jit(step, memory_budget="much")


# -- reports --------------------------------------------------------------------------------------


def test_a_report_tells_the_peak_by_line() -> None:
    report = vj.memory_report(step, *arguments())
    plan = vj.jit(step).lower(*arguments())
    assert report.peak_bytes == plan.plan.peak_bytes
    live = report.over_time()
    assert live.max() == live[report.peak_step] <= report.peak_bytes
    assert live.max() == plan.memory().live_temporaries + report.peak_bytes - report.arena_bytes
    lines = report.by_line()
    assert sum(line.nbytes for line in lines) == live.max()
    saved = next(line for line in lines if line.kind is HeldAs.SAVED)
    assert saved.made == "tanh"
    assert saved.count >= LAYERS - 1
    assert saved.nbytes == saved.count * ROWS * WIDTH * 4
    line = int(saved.source.rpartition(":")[2])
    assert "tanh" in Path(__file__).read_text(encoding="utf8").splitlines()[line - 1]
    text = str(report)
    assert f"{saved.nbytes:,}" in text
    assert f"step {report.peak_step} of {report.steps}" in text


def test_a_report_of_a_bounded_call_tells_what_is_computed_again() -> None:
    bounded = vj.jit(step, memory_budget=budget(0.6))
    before, after = (vj.memory_report(f, *arguments()) for f in (step, bounded))
    assert not before.over_time(HeldAs.RECOMPUTED).any()
    assert after.over_time(HeldAs.RECOMPUTED).max() >= ROWS * WIDTH * 4
    assert after.over_time(HeldAs.SAVED).max() < before.over_time(HeldAs.SAVED).max()


def test_temporaries_of_a_report_never_share_a_byte_at_one_time() -> None:
    report = vj.jit(step, memory_budget=budget(0.6)).lower(*arguments()).memory_report()
    outside = (HeldAs.ARGUMENT, HeldAs.OUTPUT, HeldAs.CONSTANT)
    held = [h for h in report.held if h.kind not in outside]
    for n, a in enumerate(held):
        for b in held[n + 1 :]:
            apart = a.last < b.first or b.last < a.first
            assert apart or a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset


@pytest.mark.parametrize(("suffix", "begins"), [(".png", b"\x89PNG\r\n"), (".svg", b"<?xml")])
def test_a_report_is_drawn(tmp_path: Path, suffix: str, begins: bytes) -> None:
    path = tmp_path / f"memory{suffix}"
    vj.memory_report(step, *arguments()).save(path)
    content = path.read_bytes()
    assert content.startswith(begins)
    assert 10_000 < len(content) < 1_000_000
