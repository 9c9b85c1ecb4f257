"""What tuning leaves behind: results with their receipts, their keys, and their form as JSON."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast, final

import vkjit.lowering
from vkjit.errors import ConfigError
from vkjit.lowering.kernel.specs import Precision
from vkjit.lowering.kernel.views import View
from vkjit.lowering.plan.groups import LoadStep
from vkjit.lowering.plan.schedule import GpuContract, parse_schedule
from vkjit.runtime.device import Hardware
from vkjit.tuning.case import Case, stride_class

SCHEMA = 1
"""Of the JSON; raised when a field changes its meaning."""
FORMAT = "vkjit tuning"
_GENERATORS = ("gpu", "kernel", "legalize", "plan", "spirv", "templates")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@final
@dataclass(frozen=True, slots=True)
class Receipt:
    """How a result came about.

    ``seconds`` has the time of every schedule that was timed, ``refused`` the reason of every one
    that failed. ``checks`` are the comparisons that the chosen one passed, with the seeds of their
    inputs; ``error`` is the largest, as a share of the tolerance.
    """

    date: str
    version: str
    default: str
    seconds: Mapping[str, float]
    refused: Mapping[str, str]
    checks: tuple[str, ...]
    error: float
    tolerance: str
    spent: float


@final
@dataclass(frozen=True, slots=True)
class Result:
    """The schedule that serves a group best on some hardware.

    ``kernels`` identifies the templates that made the candidates, ``group`` is a ``group_key``.
    """

    hardware: Hardware
    kernels: str
    group: str
    schedule: str
    receipt: Receipt

    @property
    def default_seconds(self) -> float:
        """Time of one run with the default schedule."""
        return self.receipt.seconds.get(self.receipt.default, 0.0)

    @property
    def seconds(self) -> float:
        """Time of one run with the chosen schedule."""
        return self.receipt.seconds.get(self.schedule, 0.0)

    @property
    def gain(self) -> float:
        """How many times faster than the default the chosen schedule is; 1 if that failed."""
        known = self.seconds > 0 and self.default_seconds > 0
        return self.default_seconds / self.seconds if known else 1.0

    def parsed(self) -> GpuContract:
        """The schedule.

        Raises:
            ConfigError: another version of vkjit wrote it.
        """
        return parse_schedule(self.schedule)


# -- keys -----------------------------------------------------------------------------------------


def group_key(case: Case) -> str:
    """What results for a case are valid for: sizes, types, layouts, and a digest of the epilogue.

    Layouts are classes of strides (``case.stride_class``) in the order of the axes: batch, m, k
    for the left operand, batch, k, n for the right one, batch, m, n for results.
    """
    g = case.group
    batch = "".join(f"{size}x" for size in g.batch)
    outs = [f"{case.infos[s.array].elem}{_layout(s.view)}" for s in g.stores]
    precision = "" if g.precision is Precision.HIGHEST else f" {g.precision.value}"
    return (
        f"contract {batch}{g.m}x{g.n}x{g.k} {_operand(case, g.lhs)} * {_operand(case, g.rhs)} "
        f"in {g.accumulate}{precision} to {' '.join(outs)} epilogue {_epilogue(case)}"
    )


def _operand(case: Case, step: LoadStep) -> str:
    elem = case.infos[step.array].elem if step.blocks is None else f"{step.blocks}:{step.type}"
    return f"{elem}{_layout(step.view)}"


def _layout(view: View) -> str:
    start = "" if view.offset == 0 else f"+{stride_class(view.offset)}"
    return f"[{','.join(map(stride_class, view.strides))}]{start}"


def _epilogue(case: Case) -> str:
    """``none``, or a digest of the steps with their views reduced to layouts."""
    body, stores = case.group.body, case.group.stores
    if len(body) == 1 and len(stores) == 1:
        return "none"
    parts: list[str] = []
    for step in body:
        if isinstance(step, LoadStep):
            elem = case.infos[step.array].elem if step.array >= 0 else "index"
            elem = elem if step.blocks is None else step.blocks
            parts.append(f"load {elem}{_layout(step.view)} {step.type}")
        else:
            parts.append(_ADDRESS.sub("", repr(step)))
    parts += [f"store {s.value}" for s in stores]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:10]


@functools.cache
def kernels_version() -> str:
    """A digest of the code that makes GPU kernels: results of other templates do not count."""
    digest = hashlib.sha256()
    for folder in vkjit.lowering.__path__:
        for name in _GENERATORS:
            for path in sorted((Path(folder) / name).rglob("*.py")):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


# -- JSON -----------------------------------------------------------------------------------------


def to_json(results: Iterable[Result]) -> dict[str, Any]:
    """A document with all results, in the order of their keys."""
    ordered = sorted(results, key=_order)
    return {"format": FORMAT, "schema": SCHEMA, "results": [asdict(r) for r in ordered]}


def _order(result: Result) -> tuple[str, str, str, str]:
    return result.hardware.name, result.hardware.uuid, result.kernels, result.group


def from_json(document: object, name: str) -> list[Result]:
    """The results of a document.

    Raises:
        ConfigError: it is not one, or of another schema; the message begins with ``name``.
    """
    found = cast("dict[str, Any]", document) if isinstance(document, dict) else {}
    if found.get("format") != FORMAT or found.get("schema") != SCHEMA:
        raise ConfigError(
            f"tuning: {name} has format {found.get('format')!r} and schema "
            f"{found.get('schema')!r}, expected {FORMAT!r} and {SCHEMA}; export it anew"
        )
    try:
        return [_result(item) for item in found["results"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"tuning: {name} has a malformed result ({type(error).__name__}: {error}); "
            "export it anew"
        ) from error


def _result(item: Mapping[str, Any]) -> Result:
    r = item["receipt"]
    receipt = Receipt(
        date=str(r["date"]),
        version=str(r["version"]),
        default=str(r["default"]),
        seconds={str(k): float(v) for k, v in r["seconds"].items()},
        refused={str(k): str(v) for k, v in r["refused"].items()},
        checks=_strings(r["checks"]),
        error=float(r["error"]),
        tolerance=str(r["tolerance"]),
        spent=float(r["spent"]),
    )
    h = item["hardware"]
    hardware = Hardware(str(h["name"]), str(h["uuid"]), str(h["driver"]))
    result = Result(
        hardware, str(item["kernels"]), str(item["group"]), str(item["schedule"]), receipt
    )
    if result.schedule != receipt.default and not receipt.checks:
        raise ValueError(f"{result.schedule} has no receipt of its checks")
    return result


def _strings(items: Sequence[object]) -> tuple[str, ...]:
    return tuple([str(item) for item in items])
