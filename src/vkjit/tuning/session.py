"""Tuning a whole function: its groups, the time for each, and the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from vkjit import tree
from vkjit.device_array import default_device
from vkjit.ir.parse import parse
from vkjit.ir.primitive import Value
from vkjit.ir.program import Program
from vkjit.lowering.compile import Choice, compile_program
from vkjit.ops.registry import PRIMITIVES
from vkjit.passes.pipeline import simplify
from vkjit.runtime.device import Device
from vkjit.trace import aval_of, trace
from vkjit.tuning.case import Case, case_of
from vkjit.tuning.choosing import lookup, store, stored
from vkjit.tuning.records import Result, group_key
from vkjit.tuning.report import Progress, TunedGroup, TuneReport
from vkjit.tuning.rig import Rig
from vkjit.tuning.search import Search


@final
@dataclass(frozen=True, slots=True)
class Job:
    """A case, and how many times a call of the function runs it."""

    case: Case
    count: int


def jobs_of(fn: Callable[..., Any] | str, args: Sequence[Any], device: Device) -> list[Job]:
    """The distinct groups of a function that can be tuned, what should gain most first.

    ``fn`` may be jitted; then ``args`` are those of its calls, static ones among them. It may be
    the text of a program, too.
    """
    choices = _choices(fn, args, device)
    found: dict[str, Job] = {}
    for choice in choices:
        case = case_of(choice.group, choice.infos)
        if case is not None:
            key = group_key(case)
            before = found.get(key)
            found[key] = Job(case, choice.count + (before.count if before else 0))
    return sorted(found.values(), key=_expected, reverse=True)


def _expected(job: Job) -> float:
    return job.case.work * job.count


def _choices(fn: Callable[..., Any] | str, args: Sequence[Any], device: Device) -> Sequence[Choice]:
    if lookup(device) is None:
        return ()
    if isinstance(fn, str):
        return _compiled(parse(fn, PRIMITIVES), 0, device)
    lower = getattr(fn, "lower", None)
    if lower is not None:
        with default_device(device.name):
            lowered: Any = lower(*args)
        return lowered.compiled.choices
    leaves, in_tree = tree.flatten(tuple(args))

    def flat(*given: Value) -> list[Value]:
        return tree.leaves(fn(*tree.unflatten(in_tree, list(given))))

    traced = trace(flat, [aval_of(v) for v in leaves], getattr(fn, "__name__", "tuned"))
    return _compiled(simplify(traced.program), len(traced.captured), device)


def _compiled(program: Program, constants: int, device: Device) -> Sequence[Choice]:
    return compile_program(program, device.target, constants, choose=lookup(device)).choices


def run(
    jobs: Sequence[Job],
    rig: Rig,
    budget_s: float,
    progress: Progress | None = None,
    *,
    again: bool = False,
) -> TuneReport:
    """Tunes what has no result yet (``again``: everything) within ``budget_s`` seconds.

    Every group has its turn; most of the time goes to those that take most of a call. Results are
    kept one by one.
    """
    start = rig.clock()
    found = {} if again else {j.case: r for j in jobs if (r := stored(rig.device, j.case))}
    todo = [(job.case, job.count) for job in jobs if job.case not in found]
    new: dict[Case, Result] = {}
    for case, result in Search(rig, progress).all(todo, start + budget_s):
        new[case] = result
        store().put([result])
    groups = [
        TunedGroup(group_key(j.case), j.count, new.get(j.case) or found.get(j.case), j.case in new)
        for j in jobs
    ]
    return TuneReport(rig.device.name, tuple(groups), rig.clock() - start)
