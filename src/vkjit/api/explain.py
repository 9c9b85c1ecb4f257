"""What became of a function on its way to kernels: the program after each pass, as a diff."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from vkjit.api.jit import Jit, jit
from vkjit.api.staged import Lowered
from vkjit.ir.program import Program
from vkjit.ir.text import Names, atom_text, eqn_text, named_programs
from vkjit.lowering.artifact import Copy, HostCall, Launch, leaves
from vkjit.passes.pipeline import SIMPLIFY


@final
@dataclass(frozen=True)
class PassView:
    """A program after one pass.

    ``diff`` has the lines that went (``-``) and came (``+``), with one line around; variables keep
    their numbers through all passes. ``seconds`` is what the pass took.
    """

    name: str
    does: str
    program: Program
    before: int
    after: int
    diff: str
    seconds: float

    def __str__(self) -> str:
        counts = f"{self.before} -> {self.after} equations, {self.seconds * 1e3:.2f} ms"
        head = f"== {self.name}: {self.does} ({counts})"
        return f"{head}\n{self.diff}" if self.diff else f"{head}\nnothing changed"


@final
@dataclass(frozen=True)
class Explanation:
    """A function at each stage; print it to read it.

    ``traced`` is the program as recorded, ``passes`` what each pass made of it, ``lowered`` what
    will run.
    """

    traced: Program
    passes: tuple[PassView, ...]
    lowered: Lowered

    def __str__(self) -> str:
        name = self.traced.name
        head = f"== trace of {name} ({len(self.traced.eqns)} equations)"
        text = "\n".join(_lines(self.traced, Names()))
        plan = self.lowered.plan
        steps = [_step_text(i, step) for i, step in enumerate(leaves(plan.steps))]
        kernels = f"== kernels for {self.lowered.target.name} ({len(steps)} steps)"
        costs = f"== costs\n{self.lowered.cost_analysis()}\n{self.lowered.memory()}"
        return "\n\n".join(
            [f"{head}\n{text}", *map(str, self.passes), "\n".join([kernels, *steps]), costs]
        )


def explain(fn: Callable[..., Any]) -> Callable[..., Explanation]:
    """A function that shows how ``fn`` is compiled for its arguments; nothing runs.

    Args:
        fn: a function, or what ``jit`` returned, whose static and donated arguments then count.

    Returns:
        a function of the same arguments::

            print(vj.explain(vj.grad(loss))(params, batch))
    """
    jitted: Jit = fn if isinstance(fn, Jit) else jit(fn)

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        call = jitted.trace(*args, **kwargs)
        return Explanation(call.program, tuple(_passes(call.program)), call.lower())

    return explained


def _passes(program: Program) -> list[PassView]:
    names = Names()
    before = _lines(program, names)
    found: list[PassView] = []
    for run in SIMPLIFY:
        begin = time.perf_counter()
        after = run(program)
        seconds = time.perf_counter() - begin
        lines = _lines(after, names)
        does = (run.__doc__ or "").split("\n")[0].removesuffix(".")
        counts = len(program.eqns), len(after.eqns)
        found.append(
            PassView(run.__name__, does, after, *counts, _difference(before, lines), seconds)
        )
        program, before = after, lines
    return found


def _lines(program: Program, names: Names) -> list[str]:
    """The lines of a program and of those inside, in numbers that later programs share."""
    params = ", ".join(f"{names.of(v)}: {v.aval}" for v in program.params)
    found = [f"{program.name}({params})"]
    for eqn in program.eqns:
        found += eqn_text(eqn, names, lines=True).split("\n")
        for label, inner in named_programs(eqn):
            first, *rest = _lines(inner, names)
            found += [f"  {label} = {first}", *[f"    {line}" for line in rest]]
    return [*found, f"return {', '.join(atom_text(r, names) for r in program.results)}"]


def _difference(before: list[str], after: list[str]) -> str:
    changes = difflib.unified_diff(before, after, n=1, lineterm="")
    return "\n".join(line for line in changes if not line.startswith(("---", "+++", "@@")))


def _step_text(number: int, step: Launch | Copy | HostCall) -> str:
    match step:
        case Launch():
            return f"{number}: {step.kernel.name} {step.kernel.grid}: {'; '.join(step.origin)}"
        case Copy():
            return f"{number}: copy of {step.source.size:,} bytes"
        case HostCall():
            return f"{number}: call of the host: {'; '.join(step.origin)}"
