"""Schedules: every number a template needs beside the group, as frozen data.

The tuner searches over these records; a default exists for every group and target. Those of
products on a GPU have one line of text, which is stable, and which ``parse_schedule`` reads back:

    naive(rows=8, columns=16)
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any, final, get_args

from vkjit.errors import ConfigError


@final
@dataclass(frozen=True, slots=True)
class LoopSchedule:
    """How a ``LoopGroup`` runs on a CPU.

    ``lanes`` is the vector width of one step, ``unroll`` the independent vectors per step and
    ``tasks`` the number of tasks.
    """

    lanes: int
    unroll: int = 1
    tasks: int = 1


@final
@dataclass(frozen=True, slots=True)
class ContractSchedule:
    """How a ``ContractGroup`` runs on a CPU.

    ``tile_m`` x ``tile_n`` outputs are kept in registers over ``tile_k`` steps of the sum;
    ``block_m``, ``block_n`` and ``block_k`` are blocks for the cache; ``pack_lhs`` and ``pack_rhs``
    copy operands into panels.
    """

    tile_m: int
    tile_n: int
    tile_k: int = 1
    block_m: int = 0
    block_n: int = 0
    block_k: int = 0
    pack_lhs: bool = False
    pack_rhs: bool = False


@final
@dataclass(frozen=True, slots=True)
class NaiveSchedule:
    """A product on a GPU with one output for each invocation, read straight from memory.

    Workgroups are ``rows`` x ``columns`` outputs.
    """

    rows: int = 8
    columns: int = 16

    def text(self) -> str:
        """One line that ``parse_schedule`` reads back."""
        return _text(self)


@final
@dataclass(frozen=True, slots=True)
class SkinnySchedule:
    """A product on a GPU with few rows, each element of the large operand read once.

    An invocation has ``columns`` outputs of every row. ``team`` invocations share a sum: side by
    side along k, or (``along_k`` is false) apart along k while ``beside`` of them stand side by
    side along n. The sum is cut into ``split_k`` parts of their own workgroups.
    """

    team: int
    columns: int
    beside: int = 1
    along_k: bool = True
    split_k: int = 1

    def text(self) -> str:
        """One line that ``parse_schedule`` reads back."""
        return _text(self)

    @property
    def workgroup(self) -> tuple[int, int, int]:
        """The team along x, or what stands side by side along x and the team along y."""
        return (self.team, 1, 1) if self.along_k else (self.beside, self.team, 1)


@final
@dataclass(frozen=True, slots=True)
class TiledSchedule:
    """A product on a GPU with tiles of both operands in shared memory.

    A workgroup has ``block_m`` x ``block_n`` outputs and takes ``block_k`` steps of the sum at
    once; an invocation has ``tile_m`` x ``tile_n`` of them in registers, 1 x 1 or multiples of 4,
    and takes ``unroll`` steps between two tests of its loop. With two ``stages`` one tile is filled
    while the other is used. The steps of a tile are shared out among ``slices`` of the invocations,
    which meet at the end. The sum is cut into ``split_k`` parts of their own workgroups, which a
    second kernel adds up.
    """

    block_m: int
    block_n: int
    block_k: int
    tile_m: int
    tile_n: int
    stages: int = 1
    split_k: int = 1
    slices: int = 1
    unroll: int = 8

    def text(self) -> str:
        """One line that ``parse_schedule`` reads back."""
        return _text(self)

    @property
    def workgroup(self) -> tuple[int, int, int]:
        """Invocations along n, along m, and along k."""
        return (self.block_n // self.tile_n, self.block_m // self.tile_m, self.slices)


@final
@dataclass(frozen=True, slots=True)
class CoopSchedule:
    """A product on matrix units that a subgroup works together.

    A workgroup has ``block_m`` x ``block_n`` outputs and takes ``block_k`` steps of the sum at
    once; its ``subgroups_m`` x ``subgroups_n`` subgroups of ``subgroup`` invocations each hold an
    equal part of the tile in fragments of ``fragment_m`` x ``fragment_n`` x ``fragment_k``.
    Workgroups walk the product in bands of ``band`` tiles along m, at most. The sum is cut into
    ``split_k`` parts of their own workgroups, which a second kernel adds up.
    """

    block_m: int
    block_n: int
    block_k: int
    subgroups_m: int
    subgroups_n: int
    fragment_m: int
    fragment_n: int
    fragment_k: int
    subgroup: int
    split_k: int = 1
    band: int = 8

    def text(self) -> str:
        """One line that ``parse_schedule`` reads back."""
        return _text(self)

    @property
    def invocations(self) -> int:
        """Invocations of a workgroup."""
        return self.subgroups_m * self.subgroups_n * self.subgroup


@final
@dataclass(frozen=True, slots=True)
class TensorSchedule:
    """A product on cooperative matrices of flexible dimensions, VK_NV_cooperative_matrix2.

    ``block_m`` x ``block_n`` sums are one matrix, to which ``block_k`` steps are added at once; the
    loop over them is written out ``unroll`` times. A workgroup of ``invocations`` holds the matrix
    together and the driver stages the operands, or (``whole_workgroup`` is false) one subgroup
    does and reads them straight from memory. The sum is cut into ``split_k`` parts of their own
    workgroups, which a second kernel adds up.
    """

    block_m: int
    block_n: int
    block_k: int
    invocations: int
    unroll: int = 8
    split_k: int = 1
    whole_workgroup: bool = True

    def text(self) -> str:
        """One line that ``parse_schedule`` reads back."""
        return _text(self)


GpuContract = NaiveSchedule | SkinnySchedule | TiledSchedule | CoopSchedule | TensorSchedule
"""The ways in which a GPU computes products; ``lowering.gpu.choose`` knows a template for each."""

Schedule = LoopSchedule | ContractSchedule | GpuContract

_TEXT = re.compile(r"(\w+)\(((?:\w+=-?\d+(?:, )?)*)\)")


def _name(kind: type[GpuContract]) -> str:
    """The word for a kind of schedule in its text: ``tiled`` for ``TiledSchedule``."""
    return kind.__name__.removesuffix("Schedule").lower()


def _text(schedule: GpuContract) -> str:
    numbers = [f"{f.name}={int(getattr(schedule, f.name))}" for f in fields(schedule)]
    return f"{_name(type(schedule))}({', '.join(numbers)})"


_KINDS: dict[str, type[GpuContract]] = {_name(kind): kind for kind in get_args(GpuContract)}


def parse_schedule(text: str) -> GpuContract:
    """The schedule that ``text`` names.

    Raises:
        ConfigError: no kind of schedule has this name, or not these numbers.
    """
    found = _TEXT.fullmatch(text.strip())
    kind = _KINDS.get(found[1]) if found else None
    if found is None or kind is None:
        raise ConfigError(
            f"schedule: got {text!r}, expected one of {', '.join(sorted(_KINDS))} with numbers in "
            "parentheses; run `vkjit tune` again"
        )
    given = dict(part.split("=") for part in found[2].split(", ") if part)
    known = {f.name: f.type for f in fields(kind)}
    if given.keys() != known.keys():
        raise ConfigError(
            f"schedule: got {text!r}, expected the numbers {', '.join(known)}; run `vkjit tune` "
            "again"
        )
    numbers: dict[str, Any] = {
        name: bool(int(given[name])) if type_ == "bool" else int(given[name])
        for name, type_ in known.items()
    }
    return kind(**numbers)
