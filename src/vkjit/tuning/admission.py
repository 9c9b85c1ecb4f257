"""What a schedule must show before it is used: right results where products go wrong.

Small variants of the group (*twins*) run against float64: sizes that fill the schedule's blocks and
sizes that do not, with no, one and many steps of the sum; on random numbers, on NaN, infinities and
huge numbers, and up to the edge of overflow. Then the real size: blocks at its corners and inside
against float64, and every element against the default schedule.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never, final

import numpy as np

from vkjit.errors import MissingRuleError, VkjitError
from vkjit.lowering.compile import serves
from vkjit.lowering.kernel.interpret_ops import DTYPES
from vkjit.lowering.plan.schedule import (
    CoopSchedule,
    GpuContract,
    NaiveSchedule,
    SkinnySchedule,
    TensorSchedule,
    TiledSchedule,
)
from vkjit.runtime.device import DeviceBuffer
from vkjit.tuning.case import Case, block, twin
from vkjit.tuning.reference import Array, Arrays, Values, Wanted, excess, inputs, strided, wanted
from vkjit.tuning.rig import Rig

_MANY = 8.0
"""All elements of the real size may differ by so many times what the sampled ones may."""
_ROWS, _COLUMNS = 4, 256  # of a block that is compared with float64
_FEW_STEPS = (0, 1)
_GRAIN = 8  # multiples of it are aligned for vectors of every type
_CHUNK = 1 << 22  # elements compared at once


@final
@dataclass(frozen=True, slots=True)
class Check:
    """One comparison: the largest error as a share of what is allowed; over 1 it failed.

    ``skipped`` is the reason why it was not made.
    """

    name: str
    seed: int
    share: float = 0.0
    skipped: str | None = None

    @property
    def passed(self) -> bool:
        """Whether nothing was wrong, NaN included."""
        return self.share <= 1.0

    def __str__(self) -> str:
        return f"{self.name} seed {self.seed}: " + (
            f"skipped, {self.skipped}" if self.skipped else f"{self.share:.3g} of the tolerance"
        )


@final
class Admission:
    """Checks schedules on one device; remembers those of twins, which many groups share."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._known: dict[object, Check] = {}

    def prepare(self, case: Case, schedule: GpuContract) -> None:
        """Begins to compile the small variants that were not checked yet."""
        for _, small, _ in _twins(case, schedule):
            is_new = (small, schedule, Values.RANDOM) not in self._known
            if is_new and serves(small.group, small.infos, schedule, self._rig.target):
                with contextlib.suppress(VkjitError):  # raised again where it is checked
                    self._rig.prepare(small, schedule)

    def twins(self, case: Case, schedule: GpuContract) -> list[Check]:
        """The checks of small variants, up to the first that fails."""
        found: list[Check] = []
        for name, small, kinds in _twins(case, schedule):
            for kind in kinds:
                found.append(self._twin(f"{name} {kind.value}", small, schedule, kind))
                if not found[-1].passed:
                    return found
        return found

    def _twin(self, name: str, small: Case, schedule: GpuContract, kind: Values) -> Check:
        key = (small, schedule, kind)
        if key not in self._known:
            self._known[key] = self._compared(name, small, schedule, kind)
        return self._known[key]

    def _compared(self, name: str, small: Case, schedule: GpuContract, kind: Values) -> Check:
        seed = _seed(name, schedule)
        if not serves(small.group, small.infos, schedule, self._rig.target):
            return Check(name, seed, skipped="the schedule does not serve this size")
        arrays = inputs(small, kind, seed)
        try:
            got = self._rig.results(small, schedule, self._rig.upload(small, arrays))
        except MissingRuleError as error:
            return Check(name, seed, skipped=str(error))
        return Check(name, seed, _share(small, wanted(small, arrays), got))


@final
class RealSize:
    """The inputs of a group at its own size, what float64 makes of parts, and the default's result.

    Raises:
        VkjitError: the default schedule itself fails.
    """

    def __init__(self, rig: Rig, case: Case, default: GpuContract) -> None:
        self._rig = rig
        self._case = case
        self.seed = _seed("real size", default)
        arrays = inputs(case, Values.RANDOM, self.seed)
        self.given: Sequence[DeviceBuffer] = rig.upload(case, arrays)
        self._blocks = [(part, wanted(part, arrays)) for part in _blocks(case, self.seed)]
        self._default = rig.results(case, default, self.given)
        del arrays

    def check(self, schedule: GpuContract) -> list[Check]:
        """Parts against float64, then everything against the default schedule."""
        got = self._rig.results(self._case, schedule, self.given)
        worst = max(_share(part, want, got) for part, want in self._blocks)
        found = [Check("real size, parts", self.seed, worst)]
        if found[0].passed:
            found.append(Check("real size, all", self.seed, self._beside_default(got)))
        return found

    def _beside_default(self, got: Arrays) -> float:
        """The largest difference to the default's result, as a share of what is allowed."""
        worst = 0.0
        for number, store in enumerate(self._case.group.stores):
            ours, theirs = got[store.array], self._default[store.array]
            if np.array_equal(ours.view(np.uint8), theirs.view(np.uint8)):
                continue
            allowed = max(_largest(want[number].allowed) for _, want in self._blocks)
            for start in range(0, len(ours), _CHUNK):
                part = slice(start, start + _CHUNK)
                value = theirs[part].astype(np.float64)
                want = Wanted(value, np.full(value.shape, _MANY * allowed))
                worst = max(worst, excess(ours[part], want))
        return worst


def _largest(allowed: Array) -> float:
    finite = allowed[np.isfinite(allowed)]
    return float(finite.max()) if finite.size else 0.0


def _share(case: Case, want: Sequence[Wanted], got: Arrays) -> float:
    """The largest excess over all stores."""
    worst = 0.0
    for store, one in zip(case.group.stores, want, strict=True):
        elem = case.infos[store.array].elem
        found = strided(got[store.array], store.view).view(DTYPES[elem])
        worst = max(worst, excess(found, one))
    return worst


def _twins(case: Case, schedule: GpuContract) -> list[tuple[str, Case, tuple[Values, ...]]]:
    """Small variants, and the kinds of inputs for each."""
    m, n, k = _whole(case, schedule)
    every, most = tuple(Values), (Values.RANDOM, Values.SPECIAL)
    up = _GRAIN if not isinstance(schedule, SkinnySchedule) else 0  # it takes few rows only
    found = [
        ("whole blocks", twin(case, (m, n, k)), every),
        ("ragged, aligned", twin(case, (m + up, n + up, k + _GRAIN)), every),
        ("ragged", twin(case, (max(m - 1, 1), max(n - 3, 1), k + 1)), every),
        ("smaller than a block", twin(case, (3, 5, 7)), most),
    ]
    for steps in _FEW_STEPS:
        found.append((f"K = {steps}", twin(case, (m // 2 + 1, 9, steps)), (Values.RANDOM,)))
    return found


def _whole(case: Case, schedule: GpuContract) -> tuple[int, int, int]:
    """A few blocks of a schedule without edges; for each part of the sum two steps."""
    match schedule:
        case NaiveSchedule():
            return 2 * schedule.rows, 2 * schedule.columns, 32
        case SkinnySchedule():
            g, wide = case.group, 2 * schedule.columns * schedule.beside * _GRAIN
            k = 8 * schedule.team * schedule.split_k
            return (g.m, wide, k) if g.m <= g.n else (wide, g.n, k)
        case TiledSchedule() | CoopSchedule() | TensorSchedule():
            k = 2 * schedule.block_k * schedule.split_k
            return schedule.block_m, schedule.block_n, k
        case _:
            assert_never(schedule)


def _blocks(case: Case, seed: int) -> list[Case]:
    """Parts of the product: two corners, and two places inside."""
    group = case.group
    rng = np.random.default_rng(seed)

    def run(length: int, width: int, place: int) -> range:
        width = min(width, length)
        starts = (0, length - width, *rng.integers(0, length - width + 1, 2).tolist())
        return range(starts[place], starts[place] + width)

    found: list[Case] = []
    for place in range(4):
        batch = [run(size, 1, place).start for size in group.batch]
        rows, columns = run(group.m, _ROWS, place), run(group.n, _COLUMNS, place)
        found.append(block(case, batch, rows, columns))
    return found


def _seed(name: str, schedule: GpuContract) -> int:
    """A number that is the same in every process."""
    digest = hashlib.sha256(f"{name} {schedule.text()}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


def failure(checks: Sequence[Check]) -> str | None:
    """Why a schedule cannot be admitted, or None if it can."""
    wrong = next((check for check in checks if not check.passed), None)
    if wrong is not None:
        return f"wrong result: {wrong}"
    if not any(check.skipped is None for check in checks):
        return "no small variant could be checked"
    return None


def admitted(
    admission: Admission, real: RealSize, case: Case, schedule: GpuContract
) -> tuple[list[Check], str | None]:
    """All checks of a schedule, and why it is refused, or None."""
    try:
        checks = admission.twins(case, schedule)
        reason = failure(checks)
        if reason is None:
            checks = [*checks, *real.check(schedule)]
            reason = failure(checks)
    except VkjitError as error:
        return [], f"{type(error).__name__}: {error}"
    return checks, reason
