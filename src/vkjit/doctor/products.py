"""Stage ``products``: every way in which the device can compute one, on every layout.

``lowering.gpu.choose`` lists the schedules that serve a product on this device (naive, tiled,
matrix units where there are any); each is run, whatever a tuner would take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import ml_dtypes
import numpy as np

import vkjit.numpy as jnp
from vkjit import nn
from vkjit.api.flat import flatten_call
from vkjit.doctor.comparing import Array
from vkjit.doctor.session import Session
from vkjit.doctor.tolerances import Kind, SumBound
from vkjit.errors import MissingRuleError
from vkjit.ir.program import Program
from vkjit.lowering.compile import Choice, compile_program
from vkjit.lowering.gpu.choose import candidates
from vkjit.lowering.kernel.interpret_ops import DTYPES
from vkjit.lowering.plan.groups import ArrayInfo, ContractGroup, Group
from vkjit.lowering.plan.schedule import GpuContract
from vkjit.lowering.target import Target, TargetKind
from vkjit.lowering.templates.context import TemplateContext
from vkjit.passes.pipeline import simplify

_LAYOUTS = ("mk,kn->mn", "km,kn->mn", "mk,nk->mn", "km,nk->mn", "bmk,bkn->bmn")
_SIZES = ((33, 45, 37), (128, 128, 64), (1, 100, 70), (200, 260, 48), (40, 24, 1), (7, 5, 0),
          (130, 300, 2100), (1500, 1420, 36))  # fmt: skip
_QUICK_SIZES = ((33, 45, 37), (5, 6, 1), (7, 5, 0))
_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
_THOROUGH = (70, 52, 68)
"""The size at which every schedule is tried, last; at others the first of each kind."""


@final
@dataclass(frozen=True)
class _Case:
    """One product: layout, (m, n, k), dtype, an epilogue or none, all schedules or one a kind."""

    layout: str
    size: tuple[int, int, int]
    dtype: np.dtype[Any]
    epilogue: bool = False
    thorough: bool = False

    def __str__(self) -> str:
        m, n, k = self.size
        end = " + bias, gelu" if self.epilogue else ""
        return f"{self.dtype} {self.layout}{end} of {m} x {n} x {k}"


def products(session: Session) -> None:
    """Layouts, ragged sizes, sums of no and of one term, batches, dtypes, a fused epilogue."""
    used = dict[str, int]()
    for case in session.cases(_cases(session)):
        with session.missing_allowed(str(case), MissingRuleError):
            _check(session, case, used)
    session.figures["schedules tried"] = used


def _cases(session: Session) -> list[_Case]:
    if session.quick:
        first = _QUICK_SIZES[0]
        return [
            *[_Case("mk,kn->mn", size, _DTYPES[0]) for size in _QUICK_SIZES],
            _Case("km,nk->mn", first, _DTYPES[0], epilogue=True),
            _Case("bmk,bkn->bmn", first, _DTYPES[1]),
        ]
    # What the time may cut off comes last.
    return [
        *[_Case(_LAYOUTS[0], s, d, epilogue=True) for s in _SIZES[:2] for d in _DTYPES],
        *[_Case(_LAYOUTS[0], size, d) for size in _SIZES for d in _DTYPES],
        *[_Case(c, size, d) for size in _SIZES for c in _LAYOUTS[1:] for d in _DTYPES],
        *[_Case(c, _THOROUGH, d, thorough=True) for d in _DTYPES for c in _LAYOUTS],
    ]


def _check(session: Session, case: _Case, used: dict[str, int]) -> None:
    """Runs one product under every schedule and compares with float64."""
    rng, (m, n, k) = session.rng, case.size
    size = {"b": 3, "m": m, "n": n, "k": k}
    sides = case.layout.split("->")[0].split(",")
    x, y = (rng.standard_normal([size[c] for c in side]).astype(case.dtype) for side in sides)
    bias = rng.standard_normal(n).astype(case.dtype)
    args = (x, y, bias) if case.epilogue else (x, y)
    function = partial(_with_epilogue if case.epilogue else _product, case.layout)
    flat, leaves = flatten_call(function, args)
    program = simplify(flat.trace(leaves).program)
    want, terms = _exactly(case, args)
    for schedule, of in _schedules(session, program, thorough=case.thorough):
        if case.thorough and session.left() < 0:
            return
        name = schedule.text().partition("(")[0] if schedule else "default"
        used[name] = used.get(name, 0) + 1
        got = _run(session, program, schedule, args)
        summed = DTYPES[of.accumulate] if of else None
        kind = Kind.ELEMENT if case.epilogue else Kind.SUM
        bound = SumBound(kind, case.dtype, k, summed)
        text = schedule.text() if schedule else "default"
        session.compare_sums(f"{case}, {text}", got, want.astype(case.dtype), (terms, bound))


def _product(layout: str, x: Any, y: Any) -> Any:
    return jnp.einsum(layout, x, y)


def _with_epilogue(layout: str, x: Any, y: Any, bias: Any) -> Any:
    """In float32 up to the last rounding: gelu cancels where 16 bits would show nothing else."""
    product = jnp.einsum(layout, x, y, preferred_element_type=jnp.float32)
    return nn.gelu(product + bias.astype(jnp.float32)).astype(x.dtype)


def _exactly(case: _Case, args: Sequence[Array]) -> tuple[Array, Array]:
    """The product in float64, and the sums of the magnitudes of its terms."""
    x, y, *bias = [a.astype(np.float64) for a in args]
    want = np.einsum(case.layout, x, y)
    terms = np.einsum(case.layout, np.abs(x), np.abs(y))
    if bias:
        z = want + bias[0]
        want = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
        terms = terms + np.abs(bias[0])
    return want, terms


def _schedules(
    session: Session, program: Program, *, thorough: bool
) -> list[tuple[GpuContract | None, ContractGroup | None]]:
    """What the device can run the product with; the default is the first."""
    target = session.device.target
    if target.kind is not TargetKind.GPU:
        return [(None, None)]
    found: list[Choice] = []
    chosen: list[list[GpuContract]] = []

    def listed(group: Group, infos: Sequence[ArrayInfo], target: Target) -> GpuContract | None:
        assert isinstance(group, ContractGroup)
        chosen.append(candidates(group, TemplateContext(target, list(infos))))
        return None

    found.extend(compile_program(program, target, choose=listed).choices)
    if not found:  # no product is left of a sum of no terms
        return [(None, None)]
    group = found[0].group
    assert isinstance(group, ContractGroup)
    able = chosen[0]
    if not thorough:
        able = list({type(s): s for s in reversed(able)}.values())[::-1]
    return [(schedule, group) for schedule in able]


def _run(
    session: Session, program: Program, schedule: GpuContract | None, args: Sequence[Array]
) -> Array:
    """The product under one schedule."""
    device = session.device

    def choose(*_: Any) -> GpuContract | None:
        return schedule

    plan = compile_program(program, device.target, choose=choose).plan
    (out,) = device.load(plan).run([device.upload(np.ascontiguousarray(a)) for a in args])
    (of,) = program.out_avals
    return device.download(out, of.dtype, of.shape)
