"""Levels keep every dependency, hold every step once, and do not let memory grow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vkjit.lowering.plan.memory import lifetimes, live_peak
from vkjit.lowering.plan.order import Use, by_levels

ARRAYS = st.lists(st.integers(0, 9), max_size=3, unique=True).map(tuple)
USES = st.lists(st.builds(Use, ARRAYS, ARRAYS), max_size=60)


def conflict(a: Use, b: Use) -> bool:
    return bool(set(a.writes) & {*b.reads, *b.writes} or set(b.writes) & {*a.reads, *a.writes})


@given(USES)
def test_conflicting_steps_keep_their_order_and_stand_in_different_levels(uses: list[Use]) -> None:
    levels = by_levels(uses, {})
    level_of = {step: n for n, level in enumerate(levels) for step in level}
    assert sorted(level_of) == list(range(len(uses)))
    assert sum(map(len, levels)) == len(uses)
    for later, b in enumerate(uses):
        for earlier, a in enumerate(uses[:later]):
            if conflict(a, b):
                assert level_of[earlier] < level_of[later]


@given(USES, st.lists(st.integers(1, 1000), min_size=10, max_size=10))
def test_the_peak_grows_by_little(uses: list[Use], sizes: list[int]) -> None:
    known = dict(enumerate(sizes))
    levels = by_levels(uses, known)
    touched = [[a for n in level for a in (*uses[n].reads, *uses[n].writes)] for level in levels]
    before = live_peak(lifetimes([(*u.reads, *u.writes) for u in uses], known))
    assert live_peak(lifetimes(touched, known)) <= 1.03 * before


def test_independent_chains_run_side_by_side() -> None:
    chains = [Use((), (chain,)) if n == 0 else Use((chain,), (chain,))
              for chain in range(3) for n in range(4)]  # fmt: skip
    assert [len(level) for level in by_levels(chains, {})] == [3, 3, 3, 3]


def test_large_temporaries_keep_chains_apart() -> None:
    """Each chain makes an array and folds it; side by side they would take thrice the memory."""
    chains = [use for c in range(3) for use in (Use((), (c,)), Use((c,), (10 + c,)))]
    sizes = {0: 1000, 1: 1000, 2: 1000}
    assert [len(level) for level in by_levels(chains, sizes)] == [1] * 6
    assert [len(level) for level in by_levels(chains, {})] == [3, 3]
