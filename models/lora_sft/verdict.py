"""Which factor of a sweep caused what: divergence, the final losses, or nothing.

Divergence is blamed on a factor where its level alone separates the runs that diverged from those
that did not, and where changing it alone, all others held fixed, changed the outcome. For losses,
main effects are sums of squares of the additive model over the levels of all factors that a factor
takes away from the residual (Yates 1934; equal to the usual ones where every combination ran), and
an interaction is what a pair's cells take away beyond them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from .sweep_config import SEED
from .sweep_outcome import Outcome
from .verdict_text import alarms_of, divergence_sentences, effect_sentences

DECIMALS = 4
"""Losses that agree in so many decimals are called equal."""
METRICS = {"loss": "final held-out loss", "probe_change": "change of the probe's loss"}
"""What main effects are told of, and what it is called."""
MUST_MATTER = (
    "optimizer.learning_rate", "lora.rank", "lora.alpha", "loss.kl_weight", "train.steps",
)  # fmt: skip
"""Factors whose levels cannot give equal losses."""


@final
@dataclass(frozen=True)
class Rate:
    """How many of the runs at a level diverged."""

    level: Any
    diverged: int
    runs: int


@final
@dataclass(frozen=True)
class Blame:
    """What a factor has to do with divergence.

    Args:
        factor: Its key.
        rates: By level.
        separates: Whether each level has only runs that diverged or only others, and both occur.
        matched: Pairs of runs that differ in this factor alone.
        switched: Those of them of which one diverged and the other did not.
    """

    factor: str
    rates: tuple[Rate, ...]
    separates: bool
    matched: int
    switched: int


@final
@dataclass(frozen=True)
class Effect:
    """What a factor does to a number.

    Args:
        factor: Its key.
        means: Level, mean and number of runs, in the order of the sweep.
        spread: The largest mean less the smallest.
        share: Part of the runs' variance, 0 to 1.
    """

    factor: str
    means: tuple[tuple[Any, float, int], ...]
    spread: float
    share: float


@final
@dataclass(frozen=True)
class Interaction:
    """What two factors do together beyond the sum of what each does."""

    factors: tuple[str, str]
    share: float


@final
@dataclass(frozen=True)
class Effects:
    """All effects on one number.

    Args:
        metric: The attribute of `Outcome`.
        main: By factor, the largest share first.
        interactions: By pair, the largest share first.
        noise: Standard deviation between seeds, all else equal and each seed's own level taken
            off; NaN without seeds.
        runs: How many have the number.
        complete: Whether every combination of the levels ran equally often.
    """

    metric: str
    main: tuple[Effect, ...]
    interactions: tuple[Interaction, ...]
    noise: float
    runs: int
    complete: bool


@final
@dataclass(frozen=True)
class Verdict:
    """What the sweep shows.

    Args:
        sentences: In plain words.
        alarms: Signs that a number does not measure what was changed.
        blames: Divergence, by factor.
        effects: By number.
    """

    sentences: tuple[str, ...]
    alarms: tuple[str, ...]
    blames: tuple[Blame, ...]
    effects: tuple[Effects, ...]


def judge(outcomes: Sequence[Outcome], factors: Sequence[str]) -> Verdict:
    """The verdict on the runs that came to an end; missing and failed ones are counted only."""
    known = [one for one in outcomes if one.ended]
    causes = [key for key in factors if key != SEED]
    sentences: list[str] = []
    if len(known) < len(outcomes):
        sentences.append(
            f"{len(outcomes) - len(known)} of {len(outcomes)} runs are missing or failed; the "
            "verdict is on the others."
        )
    single = [key for key in causes if len(levels(known, key)) < 2]
    sentences += [
        f"{short(key)} had one level: nothing can be said of it." for key in single if known
    ]
    causes = [key for key in causes if key not in single]
    blames = tuple(blame(known, factors, key) for key in causes)
    sentences += divergence_sentences(known, blames)
    effects = tuple(effects_on(metric, known, causes) for metric in METRICS)
    for one in effects:
        sentences += effect_sentences(one, METRICS[one.metric])
    pairs = {key: _equal_pairs(known, factors, key) for key in causes}
    alarms = alarms_of(pairs, MUST_MATTER, DECIMALS)
    return Verdict(tuple(sentences), tuple(alarms), blames, effects)


def short(key: str) -> str:
    """The last part of a key."""
    return key.rpartition(".")[2]


def levels(outcomes: Sequence[Outcome], key: str) -> list[Any]:
    """The different values of a factor, in the order of the runs."""
    found: dict[str, Any] = {}
    for one in outcomes:
        found.setdefault(_mark(one.values[key]), one.values[key])
    return list(found.values())


def blame(outcomes: Sequence[Outcome], factors: Sequence[str], key: str) -> Blame:
    """What ``key`` has to do with divergence; ``factors`` are all that may differ."""
    rates: list[Rate] = []
    for level in levels(outcomes, key):
        at = [one.diverged for one in outcomes if _mark(one.values[key]) == _mark(level)]
        rates.append(Rate(level, sum(at), len(at)))
    pure = all(rate.diverged in (0, rate.runs) for rate in rates)
    both = {bool(rate.diverged) for rate in rates} == {False, True}
    pairs = matched_pairs(outcomes, factors, key)
    switched = sum(a.diverged != b.diverged for a, b in pairs)
    return Blame(key, tuple(rates), pure and both, len(pairs), switched)


def matched_pairs(
    outcomes: Sequence[Outcome], factors: Sequence[str], key: str
) -> list[tuple[Outcome, Outcome]]:
    """Pairs of runs that differ in ``key`` and in no other factor."""
    others = [other for other in factors if other != key]
    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for one in outcomes:
        groups.setdefault(tuple(_mark(one.values[other]) for other in others), []).append(one)
    return [pair for group in groups.values() for pair in itertools.combinations(group, 2)]


def effects_on(metric: str, outcomes: Sequence[Outcome], factors: Sequence[str]) -> Effects:
    """Main effects, interactions and noise of a number over the runs that have it."""
    runs = [
        one for one in outcomes if not one.diverged and math.isfinite(float(getattr(one, metric)))
    ]
    values = np.array([float(getattr(one, metric)) for one in runs])
    varied = [key for key in factors if len(levels(runs, key)) > 1]
    blocks = [_columns(runs, (SEED,))] if _has_seeds(runs) else []
    columns = {key: _columns(runs, (key,)) for key in varied}
    total = _residual(values, blocks)
    additive = [*blocks, *columns.values()]
    left = _residual(values, additive)
    main = [
        Effect(key, means, _spread(means), _share(
            _residual(values, [*blocks, *(c for k, c in columns.items() if k != key)]) - left, total
        ))
        for key in varied
        for means in [_means(runs, values, key)]
    ]  # fmt: skip
    interactions = [
        Interaction(
            pair, _share(left - _residual(values, [*additive, _columns(runs, pair)]), total)
        )
        for pair in itertools.combinations(varied, 2)
    ]
    main.sort(key=_share_of, reverse=True)
    interactions.sort(key=_share_of, reverse=True)
    cells = [sum(1 for one in runs if _cell(one, varied) == cell) for cell in _cells(runs, varied)]
    full = math.prod(len(levels(runs, key)) for key in varied)
    complete = len(cells) == full and len(set(cells)) <= 1
    noise = _noise(runs, values, varied)
    return Effects(metric, tuple(main), tuple(interactions), noise, len(runs), complete)


def _share_of(one: Effect | Interaction) -> float:
    return one.share


def _equal_pairs(
    outcomes: Sequence[Outcome], factors: Sequence[str], key: str
) -> tuple[int, int, int]:
    """Pairs that differ in ``key`` alone; those with equal losses to 4 decimals; to the bit."""
    pairs = [
        (a.loss, b.loss)
        for a, b in matched_pairs(outcomes, factors, key)
        if math.isfinite(a.loss) and math.isfinite(b.loss)
    ]
    near = sum(round(a, DECIMALS) == round(b, DECIMALS) for a, b in pairs)
    return len(pairs), near, sum(a == b for a, b in pairs)


def _means(
    runs: Sequence[Outcome], values: NDArray[np.float64], key: str
) -> tuple[tuple[Any, float, int], ...]:
    found: list[tuple[Any, float, int]] = []
    for level in levels(runs, key):
        at = np.array([_mark(one.values[key]) == _mark(level) for one in runs])
        found.append((level, float(values[at].mean()), int(at.sum())))
    return tuple(found)


def _spread(means: Sequence[tuple[Any, float, int]]) -> float:
    numbers = [mean for _, mean, _ in means]
    return max(numbers) - min(numbers)


def _columns(runs: Sequence[Outcome], keys: Sequence[str]) -> NDArray[np.float64]:
    """Indicators of the levels of one factor, or of the cells of two; (runs, levels)."""
    cells = _cells(runs, keys)
    return np.array([[float(_cell(one, keys) == cell) for cell in cells] for one in runs])


def _residual(values: NDArray[np.float64], parts: Sequence[NDArray[np.float64]]) -> float:
    """Sum of squares that the mean and ``parts`` leave."""
    if not len(values):
        return 0.0
    design = np.concatenate([np.ones((len(values), 1)), *parts], axis=1)
    fitted = design @ np.linalg.lstsq(design, values, rcond=None)[0]
    return float(np.square(values - fitted).sum())


def _share(part: float, total: float) -> float:
    return max(part, 0.0) / total if total > 1e-20 else 0.0


def _noise(runs: Sequence[Outcome], values: NDArray[np.float64], varied: Sequence[str]) -> float:
    """Standard deviation between seeds within a cell, each seed's own level taken off."""
    if not _has_seeds(runs):
        return math.nan
    cells, seeds = len(_cells(runs, varied)), len(_cells(runs, (SEED,)))
    freedom = len(runs) - cells - (seeds - 1)
    if freedom < 1:
        return math.nan
    parts = [_columns(runs, (SEED,)), _columns(runs, varied)] if varied else []
    return math.sqrt(_residual(values, parts) / freedom)


def _has_seeds(runs: Sequence[Outcome]) -> bool:
    return bool(runs) and SEED in runs[0].values and len(levels(runs, SEED)) > 1


def _cells(runs: Sequence[Outcome], keys: Sequence[str]) -> list[tuple[str, ...]]:
    return list(dict.fromkeys(_cell(one, keys) for one in runs))


def _cell(one: Outcome, keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(_mark(one.values[key]) for key in keys)


def _mark(value: Any) -> str:
    """What two equal levels have in common: 0 and 0.0 are one."""
    if isinstance(value, Mapping):
        return repr(sorted(value.items()))
    return repr(float(value)) if type(value) in (int, float) else repr(value)
