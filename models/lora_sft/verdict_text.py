"""The verdict on a sweep in plain sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .sweep_outcome import Outcome
    from .verdict import Blame, Effect, Effects, Rate

_NAMED_RUNS = 6  # diverged runs that are named one by one
_SMALL = 0.01  # share of variance below which a factor is said to have no visible effect


def divergence_sentences(outcomes: Sequence[Outcome], blames: Sequence[Blame]) -> list[str]:
    """Who diverged, and by which factor."""
    bad = [one for one in outcomes if one.diverged]
    if not bad:
        return [f"No run diverged (0 of {len(outcomes)})."] if outcomes else []
    if len(bad) == len(outcomes):
        return [f"All {len(bad)} runs diverged: no level of any factor avoided it."]
    found: list[str] = []
    causes = [one for one in blames if one.separates and one.switched]
    confounded = [one for one in blames if one.separates and not one.matched]
    for one in causes:
        others = [_short(b.factor) for b in blames if b is not one]
        found.append(_separation(one, others))
    if not causes and confounded:
        names = " and ".join(_short(one.factor) for one in confounded)
        found += [_separation(one, []) for one in confounded]
        found.append(
            f"{names} never changed alone: which of all factors that changed with "
            "it caused the divergence cannot be told; add runs that change one factor."
        )
    if not causes and not confounded:
        found.append(_mixture(bad, len(outcomes), blames))
    for one in blames:
        if one not in causes and one not in confounded:
            found.append(_other(one))
    return found


def effect_sentences(effects: Effects, name: str) -> list[str]:
    """What each factor did to a number."""
    if not effects.main:
        return []
    found = [_main(one, name, effects) for one in effects.main]
    largest = max(one.share for one in effects.main)
    for one in effects.interactions:
        if one.share > largest and one.share > _SMALL:
            a, b = map(_short, one.factors)
            found.append(
                f"{a} and {b} interact: together they explain {one.share:.0%} of the variance of "
                f"the {name} beyond their own effects, more than any factor alone: the best {a} "
                f"depends on {b}."
            )
    if not effects.complete:
        found.append(
            f"Not every combination has a {name} ({effects.runs} runs have): means of levels are "
            "over different runs, shares of variance are adjusted for it."
        )
    return found


def alarms_of(
    pairs: Mapping[str, tuple[int, int, int]], must_matter: Sequence[str], decimals: int
) -> list[str]:
    """Factors whose levels give equal losses.

    Args:
        pairs: For each factor the pairs of runs that differ in it alone, those of them whose final
            held-out losses agree to ``decimals``, and those whose losses are the same bits.
        must_matter: Factors for which that cannot be.
        decimals: See ``pairs``.
    """
    found: list[str] = []
    for key, (total, near, same) in pairs.items():
        if key in must_matter and near:
            found.append(
                f"{_short(key)} must matter, but in {near} of {total} pairs of runs that differ in "
                f"it alone the final held-out losses are equal to {decimals} decimals: the loss "
                "does not react to training; check that what is evaluated is what is trained"
            )
        elif total and same == total:
            found.append(
                f"{_short(key)} changed nothing: in all {total} pairs of runs that differ in it "
                "alone the final held-out losses are the same bits; check that it is used"
            )
    return found


def level_text(value: Any) -> str:
    """A level as it is written in sentences and tables."""
    return f"{value:g}" if type(value) in (int, float) else str(value)


def _separation(one: Blame, others: Sequence[str]) -> str:
    bad = [rate for rate in one.rates if rate.diverged]
    good = [rate for rate in one.rates if not rate.diverged]
    at = f", at every {' and '.join(others)}" if others else ""
    parts = [
        f"{_short(one.factor)}={level_text(rate.level)} diverged in {rate.diverged} of "
        f"{rate.runs} runs"
        for rate in bad
    ]
    rest = ", ".join(level_text(rate.level) for rate in good)
    return f"{'; '.join(parts)}{at}; {rest} in 0 of {sum(rate.runs for rate in good)}."


def _other(one: Blame) -> str:
    name = _short(one.factor)
    if not one.matched:
        return f"{name} was never changed alone: nothing can be said of it and divergence."
    if not one.switched:
        return (
            f"{name} did not matter for divergence: changing it alone never changed the outcome "
            f"({one.matched} pairs of runs)."
        )
    return (
        f"{name} alone does not decide: {_rates(one.rates)}; changing it alone changed the outcome "
        f"in {one.switched} of {one.matched} pairs of runs."
    )


def _mixture(bad: Sequence[Outcome], total: int, blames: Sequence[Blame]) -> str:
    named = "; ".join(one.name for one in bad[:_NAMED_RUNS])
    named += f" and {len(bad) - _NAMED_RUNS} more" if len(bad) > _NAMED_RUNS else ""
    text = f"{len(bad)} of {total} runs diverged and no factor alone decides which: {named}."
    shares = {b.factor: b.switched / b.matched for b in blames if b.matched}
    if not shares or not max(shares.values()):
        return text
    most = [_short(key) for key, share in shares.items() if share == max(shares.values())]
    weigh = "weighs" if len(most) == 1 else "weigh"
    return f"{text} {' and '.join(most)} {weigh} most."


def _rates(rates: Sequence[Rate]) -> str:
    return ", ".join(f"{r.diverged} of {r.runs} at {level_text(r.level)}" for r in rates)


def _main(one: Effect, name: str, effects: Effects) -> str:
    means = ", ".join(f"{mean:.4f} at {level_text(level)}" for level, mean, _ in one.means)
    text = (
        f"{_short(one.factor)} explains {one.share:.0%} of the variance of the {name}: {means}, "
        f"a range of {one.spread:.4f}"
    )
    if math.isfinite(effects.noise):
        fewest = min(count for _, _, count in one.means)
        limit = 2.0 * effects.noise * math.sqrt(2.0 / fewest)
        if one.spread <= limit:
            return f"{text}, within the noise of the seeds ({limit:.4f}): no effect is shown."
        if effects.noise:
            return f"{text}, {one.spread / effects.noise:.1f} times the seeds' noise."
    if one.share < _SMALL:
        return f"{text}: no visible effect beside the others."
    return f"{text}."


def _short(key: str) -> str:
    return key.rpartition(".")[2]
