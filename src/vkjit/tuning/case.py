"""What is tuned: a group with its arrays, the plan that runs it alone, small variants of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

from vkjit.blocks import BlockType
from vkjit.lowering.artifact import Launch, Plan, PlannedBuffer, Range, Role
from vkjit.lowering.compile import lower_group
from vkjit.lowering.kernel.elements import memory_type
from vkjit.lowering.kernel.views import View
from vkjit.lowering.plan.groups import (
    IOTA,
    ArrayInfo,
    ContractGroup,
    GatherStep,
    Group,
    LoadStep,
    StoreStep,
)
from vkjit.lowering.plan.schedule import GpuContract
from vkjit.lowering.target import Target
from vkjit.lowering.templates.context import Lowered, TemplateContext

_ALIGNMENT = 256  # of temporaries in the arena, in bytes
_CLASSES = (8, 4, 2)  # elements; strides that share these divisors share loads of vectors
_BLOCK_CLASSES = (32, 16, *_CLASSES)  # numbers in blocks; runs of 32 share a scale


@final
@dataclass(frozen=True, slots=True)
class Case:
    """A canonical product with its epilogue, and the arrays that it reads and writes."""

    group: ContractGroup
    infos: tuple[ArrayInfo, ...]

    @property
    def loads(self) -> list[LoadStep]:
        """Every read of memory: both operands, then those of the epilogue."""
        body = [s for s in self.group.body if isinstance(s, LoadStep) and s.array != IOTA]
        return [self.group.lhs, self.group.rhs, *body]

    @property
    def blocks(self) -> dict[int, BlockType]:
        """The arrays that lie in blocks."""
        return {s.array: s.blocks for s in self.loads if s.blocks is not None}

    @property
    def reads(self) -> list[int]:
        """Arrays that are read."""
        return sorted({step.array for step in self.loads})

    @property
    def writes(self) -> list[int]:
        """Arrays that are written."""
        return sorted({store.array for store in self.group.stores})

    @property
    def work(self) -> float:
        """Additions and multiplications, and bytes at their price on common GPUs."""
        g = self.group
        moved = sum(self.nbytes(a) for a in {*self.reads, *self.writes})
        return 2.0 * math.prod(g.batch) * g.m * g.n * g.k + 16.0 * moved

    def nbytes(self, array: int) -> int:
        """Bytes of an array in memory."""
        return self.infos[array].length * memory_type(self.infos[array].elem).bytes


def case_of(group: Group, infos: Sequence[ArrayInfo]) -> Case | None:
    """The case of a group, or None where small variants of it cannot be made.

    Those are groups without products, with lookups in tables, and with arrays that are read and
    written, or written through two views.
    """
    if not isinstance(group, ContractGroup):
        return None
    if any(isinstance(step, GatherStep) for step in group.body):
        return None
    case = Case(group, tuple(infos))
    if set(case.reads) & set(case.writes) or len(case.writes) != len(group.stores):
        return None
    return case


# -- running a group alone ------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Trial:
    """The kernels of a case under one schedule, and the arrays they add."""

    case: Case
    schedule: GpuContract
    kernels: tuple[Lowered, ...]
    temporaries: tuple[ArrayInfo, ...]

    def plan(self, repeats: int = 1, *, poisoned: bool = False) -> Plan:
        """The kernels in order, ``repeats`` times, a barrier before each.

        Inputs are ``case.reads``, outputs ``case.writes``. If ``poisoned``, further inputs give
        their memory to the outputs, so that what a kernel leaves unwritten is known.
        """
        case = self.case
        buffers = [PlannedBuffer(Role.INPUT, case.nbytes(a), i) for i, a in enumerate(case.reads)]
        places = {a: Range(i, 0, case.nbytes(a)) for i, a in enumerate(case.reads)}
        for position, array in enumerate(case.writes):
            size, taken = case.nbytes(array), None
            if poisoned:
                taken = len(case.reads) + position
                buffers.append(PlannedBuffer(Role.INPUT, size, taken))
            places[array] = Range(len(buffers), 0, size)
            buffers.append(PlannedBuffer(Role.OUTPUT, size, position, taken))
        end = 0
        for number, info in enumerate(self.temporaries):
            size = info.length * memory_type(info.elem).bytes
            places[len(case.infos) + number] = Range(len(buffers), end, size)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        if end:
            buffers.append(PlannedBuffer(Role.ARENA, end))
        once = [Launch(k.kernel, tuple([places[a] for a in k.arrays])) for k in self.kernels]
        steps = tuple(once * repeats)
        peak = sum(b.size for b in buffers if b.donated is None)
        return Plan("tuning", tuple(buffers), steps, frozenset(range(1, len(steps))), peak, end)


def trial(case: Case, schedule: GpuContract, target: Target) -> Trial:
    """Lowers a case.

    Raises:
        VkjitError: the template cannot serve the case.
    """
    context = TemplateContext(target, list(case.infos))
    kernels, temporaries = lower_group(case.group, schedule, context)
    return Trial(case, schedule, tuple(kernels), tuple(temporaries))


# -- variants -------------------------------------------------------------------------------------


def twin(case: Case, sizes: tuple[int, int, int], batch: int = 2) -> Case:
    """The case with other m, n and k, in small arrays laid out alike.

    Axes keep their order in memory, and strides their alignment; axes of size 1 keep it.
    """
    group = case.group
    m, n, k = (
        1 if old == 1 else new for old, new in zip((group.m, group.n, group.k), sizes, strict=True)
    )
    batches = tuple(min(size, batch) for size in group.batch)
    lengths, in_blocks = [1] * len(case.infos), case.blocks

    def moved(array: int, view: View, shape: tuple[int, ...]) -> View:
        blocks = in_blocks.get(array)
        classes = _CLASSES if blocks is None else _BLOCK_CLASSES
        small = _laid_out(view, (*batches, *shape), classes)
        if array != IOTA:
            lengths[array] = max(lengths[array], _elements(reach(small), blocks))
        return small

    def load(step: LoadStep, *shape: int) -> LoadStep:
        return replace(step, view=moved(step.array, step.view, shape))

    def store(step: StoreStep) -> StoreStep:
        return replace(step, view=moved(step.array, step.view, (m, n)))

    small = replace(
        group,
        batch=batches,
        m=m,
        n=n,
        k=k,
        lhs=load(group.lhs, m, k),
        rhs=load(group.rhs, k, n),
        body=tuple([load(s, m, n) if isinstance(s, LoadStep) else s for s in group.body]),
        stores=tuple([store(s) for s in group.stores]),
    )
    infos = [replace(i, length=size) for i, size in zip(case.infos, lengths, strict=True)]
    return Case(small, tuple(infos))


def block(case: Case, batch: Sequence[int], rows: range, columns: range) -> Case:
    """The part of the product at one batch index, in the arrays of the whole."""
    group = case.group
    starts = {"m": rows.start, "n": columns.start, "k": 0}
    sizes = {"m": len(rows), "n": len(columns), "k": group.k}

    def part(view: View, axes: str) -> View:
        shape = (*[1] * len(batch), *[sizes[a] for a in axes])
        return view.sliced((*batch, *[starts[a] for a in axes]), shape, [1] * len(shape))

    small = replace(
        group,
        batch=(1,) * len(batch),
        m=len(rows),
        n=len(columns),
        lhs=replace(group.lhs, view=part(group.lhs.view, "mk")),
        rhs=replace(group.rhs, view=part(group.rhs.view, "kn")),
        body=tuple(
            replace(s, view=part(s.view, "mn")) if isinstance(s, LoadStep) else s
            for s in group.body
        ),
        stores=tuple([replace(s, view=part(s.view, "mn")) for s in group.stores]),
    )
    return Case(small, case.infos)


def reach(view: View) -> int:
    """Elements up to the last one that the view touches."""
    if view.size == 0:
        return 1
    steps = zip(view.shape, view.strides, strict=True)
    return view.offset + sum((size - 1) * max(stride, 0) for size, stride in steps) + 1


def stride_class(stride: int) -> str:
    """What matters of a stride: 0, 1, the power of two it is a multiple of up to 8, or ``x``."""
    if stride in (0, 1):
        return str(stride)
    found = next((c for c in _CLASSES if stride % c == 0), None)
    return ("-" if stride < 0 else "") + (str(found) if found else "x")


def _elements(numbers: int, blocks: BlockType | None) -> int:
    """Elements of an array of so many numbers."""
    return numbers if blocks is None else -(-numbers // blocks.size) * blocks.nbytes // blocks.unit


def _laid_out(view: View, shape: tuple[int, ...], classes: tuple[int, ...]) -> View:
    """A view of another shape with axes in the same order and strides of the same classes."""
    strides = [0] * len(shape)
    offset, span = view.offset % max(classes), 1
    by_stride: Callable[[int], int] = lambda axis: abs(view.strides[axis])  # noqa: E731  one line
    for axis in sorted(range(len(shape)), key=by_stride):
        old, size = view.strides[axis], shape[axis]
        if old == 0:
            continue
        new = 1 if abs(old) == 1 else _like(old, max(span, 2), classes)
        span = max(span, new * max(size, 1))
        if old < 0:
            offset += new * max(size - 1, 0)
        strides[axis] = new if old > 0 else -new
    return View(shape, tuple(strides), offset)


def _like(stride: int, least: int, classes: tuple[int, ...]) -> int:
    """The smallest stride from ``least`` on of the class of ``stride``."""
    for factor in classes:
        if stride % factor == 0:
            up = -(-least // factor)
            return factor * (up if factor == max(classes) or up % 2 else up + 1)
    return least if least % 2 else least + 1
