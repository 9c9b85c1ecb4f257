"""Which operations share a kernel, as the text of their groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from tests.strategies import programs
from vkjit import nn
from vkjit import numpy as vnp
from vkjit.api.staged import make_ir
from vkjit.ir.program import Program
from vkjit.lowering.plan.canonical import canonical
from vkjit.lowering.plan.groups import (
    ConstStep,
    ContractGroup,
    ControlGroup,
    GatherStep,
    Group,
    InverseGroup,
    LoadStep,
    LoopGroup,
    Partition,
    ProductStep,
    ReduceStep,
    ScalarStep,
    ScanGroup,
    ScatterAddGroup,
    SetRowsGroup,
    SortGroup,
)
from vkjit.lowering.plan.partition import partition
from vkjit.passes.pipeline import simplify


def groups_of(fn: Callable[..., Any], *args: Any) -> Partition:
    return partition(simplify(make_ir(fn)(*args)))


def step_text(step: object) -> str:
    match step:
        case LoadStep():
            return f"load a{step.array}"
        case GatherStep():
            return f"gather a{step.array} at {step.index}"
        case ConstStep():
            return f"const {step.value}"
        case ScalarStep():
            return f"{step.fn} {' '.join(map(str, step.args))}"
        case ReduceStep():
            return f"reduce {step.arg}"
        case ProductStep():
            return "product"
    raise AssertionError(step)


def outline(group: Group) -> str:
    """A group on one line: its space, its steps in order, its stores."""
    plain, _ = canonical(group)
    if isinstance(plain, LoopGroup):
        head = f"loop {plain.shape} reduced {plain.reduced}"
    elif isinstance(plain, ContractGroup):
        head = f"contract {plain.batch} {plain.m}x{plain.n}x{plain.k}"
    elif isinstance(plain, InverseGroup):
        return f"inverse {plain.outer}x{plain.length}x{plain.inner}"
    elif isinstance(plain, (ScanGroup, SortGroup)):
        kind = "scan" if isinstance(plain, ScanGroup) else "sort"
        return f"{kind} {plain.outer}x{plain.length}x{plain.inner}"
    else:
        return f"scatter {plain.outer}x{plain.size}x{plain.inner}"
    steps = ", ".join(step_text(s) for s in plain.body)
    stores = " ".join(f"{s.value}->a{s.array}" for s in plain.stores)
    return f"{head}: {steps}; {stores}"


def kernels_of(parts: Partition) -> list[Group]:
    """The groups, where nothing decides how often they run."""
    found = [g for g in parts.groups if not isinstance(g, ControlGroup)]
    assert len(found) == len(parts.groups)
    return found


def outlines(parts: Partition) -> list[str]:
    return [outline(g) for g in kernels_of(parts)]


def f32(*shape: int) -> np.ndarray[Any, Any]:
    return np.zeros(shape, np.float32)


def test_softmax_is_one_group_with_two_reductions() -> None:
    (group,) = groups_of(nn.softmax, f32(8, 32)).groups
    assert isinstance(group, LoopGroup)
    assert group.shape == (8, 32)
    assert group.reduced == 1
    assert sum(isinstance(s, ReduceStep) for s in group.body) == 2
    assert sum(isinstance(s, LoadStep) for s in group.body) == 1
    assert len(group.stores) == 1


def test_rms_norm_is_one_group() -> None:
    parts = groups_of(nn.rms_norm, f32(8, 32), f32(32))
    (group,) = parts.groups
    assert isinstance(group, LoopGroup)
    assert sum(isinstance(s, ReduceStep) for s in group.body) == 1
    assert {s.array for s in group.body if isinstance(s, LoadStep)} == {0, 1}


def test_residual_and_norm_share_a_group() -> None:
    def block(x: Any, y: Any, scale: Any) -> tuple[Any, Any]:
        total = x + y
        return total, nn.rms_norm(total, scale)

    (group,) = groups_of(block, f32(8, 32), f32(8, 32), f32(32)).groups
    assert isinstance(group, LoopGroup)
    assert len(group.stores) == 2


def test_bias_and_gelu_are_the_epilogue_of_a_product() -> None:
    def layer(x: Any, w: Any, b: Any) -> Any:
        return nn.gelu(x @ w + b)

    (group,) = groups_of(layer, f32(8, 16), f32(16, 32), f32(32)).groups
    assert isinstance(group, ContractGroup)
    assert (group.batch, group.m, group.n, group.k) == ((), 8, 32, 16)
    assert isinstance(group.body[0], ProductStep)
    assert sum(isinstance(s, LoadStep) for s in group.body) == 1
    assert len(group.stores) == 1


def test_rope_reads_shifted_halves_without_copies() -> None:
    def rope(x: Any, cos: Any, sin: Any) -> Any:
        half = x.shape[-1] // 2
        left, right = x[..., :half], x[..., half:]
        return vnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)

    parts = groups_of(rope, f32(4, 6, 16), f32(6, 8), f32(6, 8))
    assert len(parts.groups) <= 2
    assert all(isinstance(g, LoopGroup) and not g.reduced for g in parts.groups)
    stored = {s.array for g in parts.groups if isinstance(g, LoopGroup) for s in g.stores}
    assert stored == {parts.results[0]}


@pytest.mark.parametrize(
    ("fn", "shapes", "expected"),
    [
        (
            lambda x, y: (x + y) * 2,
            [(3, 4), (3, 4)],
            ["loop (3, 4) reduced 0: load a0, load a1, add 0 1, const 2.0, mul 2 3; 4->a2"],
        ),
        (
            lambda x: vnp.sum(vnp.exp(x), axis=1),
            [(3, 4)],
            ["loop (3, 4) reduced 1: load a0, exp 0, reduce 1; 2->a1"],
        ),
        (lambda x: vnp.cumsum(x, 0), [(5, 2)], ["scan 1x5x2"]),
        (
            lambda x, y: x @ y,
            [(2, 3, 4), (2, 4, 5)],
            ["contract (2,) 3x5x4: product; 0->a2"],
        ),
        (
            lambda x, y: vnp.swapaxes(x, 0, 1) + y,
            [(4, 3), (3, 4)],
            ["loop (3, 4) reduced 0: load a0, load a1, add 0 1; 2->a2"],
        ),
    ],
    ids=["pointwise", "reduction", "scan", "product", "view"],
)
def test_outlines(
    fn: Callable[..., Any], shapes: Sequence[tuple[int, ...]], expected: list[str]
) -> None:
    assert outlines(groups_of(fn, *[f32(*s) for s in shapes])) == expected


def test_axes_that_cannot_merge_become_batch_axes() -> None:
    """Free axes with a summed axis between them are no run in memory: one of them is peeled off."""

    def product(x: Any, y: Any) -> Any:
        return vnp.einsum("akb,kc->abc", x, y)

    parts = groups_of(product, f32(3, 4, 5), f32(4, 6))
    (group,) = parts.groups
    assert isinstance(group, ContractGroup)
    assert group.k == 4
    sizes = [*group.batch, group.m, group.n]
    assert sorted(n for n in sizes if n > 1) == [3, 5, 6]


def test_repeated_layers_have_one_canonical_group() -> None:
    def two(x: Any, w: Any, v: Any) -> Any:
        return vnp.tanh(vnp.tanh(x @ w) @ v)

    first, second = kernels_of(groups_of(two, f32(8, 8), f32(8, 8), f32(8, 8)))
    assert canonical(first)[0] == canonical(second)[0]
    assert canonical(first)[1] != canonical(second)[1]


def writers(group: Group) -> list[int]:
    if isinstance(group, (LoopGroup, ContractGroup)):
        return [s.array for s in group.stores]
    return [group.target]


def readers(group: Group) -> list[int]:
    if isinstance(group, (ScatterAddGroup, SetRowsGroup)):
        return [group.indices.array, group.updates.array, group.target]
    if isinstance(group, InverseGroup):
        return [group.order.array]
    if isinstance(group, (ScanGroup, SortGroup)):
        return [group.source.array]
    loads = [s.array for s in group.body if isinstance(s, (LoadStep, GatherStep))]
    if isinstance(group, ContractGroup):
        loads += [group.lhs.array, group.rhs.array]
    return [a for a in loads if a >= 0]


@settings(max_examples=40)
@given(program=programs())
def test_arrays_are_written_before_they_are_read(program: Program) -> None:
    parts = partition(simplify(program))
    ready = set(range(parts.inputs))
    for group in kernels_of(parts):
        missing = {a for a in readers(group) if a not in ready and parts.arrays[a].length}
        assert not missing, outline(group)
        ready.update(writers(group))
    assert all(parts.arrays[r].length == 0 or r in ready for r in parts.results)
    assert len(set(parts.results)) == len(parts.results)
    assert all(r >= parts.inputs for r in parts.results)


def test_nothing_is_written_to_an_input() -> None:
    def fn(x: Any, i: Any, u: Any) -> Any:
        return x.at[i].add(u), x

    parts = groups_of(fn, f32(5, 2), np.array([0, 3], np.int32), f32(2, 2))
    for group in kernels_of(parts):
        assert all(a >= parts.inputs for a in writers(group))


def test_groups_name_the_operations_that_they_compute_on_the_way() -> None:
    def chain(x: Any) -> Any:
        return vnp.sum(vnp.exp(x) * 2.0 + 1.0, 0), vnp.tanh(x)

    for group in groups_of(chain, f32(8, 32)).groups:
        names = [origin.partition(" at ")[0] for origin in group.origin]
        assert set(names) - {"result"} in ({"exp", "mul", "add", "reduce_sum"}, {"tanh"})
        assert all("test_partition.py:" in o for o in group.origin if o != "result")


def test_a_transposed_result_is_written_as_it_is_seen() -> None:
    """No copy follows the product, nor a chain of pointwise work."""
    x, y = np.zeros((8, 4), np.float32), np.zeros((4, 6), np.float32)
    parts = partition(make_ir(lambda x, y: ((x @ y).T, (x * 2).T))(x, y))
    assert len(parts.groups) == 2
