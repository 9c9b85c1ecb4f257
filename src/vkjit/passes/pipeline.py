"""The passes that run between tracing and lowering, in order."""

from __future__ import annotations

from collections.abc import Callable

from vkjit.ir.check import check
from vkjit.ir.program import Program
from vkjit.passes.cse import cse
from vkjit.passes.dce import dce
from vkjit.passes.fold import fold
from vkjit.passes.hoist import hoist
from vkjit.passes.inline import inline
from vkjit.passes.inner import inner, lift

Pass = Callable[[Program], Program]


def bodies(program: Program) -> Program:
    """Simplifies the programs that equations run."""
    return inner(program, simplify)


SIMPLIFY: tuple[Pass, ...] = (dce, inline, bodies, lift, fold, inline, cse, dce, hoist)
"""dce first, so that later passes do no work on dead equations; bodies before what is lifted out
of them, which fold and cse then see; inline again for choices that fold decided; cse after fold,
which makes equal equations equal in form; dce again for what folding left unread; hoist last, since
only the order in which partition meets the equations depends on it."""


def simplify(program: Program, *, checked: bool = False) -> Program:
    """Runs ``SIMPLIFY``; with ``checked`` the type checker runs after every pass."""
    for run in SIMPLIFY:
        program = run(program)
        if checked:
            check(program)
    return program
