"""The run's report: one HTML file without links to anything outside, made from the run's files.

It can be made again at any time, also of a run that was killed: nothing but the folder is read.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vkjit.errors import DataError
from vkjit_models.common.atomic import write_atomic
from vkjit_models.common.steplog import read_json_lines, read_steplog

from .charts import Mark, Series, line_chart
from .loop import median_and_spread
from .plot import SMOOTHING, numbers, running_mean
from .receipt import MIB
from .record import NAME as RECORD

REPORT = "report.html"
Log = dict[str, list[float | str]]

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --soft: #8881; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid var(--line); text-align: left; }
td.n, th.n { text-align: right; } code, pre { font: 13px/1.45 ui-monospace, monospace; }
pre { background: var(--soft); padding: .8rem; overflow-x: auto; }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; }
.card { background: var(--soft); padding: .6rem 1rem; border-radius: .4rem; }
.card b { display: block; font-size: 1.25rem; }
.error { border-left: .3rem solid #d33; } .warning { border-left: .3rem solid #e90; }
.alarm { padding: .4rem .8rem; margin: .4rem 0; background: var(--soft); }
figure { margin: .8rem 0; } figcaption { font-size: .9rem; opacity: .8; }
svg { max-width: 100%; height: auto; } .scroll { max-height: 26rem; overflow: auto; }
"""


def write_report(folder: Path) -> Path:
    """Writes ``report.html`` into a run's folder from the files in it.

    Raises:
        DataError: The folder holds no ``run.json`` or no step log.
    """
    record = _json(folder / RECORD)
    events = read_json_lines(folder / "events.jsonl")
    logs = {
        name: read_steplog(folder / f"{name}.csv")
        for name in ("steps", "held_out", "probe", "adapters")
    }
    result = folder / "result.json"
    sections = [
        _head(folder.resolve().name, record, logs),
        _alarms(events),
        _curves(logs, events),
        _categories(logs, _json(result) if result.exists() else {}),
        _probe(logs["probe"]),
        _memory(record, logs["steps"]),
        _adapters(record["adapters"], logs["adapters"]),
        _config(_json(folder / "config.json")),
        _receipts(record, logs["steps"]),
    ]
    title = html.escape(folder.resolve().name)
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body>\n{''.join(sections)}</body></html>\n"
    )
    path = folder / REPORT
    write_atomic(path, page.encode())
    return path


def _head(name: str, record: Mapping[str, Any], logs: Mapping[str, Log]) -> str:
    steps, held_out = logs["steps"], logs["held_out"]
    done = int(float(steps["step"][-1])) if steps["step"] else 0
    status = str(record["status"])
    if status == "running":
        status = "running, or killed"
    cards = [("status", status), ("steps", f"{done} of {record['steps']}")]
    if held_out["step"]:
        last = {key: float(column[-1]) for key, column in held_out.items()}
        bounds = f"{last['perplexity_low']:.2f} to {last['perplexity_high']:.2f}"
        cards += [
            ("held-out loss, adapter off and on", f"{last['loss_off']:.4f} → {last['loss']:.4f}"),
            (
                f"perplexity on {last['targets']:,.0f} labelled tokens "
                f"({last['records']:.0f} records), 95% range",
                f"{last['perplexity']:.2f} ({bounds})",
            ),
        ]
    if steps["step"]:
        cards.append(("tokens per second, median (10% to 90%)", _rate(steps["tokens_per_second"])))
        cards.append(("labelled, median (10% to 90%)", _rate(steps["targets_per_second"])))
        cards.append(("peak memory of the process", _size(numbers(steps["process_bytes"])[-1])))
    boxes = "".join(
        f'<div class="card"><b>{html.escape(value)}</b>{html.escape(label)}</div>'
        for label, value in cards
    )
    return f'<h1>Run {html.escape(name)}</h1>\n<div class="cards">{boxes}</div>\n'


def _alarms(events: Sequence[Mapping[str, Any]]) -> str:
    found = [event for event in events if event.get("event") == "alarm"]
    if not found:
        return "<h2>Alarms</h2>\n<p>None.</p>\n"
    lines = "".join(
        f'<div class="alarm {html.escape(one["level"])}"><b>{html.escape(one["kind"])}</b> '
        f"(step {one['step']}): {html.escape(one['message'])}</div>\n"
        for one in found
    )
    return f"<h2>Alarms</h2>\n{lines}"


def _curves(logs: Mapping[str, Log], events: Sequence[Mapping[str, Any]]) -> str:
    steps, held_out = logs["steps"], logs["held_out"]
    x = numbers(steps["step"])
    if not x:
        return "<h2>Curves</h2>\n<p>No step was made.</p>\n"
    marks = [
        Mark(float(event["step"]), str(event["kind"]), _LEVELS[event["level"]])
        for event in events
        if event.get("event") == "alarm"
    ]
    losses = numbers(steps["loss"])
    bounds = list(zip(numbers(held_out["loss_low"]), numbers(held_out["loss_high"]), strict=True))
    curves = [
        Series("training, each step", x, losses, "#4a90d9", faint=True),
        Series(f"training, mean of {SMOOTHING}", x, running_mean(losses, SMOOTHING), "#2166ac"),
        Series("held out, 95% range", numbers(held_out["step"]), numbers(held_out["loss"]),
               "#e07b00", points=True, ranges=bounds),
        Series("held out, adapter off", numbers(held_out["step"]), numbers(held_out["loss_off"]),
               "#999999"),
    ]  # fmt: skip
    charts = [line_chart("Loss (nats per labelled token)", curves, marks)]
    for title, column in (
        ("Learning rate", "learning_rate"),
        ("Gradient norm before clipping", "gradient_norm"),
        ("Update ratio |step| / |adapters|", "update_ratio"),
        ("Divergence from the base model", "divergence"),
        ("Pull-back (half the squared distance)", "pullback"),
        ("Change of a window's loss since it was first seen", "loss_change"),
    ):
        values = numbers(steps[column])
        if any(math.isfinite(value) for value in values):
            charts.append(line_chart(title, [Series(title, x, values, "#2166ac")]))
    bad = sum(numbers(steps["skipped"]))
    clipped = sum(numbers(steps["clipped"]))
    note = f"<p>{clipped:.0f} steps were clipped, {bad:.0f} skipped as not finite.</p>\n"
    return "<h2>Curves</h2>\n" + "".join(charts) + note


def _categories(logs: Mapping[str, Log], result: Mapping[str, Any]) -> str:
    steps, held_out = logs["steps"], logs["held_out"]
    names = [name.removeprefix("targets_") for name in steps if name.startswith("targets_")]
    names.remove("per_second")
    off = (result.get("before") or {}).get("by_category", {})
    rows, series = [], []
    for i, name in enumerate(names):
        losses, counts = numbers(steps[f"loss_{name}"]), numbers(steps[f"targets_{name}"])
        on = numbers(held_out[f"loss_{name}"])
        held = numbers(held_out[f"targets_{name}"])
        rows.append([
            name, f"{sum(counts):,.0f}", _number(_mean(losses[:SMOOTHING], counts[:SMOOTHING])),
            _number(_mean(losses[-SMOOTHING:], counts[-SMOOTHING:])),
            f"{held[-1]:,.0f}" if held else "", _number(off.get(name)),
            _number(on[-1] if on else None),
        ])  # fmt: skip
        shown = [(x, y) for x, y in zip(numbers(steps["step"]), losses, strict=True) if y == y]
        if shown:
            xs, ys = zip(*shown, strict=True)
            smooth = running_mean(ys, SMOOTHING)
            series.append(Series(name, list(xs), smooth, _COLOURS[i % len(_COLOURS)]))
    heads = [
        "category", "trained tokens", f"first {SMOOTHING} steps", f"last {SMOOTHING} steps",
        "held-out tokens", "held out, off", "held out, on",
    ]  # fmt: skip
    chart = line_chart(f"Training loss by category, mean of {SMOOTHING} steps with it", series)
    return f"<h2>Categories</h2>\n{_table(heads, rows)}{chart if series else ''}"


def _probe(log: Log) -> str:
    if not log["step"]:
        return ""
    by_step: dict[float, list[tuple[float, float]]] = {}
    newest: dict[str, list[str]] = {}
    for row in zip(*(log[name] for name in _PROBE), strict=True):
        step, record, category, targets, loss, first, change = row
        by_step.setdefault(float(step), []).append((float(change), float(targets)))
        newest[str(record)] = [
            str(record), str(category), f"{float(targets):.0f}", _number(first), _number(loss),
            f"{float(change):+.4f}",
        ]  # fmt: skip
    means = [_mean(*zip(*pairs, strict=True)) for pairs in by_step.values()]
    chart = line_chart(
        "Probe: mean change of the loss since the first evaluation",
        [Series("probe", list(by_step), means, "#1b7837", points=True)],
    )
    heads = ["record", "category", "tokens", "first", "last", "change"]
    table = _table(heads, list(newest.values()), text=2)
    return (
        "<h2>Probe</h2>\n<p>The same training records each time, chosen by a hash of their "
        f'content: no order of training changes them.</p>\n{chart}<div class="scroll">{table}</div>'
    )


def _memory(record: Mapping[str, Any], steps: Log) -> str:
    rows = [
        [f"predicted: {kind}", _size(size)]
        for kind, size in record["parts"][-1].get("predicted_bytes", {}).items()
    ]
    base = record["parts"][-1].get("base")
    if base:
        rows += [["base file, mapped", _size(base["file_bytes"])]]
        rows += [
            [f"base {row['kind']}, held as {row['held']}", _size(row["device_bytes"])]
            for row in base["rows"]
        ]
    if steps["step"]:
        rows += [
            ["predicted peak of a step", _size(max(numbers(steps["predicted_bytes"])))],
            ["measured peak of the device's arrays", _size(max(numbers(steps["device_bytes"])))],
            ["measured peak of the process", _size(max(numbers(steps["process_bytes"])))],
        ]
    return f"<h2>Memory</h2>\n{_table(['', 'size'], rows)}"


def _adapters(plan: Mapping[str, Any], log: Log) -> str:
    last: dict[str, dict[str, Any]] = {}
    first: dict[str, str] = {}
    for row in zip(*log.values(), strict=True):
        entry = dict(zip(log, row, strict=True))
        first.setdefault(str(entry["tensor"]), str(entry["sha256"]))
        last[str(entry["tensor"])] = entry
    shapes = {row["module"]: row for row in plan["adapted"]}
    rows: list[list[str]] = []
    for tensor, entry in last.items():
        module = shapes[tensor.rpartition(".")[0]]
        moved = "moved" if first[tensor] != entry["sha256"] else "did not move"
        rows.append([
            tensor, "x".join(map(str, module["shape"])), _state_of(module), first[tensor],
            str(entry["sha256"]), moved, _number(entry["norm"]),
            f"{float(entry['change_ratio']):.2e}", f"{float(entry['update_ratio']):.2e}",
        ])  # fmt: skip
    heads = [
        "tensor", "layer", "rank, trained", "checksum at the start", "at the end", "", "norm",
        "change / norm", "last update / norm",
    ]  # fmt: skip
    skipped = [
        [row["module"], "x".join(map(str, row["shape"])), row["reason"]] for row in plan["skipped"]
    ]
    return (
        f"<h2>Adapters</h2>\n<p>Effective scale {plan['scale']:g}, {plan['parameters']:,} trained "
        f'parameters.</p>\n<div class="scroll">{_table(heads, rows, text=6)}</div>'
        f"<details><summary>{len(skipped)} modules without an adapter, and why</summary>"
        f"{_table(['module', 'shape', 'why'], skipped, text=3)}</details>\n"
    )


def _state_of(module: Mapping[str, Any]) -> str:
    trained = "trained" if module.get("trained", True) else "frozen"
    return f"{module.get('rank', '')}, {trained}"


def _config(config: Mapping[str, Any]) -> str:
    lines: list[str] = []
    for section, values in config.items():
        lines += ["", f"[{section}]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return f"<h2>Configuration</h2>\n<pre>{html.escape(chr(10).join(lines).strip())}</pre>\n"


def _receipts(record: Mapping[str, Any], steps: Log) -> str:
    rows: list[list[str]] = []
    for part in record["parts"]:
        reached = str(part.get("to_step", "killed"))
        rows += [["steps", f"after {part['from_step']} to {reached}"]]
        rows += [
            [key, _plain(value)]
            for key, value in part.items()
            if key not in ("from_step", "to_step", "predicted_bytes", "costs", "base")
        ]
    if steps["step"]:
        rows += [
            ["tokens per second", _rate(steps["tokens_per_second"])],
            ["labelled tokens per second", _rate(steps["targets_per_second"])],
            ["steps measured", str(len(steps["step"]))],
        ]
    return f"<h2>Receipts</h2>\n{_table(['', ''], rows, text=2)}"


_LEVELS = {"error": "#d33", "warning": "#e90"}
_PROBE = ("step", "record", "category", "targets", "loss", "first_loss", "change")
_COLOURS = ("#2166ac", "#e07b00", "#1b7837", "#b2182b", "#762a83", "#8c6d31", "#017a79", "#7f7f7f")


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], text: int = 1) -> str:
    """A table whose first ``text`` columns hold text and whose others hold numbers."""
    kinds = ["" if i < text else ' class="n"' for i in range(len(heads))]
    head = "".join(
        f'<th scope="col"{kind}>{html.escape(one)}</th>'
        for kind, one in zip(kinds, heads, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{kind}>{html.escape(one)}</td>" for kind, one in zip(kinds, row, strict=True)
        )
        + "</tr>\n"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>\n"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {one}" for key, one in value.items())
    if isinstance(value, list):
        return "; ".join(str(one).strip() for one in value)
    return str(value)


def _rate(column: Sequence[float | str]) -> str:
    middle, low, high = median_and_spread(numbers(column))
    return f"{middle:,.0f} ({low:,.0f} to {high:,.0f})"


def _size(count: float) -> str:
    return f"{count / MIB:,.1f} MiB"


def _number(value: Any) -> str:
    if value is None or not math.isfinite(float(value)):
        return "none"
    return f"{float(value):.4f}"


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Weighted mean of the values that are numbers; NaN without any."""
    pairs = [(v, w) for v, w in zip(values, weights, strict=True) if math.isfinite(v)]
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total if total else math.nan


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"report: cannot read {path}: {error.strerror}; give the folder of a run"
        ) from error
    except ValueError as error:
        raise DataError(f"report: {path} is no JSON; restore it") from error
