"""Tables on the terminal and lines in ``results/*.jsonl``."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.machine import Rates, spread

if TYPE_CHECKING:
    from benchmarks.harness import Row

Cell = Callable[["Row", str], str]


def is_vkjit(name: str) -> bool:
    """Whether a participant is no peer."""
    return name.partition("-")[0] == "vkjit"


def median(row: Row, name: str) -> float | None:
    """Seconds of a call, or of the first call, of a participant."""
    samples = (row.first if row.case.first else row.samples).get(name)
    return statistics.median(samples) if samples else None


def best_peer(row: Row) -> tuple[str, float] | None:
    """The fastest peer whose result is right, and its seconds."""
    names = set(row.samples) | set(row.first)
    peers = [n for n in names if not is_vkjit(n) and not row.wrong(n) and n not in row.failures]
    times = [(seconds, n) for n in peers if (seconds := median(row, n)) is not None]
    return (min(times)[1], min(times)[0]) if times else None


def progress(row: Row) -> str:
    """One line about a finished case."""
    parts = [f"{name} {_seconds(median(row, name))}" for name in row.first]
    return f"{row.case.name}: " + ", ".join(parts + [f"{n} failed" for n in row.failures])


def tables(header: dict[str, Any], rows: Sequence[Row], names: Sequence[str], rates: Rates) -> str:
    """Times, ratios to the best peer, floor and gap, errors, memory: Markdown."""
    lines = [
        "",
        f"## {header['benchmark']} on {header['device']}, {header['date']}, {header['commit']}",
        f"{header['cpu']}, {header['cores']} cores, measured here: {header['gflops']} GFLOP/s f32, "
        f"{header['gbps']} GB/s; {header['rounds']} rounds, median and half the quartile range",
        "; ".join(f"{k} {v}" for k, v in header["versions"].items()),
    ]
    lines += _table("time", rows, names, _time_cell)
    lines += _table("ratio of time to the best peer", rows, names, _ratio_cell)
    lines += _floors(rows, rates)
    if any(row.memory for row in rows):
        measured = [row for row in rows if row.memory]
        lines += _table(
            "peak of a step, MiB (over what was live) [predicted]", measured, names, _memory_cell
        )
    if any(row.stages.get(n) for row in rows for n in names):
        lines += _table("stages, us per equation", rows, names, _stage_cell)
    lines += _remarks(rows)
    return "\n".join(lines)


def append(path: Path, header: dict[str, Any], rows: Sequence[Row], rates: Rates) -> None:
    """Appends a line per case; a line stands by itself."""
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps({**header, **_record(row, rates)}, sort_keys=True) + "\n")


def _record(row: Row, rates: Rates) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in row.first:
        samples = (row.first if row.case.first else row.samples).get(name)
        if not samples:
            continue
        low, high = spread(samples)
        results[name] = {
            "median_s": statistics.median(samples),
            "quartiles_s": [low, high],
            "samples": len(samples),
            "first_call_s": statistics.median(row.first[name]),
            "error": row.errors.get(name),
            "wrong": row.wrong(name),
            "losses": row.losses.get(name, []),
            "memory": row.memory.get(name),
            "stages": row.stages.get(name),
        }
    return {
        "case": row.case.name,
        "floor_s": rates.floor(row.case.flop, row.case.byte, row.case.dtype),
        "foreign": round(max(row.foreign, default=0.0), 3),
        "results": results,
        "failures": row.failures,
    }


def _table(title: str, rows: Sequence[Row], names: Sequence[str], cell: Cell) -> list[str]:
    lines = ["", title, "", _line("case", *names), "|---" * (len(names) + 1) + "|"]
    return lines + [_line(row.case.name, *(cell(row, name) for name in names)) for row in rows]


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _floors(rows: Sequence[Row], rates: Rates) -> list[str]:
    """Floor, and how far vkjit and the best peer are from it."""
    lines = ["", "floor, and time over it", ""]
    lines += [_line("case", "floor", "vkjit", "best peer"), "|---" * 4 + "|"]
    for row in rows:
        floor = rates.floor(row.case.flop, row.case.byte, row.case.dtype)
        best, ours = best_peer(row), median(row, "vkjit")
        if floor:
            gap = f"{ours / floor:.2f}" if ours else "-"
            peer = f"{best[1] / floor:.2f} ({best[0]})" if best else "-"
            lines.append(_line(row.case.name, _seconds(floor), gap, peer))
    return lines if len(lines) > 5 else []


def _time_cell(row: Row, name: str) -> str:
    seconds = median(row, name)
    if seconds is None:
        return "fails" if name in row.failures else "-"
    low, high = spread((row.first if row.case.first else row.samples)[name])
    text = f"{_seconds(seconds)} ±{50 * (high - low) / seconds:.0f}%"
    if row.case.tokens:
        text += f" ({row.case.tokens / seconds:.0f} tok/s)"
    elif row.case.flop:
        text += f" ({row.case.flop / seconds / 1e9:.0f} GF/s)"
    elif row.case.byte:
        text += f" ({row.case.byte / seconds / 1e9:.1f} GB/s)"
    return text + (f" WRONG {row.errors[name]:.1g}" if row.wrong(name) else "")


def _ratio_cell(row: Row, name: str) -> str:
    seconds, best = median(row, name), best_peer(row)
    return "-" if seconds is None or best is None else f"{seconds / best[1]:.2f}"


def _memory_cell(row: Row, name: str) -> str:
    used = row.memory.get(name)
    if used is None:
        return "-"
    cell = f"{used['peak'] / 2**20:.0f} ({(used['peak'] - used['before']) / 2**20:.0f})"
    predicted = used.get("predicted")
    return f"{cell} [{predicted / 2**20:.0f}]" if predicted else cell


def _stage_cell(row: Row, name: str) -> str:
    stages, equations = row.stages.get(name), row.case.params.get("equations")
    if not stages or not equations:
        return "-"
    return ", ".join(f"{k.removesuffix('_s')} {v / equations * 1e6:.1f}" for k, v in stages.items())


def _remarks(rows: Sequence[Row]) -> list[str]:
    lines = [""]
    foreign = [share for row in rows for share in row.foreign]
    if foreign:
        lines.append(f"others' share of the machine: worst {max(foreign):.0%}")
    for row in rows:
        lines += [f"{row.case.name} / {name}: {why}" for name, why in row.failures.items()]
        losses = {n: x for n, x in row.losses.items() if x}
        if losses:
            texts = (f"{n} " + " ".join(f"{x:.5f}" for x in xs) for n, xs in losses.items())
            lines.append(f"{row.case.name}, losses: " + "; ".join(texts))
    return lines


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"
