"""Products with one operand in quantized blocks: groups, data, and what they give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.products import BITS, DTYPES
from vkjit import blocks
from vkjit.blocks import BlockType
from vkjit.lowering.artifact import Launch, Plan, PlannedBuffer, Range, Role
from vkjit.lowering.gpu.choose import lower_contract
from vkjit.lowering.kernel.decode import unit_type
from vkjit.lowering.kernel.interpret_ops import DTYPES as MEMORY
from vkjit.lowering.kernel.specs import Precision
from vkjit.lowering.kernel.types import F32, ScalarType
from vkjit.lowering.kernel.views import View, dense
from vkjit.lowering.legalize import legalize
from vkjit.lowering.plan.groups import (
    ArrayInfo,
    BodyStep,
    ContractGroup,
    LoadStep,
    ProductStep,
    StoreStep,
)
from vkjit.lowering.plan.schedule import GpuContract
from vkjit.lowering.target import Target
from vkjit.lowering.templates.context import Lowered, TemplateContext

Array = np.ndarray[Any, Any]
X, W, OUT = range(3)
_LOSS = {
    Precision.HIGHEST: 0.0,
    Precision.HIGH: 3 * 2.0**-16,
    Precision.F16X3: 3 * 2.0**-21,
    Precision.BFLOAT16: 2.0**-7,
}
"""Error of one product of float32, relative to it, by what may stand for it."""


@dataclass(frozen=True)
class Case:
    """Rows ``x`` times a matrix of blocks, which lies by rows of ``wide`` numbers.

    ``forward`` is x [m, k] by the transpose of w [n, k]; backward x [m, k] by w [k, n]. ``left``
    exchanges the operands: the transpose of all that. ``first`` cuts the first rows of w off.
    """

    block_type: BlockType
    m: int
    n: int
    k: int
    forward: bool = True
    elem: ScalarType = F32
    left: bool = False
    batch: int = 0
    first: int = 0
    precision: Precision = Precision.HIGHEST

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix of blocks, in numbers."""
        rows, columns = (self.n, self.k) if self.forward else (self.k, self.n)
        return rows + self.first, columns

    def group(self) -> ContractGroup:
        """The product."""
        batch = (self.batch,) if self.batch else ()
        rows, columns = self.shape
        wide = dense((*batch, rows, columns))
        offset, lead = self.first * columns, wide.strides[:-2]
        w = View((*batch, rows - self.first, columns), wide.strides, offset)
        if self.forward:
            w = View((*batch, self.k, self.n), (*lead, 1, columns), offset)
        x, out = dense((*batch, self.m, self.k)), dense((*batch, self.m, self.n))
        lhs, rhs = LoadStep(X, x, self.elem), LoadStep(W, w, self.elem, self.block_type)
        m, n = self.m, self.n
        if self.left:
            axes = (*range(len(batch)), len(batch) + 1, len(batch))
            x, w, out = (v.permuted(axes) for v in (x, w, out))
            lhs, rhs = LoadStep(W, w, self.elem, self.block_type), LoadStep(X, x, self.elem)
            m, n = n, m
        body: tuple[BodyStep, ...] = (ProductStep(F32),)
        return ContractGroup(
            batch, m, n, self.k, lhs, rhs, F32, body, (StoreStep(0, OUT, out),), (), self.precision
        )

    def arrays(self) -> list[ArrayInfo]:
        """What the group reads and writes, by number."""
        many, numbers = max(self.batch, 1), math.prod(self.shape)
        units = numbers // self.block_type.size * self.block_type.nbytes // self.block_type.unit
        return [
            ArrayInfo(self.elem, many * self.m * self.k),
            ArrayInfo(unit_type(self.block_type), many * units),
            ArrayInfo(F32, many * self.m * self.n),
        ]

    def data(self) -> list[Array]:
        """Random contents, NaN where the result goes."""
        rng = np.random.default_rng(self.m + self.n + self.k)
        many = max(self.batch, 1)
        x = rng.standard_normal((many, self.m, self.k)).astype(DTYPES[self.elem])
        w = random_blocks(rng, self.block_type, (many, *self.shape))
        units = np.frombuffer(w.tobytes(), MEMORY[unit_type(self.block_type)])
        return [x.ravel(), units, np.full(many * self.m * self.n, np.nan, np.float32)]

    def check(self, data: Sequence[Array]) -> None:
        """Compares the result in ``data`` with the product of decoded numbers in float64."""
        many = max(self.batch, 1)
        x = data[X].astype(np.float64).reshape(many, self.m, self.k)
        raw = np.frombuffer(data[W].tobytes(), self.block_type.dtype)
        w = blocks.decode(self.block_type, raw.reshape(many, self.shape[0], -1))
        w = w.astype(DTYPES[self.elem]).astype(np.float64)[:, self.first :]
        w = np.swapaxes(w, -1, -2) if self.forward else w
        want, size = x @ w, np.abs(x) @ np.abs(w)
        loss = _LOSS[self.precision]
        bound = size * (self.k * 2.0**-23 + loss) + 1e-6
        if self.elem is not F32:
            bound += size * 2.0 ** -BITS[self.elem] * 1e-3
        off = np.abs(data[OUT].reshape(want.shape) - want)
        assert (off <= bound).all(), f"off by {(off / bound).max():.1f} times the bound"


def random_blocks(rng: np.random.Generator, block_type: BlockType, shape: tuple[int, ...]) -> Array:
    """Blocks of any codes, with scales that make numbers of about 1, for a ``shape`` of numbers."""
    count = math.prod(shape) // block_type.size
    raw = rng.integers(0, 256, count * block_type.nbytes, np.uint8).view(block_type.dtype)
    largest = np.abs(blocks.decode(block_type, _scaled(raw, rng, 1.0))).max(initial=1e-3)
    raw = _scaled(raw, rng, 2.0 / float(largest))
    return raw.reshape(*shape[:-1], shape[-1] // block_type.size)


def _scaled(raw: Array, rng: np.random.Generator, by: float) -> Array:
    made = raw.copy()
    for name in ("d", "m", "dmin"):
        if name in (made.dtype.names or ()):
            made[name] = rng.uniform(0.5, 1.0, made.size) * by
    return made


def lowered(case: Case, schedule: GpuContract, target: Target) -> tuple[list[Lowered], list[Array]]:
    """The kernels of a case, and arrays for them."""
    context = TemplateContext(target, case.arrays())
    kernels = lower_contract(case.group(), schedule, context)
    data = case.data()
    for info in context.arrays[len(data) :]:
        data.append(np.full(info.length, np.nan, DTYPES[info.elem]))
    return kernels, data


def plan_of(kernels: Sequence[Lowered], data: Sequence[Array], target: Target) -> Plan:
    """A plan of the kernels alone: x and w are its inputs."""
    sizes = [max(4, a.nbytes) for a in data]
    buffers = [PlannedBuffer(Role.INPUT, sizes[i], i) for i in (X, W)]
    buffers.append(PlannedBuffer(Role.OUTPUT, sizes[OUT], 0))
    places = {i: Range(i, 0, sizes[i]) for i in (X, W, OUT)}
    end = 0
    for i, size in enumerate(sizes[OUT + 1 :], OUT + 1):
        places[i] = Range(len(buffers), end, size)
        end += -(-size // 256) * 256
    if end:
        buffers.append(PlannedBuffer(Role.ARENA, end))
    steps = tuple(
        Launch(legalize(k.kernel, target), tuple(places[a] for a in k.arrays)) for k in kernels
    )
    return Plan("product", tuple(buffers), steps, frozenset(range(1, len(steps))), 0, end)


def run_on(device: Any, case: Case, schedule: GpuContract) -> None:
    """Runs a case on a Vulkan device and checks the result."""
    kernels, data = lowered(case, schedule, device.target)
    loaded = device.load(plan_of(kernels, data, device.target))
    (out,) = loaded.run([device.upload(data[i]) for i in (X, W)])
    data[OUT] = device.download(out, data[OUT].dtype, data[OUT].shape)
    case.check(data)
