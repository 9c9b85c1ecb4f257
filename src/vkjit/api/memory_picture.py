"""A picture of a plan's memory: bytes alive over time, and which array lies where in the arena."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from vkjit.api.memory import Held, HeldAs, MemoryTimeline

Axes = Any
"""matplotlib's, whose stubs leave keyword arguments without types."""
_COLORS = {
    HeldAs.ARGUMENT: "#9aa5b1",
    HeldAs.CONSTANT: "#c7b299",
    HeldAs.OUTPUT: "#6b7a8f",
    HeldAs.SAVED: "#d1495b",
    HeldAs.RECOMPUTED: "#edae49",
    HeldAs.TEMPORARY: "#30638e",
}
_IN_ARENA = (HeldAs.SAVED, HeldAs.RECOMPUTED, HeldAs.TEMPORARY)
_MIB = 2.0**20


def draw(memory: MemoryTimeline) -> Figure:
    """The figure of one plan; nothing is shown."""
    figure = Figure(figsize=(10, 7), layout="constrained", dpi=110)
    below: Axes = figure.add_subplot(2, 1, 2)
    above: Axes = figure.add_subplot(2, 1, 1, sharex=below)
    _stack(above, memory)
    _rectangles(below, [h for h in memory.held if h.kind in _IN_ARENA])
    below.set_ylim(0, max(memory.arena_bytes, 1) / _MIB)
    below.set_xlim(0, memory.steps)
    return figure


def _stack(axes: Axes, memory: MemoryTimeline) -> None:
    """Bytes alive by kind, with the peak marked."""
    kinds = [k for k in HeldAs if any(h.kind is k for h in memory.held)]
    edges = np.arange(memory.steps + 1)
    below = np.zeros(memory.steps + 1)
    for kind in kinds:
        live = memory.over_time(kind) / _MIB
        above = below + np.append(live, live[-1:])
        axes.fill_between(
            edges, below, above, step="post", color=_COLORS[kind], label=kind.value, linewidth=0
        )
        below = above
    step = memory.peak_step
    top = float(below[step])
    axes.axvline(step, color="black", linewidth=0.8, linestyle=":")
    axes.annotate(
        f"{top:.1f} MiB alive, step {step}",
        (step, top),
        xytext=(0, 4),
        textcoords="offset points",
        ha="center",
        fontsize=9,
    )
    axes.set_ylim(0, top * 1.12 or 1)
    axes.set_ylabel("alive, MiB")
    axes.set_title(f"planned peak {memory.peak_bytes / _MIB:.1f} MiB")
    axes.legend(loc="upper right", fontsize=8)


def _rectangles(axes: Axes, held: Sequence[Held]) -> None:
    """Each temporary where and when it lies in the arena."""
    corners = [
        [
            (h.first, h.offset / _MIB),
            (h.last + 1, h.offset / _MIB),
            (h.last + 1, (h.offset + h.nbytes) / _MIB),
            (h.first, (h.offset + h.nbytes) / _MIB),
        ]
        for h in held
    ]
    colors = [_COLORS[h.kind] for h in held]
    axes.add_collection(
        PolyCollection(corners, facecolors=colors, edgecolors="white", linewidths=0.2)
    )
    axes.set_ylabel("place in the arena, MiB")
    axes.set_xlabel("step")
