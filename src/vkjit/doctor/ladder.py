"""The stages in order, and how one is run."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from vkjit.doctor import advice
from vkjit.doctor.gradients import accumulation, optimizer, precision
from vkjit.doctor.layers import attention, gru, loss, norm
from vkjit.doctor.memory import memory
from vkjit.doctor.order import order
from vkjit.doctor.pointwise import pointwise
from vkjit.doctor.primitives import primitives
from vkjit.doctor.products import products
from vkjit.doctor.reductions import indexing, reductions
from vkjit.doctor.report import StageResult, Status
from vkjit.doctor.session import Session
from vkjit.doctor.timing import timing
from vkjit.doctor.training import training
from vkjit.doctor.transfers import transfer


@final
@dataclass(frozen=True, slots=True)
class Stage:
    """One rung: its name on the command line, what it says it does, and the function."""

    name: str
    title: str
    run: Callable[[Session], None]


STAGES = (
    Stage("transfer", "bytes to the device and back", transfer),
    Stage("order", "copies and barriers, rounds that a stale read would spoil", order),
    Stage("pointwise", "elementary functions, in units in the last place", pointwise),
    Stage("primitives", "samples of every primitive", primitives),
    Stage("reductions", "sums, extrema and scans, with NaN", reductions),
    Stage("indexing", "gather and scatter", indexing),
    Stage("products", "matrix products, every schedule", products),
    Stage("gru", "gated recurrent unit, forward and backward", gru),
    Stage("norm", "RMSNorm with rows of zeros, forward and backward", norm),
    Stage("attention", "causal and masked attention, forward and backward", attention),
    Stage("loss", "softmax-cross-entropy, large logits, forward and backward", loss),
    Stage("accumulation", "gradients over many rows and microbatches", accumulation),
    Stage("optimizer", "AdamW with clipping", optimizer),
    Stage("precision", "float16 gradients at loss scale 128", precision),
    Stage("training", "whole training steps", training),
    Stage("memory", "allocation, prediction, clean shutdown", memory),
    Stage("timing", "speed (figures; only wrong results fail)", timing),
)
"""From the simplest to the whole: the first failure is the one to look at."""

NAMES = tuple(stage.name for stage in STAGES)


def run_stage(session: Session, stage: Stage, box: float) -> StageResult:
    """Runs one stage within about ``box`` seconds; any exception is its failure."""
    session.begin(stage.name, box)
    started = time.monotonic()
    error = ""
    lost = False
    try:
        stage.run(session)
        session.device.synchronize()
    except Exception as fault:
        error = traceback.format_exc()
        lost = advice.device_is_gone(fault)
    failed = bool(session.faults or error)
    result = StageResult(
        number=NAMES.index(stage.name) + 1,
        name=stage.name,
        title=stage.title,
        status=Status.FAILED if failed else Status.OK,
        seconds=round(time.monotonic() - started, 3),
        checks=session.checks,
        faults=session.faults,
        worst=session.worst,
        done=session.done,
        cases=session.all,
        mismatches=[m.plain() for m in session.mismatches],
        error=error,
        device_lost=lost,
        notes=session.notes,
        figures=session.figures,
    )
    result.advice = advice.for_stage(result)
    return result
