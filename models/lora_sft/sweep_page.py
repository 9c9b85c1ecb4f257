"""The results of a sweep as Markdown and as one HTML page that loads nothing from anywhere."""

from __future__ import annotations

import html
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vkjit_models.common.steplog import read_steplog

from .charts import ticks
from .plot import SMOOTHING, numbers, running_mean
from .sweep_config import SweepConfig, SweepRun
from .sweep_outcome import Outcome
from .verdict import METRICS, Verdict, levels, short
from .verdict_text import level_text

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --soft: #8881; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid var(--line); text-align: right; }
th { font-weight: 600; } .alarm { border-left: .3rem solid #d33; padding: .4rem .8rem; }
.heat td { color: #111; min-width: 6rem; text-align: center; border: 1px solid #fff; }
.many { display: flex; flex-wrap: wrap; gap: .6rem; } figure { margin: 0; }
figcaption { font-size: .8rem; }
pre { background: var(--soft); padding: .8rem; overflow-x: auto; font-size: 13px; }
"""
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 270, 150, 34, 16
_MOST_POINTS = 240


def markdown(config: SweepConfig, outcomes: Sequence[Outcome], verdict: Verdict) -> str:
    """The verdict, then the table of all runs."""
    heads, rows = _rows(config, outcomes)
    lines = [f"# Sweep {config.name}", "", "## Verdict", ""]
    lines += [f"- {sentence}" for sentence in verdict.sentences]
    lines += [f"- **alarm**: {alarm}" for alarm in verdict.alarms]
    lines += ["", "## Runs", "", _line(heads), _line(["---:"] * len(heads))]
    lines += [_line(row) for row in rows]
    notes = [f"- {one.name}: {one.note}" for one in outcomes if one.note]
    return "\n".join([*lines, *(["", *notes] if notes else [])]) + "\n"


def page(config: SweepConfig, outcomes: Sequence[Outcome], verdict: Verdict) -> str:
    """The page: verdict, table, heat maps, curves, the config of the first run."""
    heads, rows = _rows(config, outcomes)
    said = "".join(f"<li>{html.escape(one)}</li>" for one in verdict.sentences)
    alarms = "".join(f'<p class="alarm">{html.escape(one)}</p>' for one in verdict.alarms)
    parts = [
        f"<h1>Sweep {html.escape(config.name)}</h1>\n<h2>Verdict</h2>\n<ul>{said}</ul>{alarms}",
        f"<h2>Runs</h2>\n{_table(heads, rows)}",
        _heat_maps(config, outcomes),
        _curves(config),
        _config(config),
    ]
    title = html.escape(f"sweep {config.name}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{''.join(parts)}</body></html>\n"
    )


def _rows(config: SweepConfig, outcomes: Sequence[Outcome]) -> tuple[list[str], list[list[str]]]:
    heads = [
        *map(short, config.factors), "outcome", "steps", "held out, base", "held out, after",
        "training, last steps", "probe change", "largest gradient", "tok/s",
    ]  # fmt: skip
    rows = [
        [
            *(level_text(one.values[key]) for key in config.factors), one.status, str(one.steps),
            _number(one.before), _number(one.loss), _number(one.train_loss),
            _number(one.probe_change, "+.4f"), _number(one.gradient_norm, ".3g"),
            _number(one.tokens_per_second, ",.0f"),
        ]
        for one in outcomes
    ]  # fmt: skip
    return heads, rows


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(one)}</th>" for one in heads)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>\n"


def _heat_maps(config: SweepConfig, outcomes: Sequence[Outcome]) -> str:
    """For each pair of factors and each number a map of the cells' means."""
    parts: list[str] = []
    varied = [key for key in config.factors if len(levels(outcomes, key)) > 1]
    for pair in itertools.combinations(varied, 2):
        for metric, name in METRICS.items():
            parts.append(_heat_map(outcomes, pair, metric, name))
    return f"<h2>Pairs of factors</h2>\n{''.join(parts)}" if parts else ""


def _heat_map(outcomes: Sequence[Outcome], pair: tuple[str, str], metric: str, name: str) -> str:
    down, across = (levels(outcomes, key) for key in pair)

    def at(a: Any, b: Any) -> list[Outcome]:
        return [one for one in outcomes if one.values[pair[0]] == a and one.values[pair[1]] == b]

    cells = {(i, j): at(a, b) for i, a in enumerate(down) for j, b in enumerate(across)}
    means = {place: _mean([getattr(one, metric) for one in runs]) for place, runs in cells.items()}
    finite = [value for value in means.values() if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    head = "".join(f"<th>{html.escape(level_text(b))}</th>" for b in across)
    body = ""
    for i, a in enumerate(down):
        row = "".join(_cell(cells[i, j], means[i, j], (low, high)) for j in range(len(across)))
        body += f"<tr><th>{html.escape(level_text(a))}</th>{row}</tr>"
    caption = f"{name}: {short(pair[0])} down, {short(pair[1])} across"
    return (
        f"<figure><figcaption>{html.escape(caption)}</figcaption>"
        f'<table class="heat"><tr><th></th>{head}</tr>{body}</table></figure>\n'
    )


def _cell(runs: Sequence[Outcome], mean: float, ends: tuple[float, float]) -> str:
    """Pale for the least, dark for the largest; red where runs diverged, grey where none is."""
    bad = sum(one.diverged for one in runs)
    text = f"{mean:.4f}" if math.isfinite(mean) else "no run"
    colour = "#ccc"
    if math.isfinite(mean):
        share = (mean - ends[0]) / (ends[1] - ends[0]) if ends[1] > ends[0] else 0.0
        colour = f"hsl(210 70% {92 - 42 * share:.0f}%)"
    if bad:
        text = "diverged" if bad == len(runs) else f"{text}, {bad} diverged"
        colour = "#f2a0a0"
    return f'<td style="background:{colour}">{text}</td>'


def _curves(config: SweepConfig) -> str:
    """A small picture for each run, all with the same axes."""
    found = [(run, _losses(run)) for run in config.runs]
    shown = [(run, curves) for run, curves in found if curves is not None]
    if not shown:
        return ""
    first = max(curves[0][1][0] for _, curves in shown)
    ends = [y for _, curves in shown for curve in curves for y in curve[1] if math.isfinite(y)]
    # One diverged run must not flatten the others: what is above is cut off.
    low, high = min(ends), min(max(ends), 1.6 * first)
    last = max(x for _, curves in shown for curve in curves for x in curve[0])
    width = _WIDTH - _LEFT - 4

    def place(x: float, y: float) -> tuple[float, float]:
        share = (min(y, high) - low) / ((high - low) or 1.0)
        return _LEFT + x / (last or 1.0) * width, 6 + (1.0 - share) * (_HEIGHT - _BOTTOM - 6)

    pictures = "".join(_picture(run.name, curves, place, (low, high)) for run, curves in shown)
    note = (
        f"thin: loss of each step, mean of {SMOOTHING}; dots: held out. Same axes for all; "
        f"losses above {high:.3g} are drawn at the top."
    )
    return f'<h2>Curves</h2>\n<p>{note}</p><div class="many">{pictures}</div>\n'


_Curve = tuple[list[float], list[float]]


def _losses(run: SweepRun) -> tuple[_Curve, _Curve] | None:
    """Training and held-out losses by step; None for a run without a step."""
    folder: Path = run.config.output.folder
    if not (folder / "steps.csv").exists() or not (folder / "held_out.csv").exists():
        return None
    steps, held_out = read_steplog(folder / "steps.csv"), read_steplog(folder / "held_out.csv")
    if not steps["step"]:
        return None
    x, y = numbers(steps["step"]), running_mean(numbers(steps["loss"]), SMOOTHING)
    skip = -(-len(x) // _MOST_POINTS)
    return (x[::skip], y[::skip]), (numbers(held_out["step"]), numbers(held_out["loss"]))


def _picture(
    name: str,
    curves: tuple[_Curve, _Curve],
    place: Callable[[float, float], tuple[float, float]],
    ends: tuple[float, float],
) -> str:
    (x, y), (hx, hy) = curves
    points = " ".join(
        f"{a:.1f},{b:.1f}"
        for a, b in (place(*one) for one in zip(x, y, strict=True) if math.isfinite(one[1]))
    )
    dots = "".join(
        f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="#e07b00"/>'
        for a, b in (place(*one) for one in zip(hx, hy, strict=True) if math.isfinite(one[1]))
    )
    grid = "".join(
        f'<line x1="{_LEFT}" x2="{_WIDTH - 4}" y1="{b:.1f}" y2="{b:.1f}" stroke="currentColor" '
        f'stroke-opacity=".15"/><text x="{_LEFT - 4}" y="{b + 3:.1f}" '
        f'text-anchor="end">{value:.3g}</text>'
        for value in (ticks(*ends, 3) if ends[1] > ends[0] else ())
        for _, b in [place(0.0, value)]
    )
    return (
        f"<figure><figcaption>{html.escape(name)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'font-size="9" fill="currentColor"><title>{html.escape(name)}</title>{grid}'
        f'<polyline points="{points}" fill="none" stroke="#2166ac" stroke-width="1.4"/>{dots}'
        f'<text x="{_WIDTH - 4}" y="{_HEIGHT - 3}" text-anchor="end">step {x[-1]:.0f}</text>'
        "</svg></figure>\n"
    )


def _config(config: SweepConfig) -> str:
    content = config.runs[0].config.resolved()
    del content["output"]
    text = json.dumps(content, indent=2)
    return (
        "<details><summary>All settings of the first run; the others differ in the table's "
        f"factors</summary><pre>{html.escape(text)}</pre></details>\n"
    )


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _number(value: float, form: str = ".4f") -> str:
    return format(value, form) if math.isfinite(value) else "none"
