"""What a function's derivative keeps: each residual with its size, reason and line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from vkjit import tree
from vkjit.api.flat import flatten_call, name_of
from vkjit.api.linearization import separated
from vkjit.control.checkpoint import Checkpoint
from vkjit.control.offload import Transfer
from vkjit.control.policies import Offload
from vkjit.dtypes import is_float
from vkjit.ir.avals import Aval
from vkjit.ir.program import Atom, Eqn, Program, Var
from vkjit.ops.naming import Name
from vkjit.passes.residuals import once
from vkjit.trace import aval_of


@final
@dataclass(frozen=True, slots=True)
class Residual:
    """One value that is kept from the computation of values until the one of derivatives.

    Attributes:
        aval: its shape and dtype.
        reason: what it is, and why it is not computed again.
        source: ``file:line`` of the operation that makes it; "" for arguments and constants.
    """

    aval: Aval
    reason: str
    source: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.aval.nbytes

    @property
    def is_argument(self) -> bool:
        """Whether it is an argument or a constant, which is there anyway."""
        return self.reason.startswith(("argument", "constant"))


def saved_residuals(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Residual]:
    """What differentiating ``fn`` with respect to all float arguments keeps.

    This is what ``vjp`` holds between value and pullback, and what ``grad`` under ``jit`` keeps in
    memory until its backward part needs it; casts, views and short chains of pointwise operations
    are computed again and do not occur.

    Args:
        fn: of pytrees of arrays; arrays that it closes over count as constants.
        args: arguments, or anything with a shape and dtype.
        kwargs: likewise.
    """
    flat, leaves = flatten_call(fn, args, kwargs)
    traced = flat.trace(leaves)
    floats = [i for i, v in enumerate(leaves) if is_float(aval_of(v).dtype)]
    separate, _ = separated(traced, floats)
    known = separate.program
    params: Sequence[Var] = known.params
    lead = len(separate.captured)
    given = {v: f"constant {i}" for i, v in enumerate(params[:lead])}
    paths = [path for path, _ in tree.leaves_with_path((args, kwargs))]
    for var, path in zip(params[lead:], paths, strict=True):
        given[var] = f"argument {_place(path)}"
    saved = known.results[len(traced.program.results) :]
    return [_residual(atom, known, given) for atom in saved]


def print_saved(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Prints what ``saved_residuals`` gives, with totals."""
    found = saved_residuals(fn, *args, **kwargs)
    print(saved_text(found, name_of(fn)))  # noqa: T201  what it is for


def saved_text(found: Sequence[Residual], name: str) -> str:
    """Residuals as a table, largest first, arguments last."""
    rows = sorted(found, key=lambda r: (r.is_argument, -r.nbytes))
    kept = sum(r.nbytes for r in found if not r.is_argument)
    there = sum(r.nbytes for r in found) - kept
    width = max([len(str(r.aval)) for r in rows], default=0)
    lines = [f"{name} keeps {len(rows)} values for its derivative:"]
    for row in rows:
        line = f"  {row.nbytes:>14,} B  {row.aval!s:<{width}}  {row.reason}"
        lines.append(f"{line}  {row.source}" if row.source else line)
    lines.append(f"  {kept:>14,} B  besides {there:,} B of arguments and constants")
    return "\n".join(lines)


def _place(path: tree.KeyPath) -> str:
    """``[0][0]['w']`` of (args, kwargs) as ``0['w']``, ``[1]['x'][0]`` as ``'x'[0]``."""
    return tree.keystr(path)[4:].replace("]", "", 1)


def _residual(atom: Atom, known: Program, given: dict[Var, str]) -> Residual:
    """Where a residual comes from, looked up inside checkpoints and loops."""
    if not isinstance(atom, Var):
        return Residual(atom.aval, "constant")
    if atom in given:
        return Residual(atom.aval, given[atom])
    eqn, checkpoint = _maker(atom, known, None)
    if eqn is None:
        return Residual(atom.aval, "carry or slice of a loop")
    return Residual(atom.aval, _reason(eqn, checkpoint), str(eqn.source or ""))


def _maker(
    var: Var, program: Program, around: Checkpoint | None
) -> tuple[Eqn | None, Checkpoint | None]:
    """The equation that makes a variable, and the innermost checkpoint that it stands in."""
    eqn = next((e for e in program.eqns if var in e.outs), None)
    if eqn is None:
        return None, around
    if isinstance(eqn.prim, Transfer) and isinstance(eqn.args[0], Var):
        return _maker(eqn.args[0], program, around)
    bodies = eqn.prim.programs()
    if len(bodies) != 1 or len(bodies[0].results) != len(eqn.outs):
        return eqn, around
    inner = bodies[0].results[eqn.outs.index(var)]
    inside = eqn.prim if isinstance(eqn.prim, Checkpoint) else around
    return _maker(inner, bodies[0], inside) if isinstance(inner, Var) else (eqn, around)


def _reason(eqn: Eqn, checkpoint: Checkpoint | None) -> str:
    prim = eqn.prim
    what = f"named {prim.label!r}" if isinstance(prim, Name) else f"result of {prim.name}"
    if once(prim):
        return f"{what}, which is never repeated"
    if checkpoint is None:
        return what
    decision = checkpoint.saves(eqn)
    if isinstance(decision, Offload):
        return f"{what}, in memory of the host by {checkpoint.policy}"
    if decision:
        return f"{what}, saved by {checkpoint.policy}"
    return f"{what}, result of a checkpoint"
