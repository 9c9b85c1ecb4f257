"""Values computed again: the same bits, the same writes, and a peak that the model foresees."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vkjit as vj
import vkjit.numpy as vnp
from tests.oracles import arrays_of
from tests.strategies import programs, seeds
from vkjit.api.memory import storage
from vkjit.ir.check import check
from vkjit.ir.evaluate import evaluate
from vkjit.ir.primitive import Kind, Remat
from vkjit.ir.program import Program
from vkjit.lowering.compile import compile_program
from vkjit.lowering.plan.partition import partition
from vkjit.lowering.target import MINIMAL_GPU, REFERENCE, Target
from vkjit.ops import arithmetic, write
from vkjit.passes.evict import evict
from vkjit.passes.pipeline import simplify
from vkjit.passes.rematerialize import rematerialize
from vkjit.passes.timeline import Rates, Timeline
from vkjit.trace import apply_program

RATES = Rates(1e11, 1e10, 1e-6)
WIDTH, ROWS, LAYERS = 16, 256, 12


def timeline(program: Program) -> Timeline:
    return Timeline(program, storage(partition(program)), RATES)


def chain(*weights: Any, x: Any) -> Any:
    for w in weights:
        x = vnp.tanh(x @ w)
    return vnp.sum(x * x)


def training(layers: int = LAYERS) -> Program:
    """Loss and gradients of a chain of layers."""

    def loss(weights: list[Any], x: Any) -> Any:
        return chain(*weights, x=x)

    weights = [vj.ShapeDtypeStruct((WIDTH, WIDTH), np.float32)] * layers
    x = vj.ShapeDtypeStruct((ROWS, WIDTH), np.float32)
    return simplify(vj.make_ir(vj.value_and_grad(loss))(weights, x))


def evaluated(program: Program, arrays: Any) -> list[bytes]:
    return [np.asarray(out).tobytes() for out in evaluate(program, arrays)]


def once(program: Program) -> Counter[str]:
    """How often a program does what must not be repeated."""
    eqns = [e for e in program.eqns if e.prim.traits.remat is Remat.ONCE or e.prim.acts()]
    return Counter(e.prim.name for e in eqns)


@settings(max_examples=40)
@given(st.data(), programs(max_steps=25), seeds)
def test_whatever_is_evicted_results_are_the_same(data: Any, program: Program, seed: int) -> None:
    program = simplify(program)
    model = timeline(program)
    arrays = [b.array for b in model.candidates()]
    evicted = data.draw(st.sets(st.sampled_from(arrays)) if arrays else st.just(set()))
    again = rematerialize(program, model, evicted)
    check(again)
    given_arrays = arrays_of(program, seed)
    assert evaluated(again, given_arrays) == evaluated(program, given_arrays)
    assert once(again) == once(program)


@settings(max_examples=15)
@given(st.data(), programs(max_steps=15, kinds=(np.dtype(np.float32),), smooth=True), seeds)
def test_whatever_is_evicted_of_a_gradient(data: Any, program: Program, seed: int) -> None:
    def loss(*xs: Any) -> Any:
        return sum((vnp.sum(v) for v in apply_program(program, xs)), start=0.0)

    structs = [vj.ShapeDtypeStruct(a.shape, a.dtype) for a in program.in_avals]
    joint = simplify(vj.make_ir(vj.grad(loss, argnums=tuple(range(len(structs)))))(*structs))
    model = timeline(joint)
    arrays = [b.array for b in model.candidates()]
    evicted = data.draw(st.sets(st.sampled_from(arrays)) if arrays else st.just(set()))
    again = rematerialize(joint, model, evicted)
    given_arrays = arrays_of(joint, seed)
    assert evaluated(again, given_arrays) == evaluated(joint, given_arrays)


@pytest.mark.parametrize("target", [REFERENCE, MINIMAL_GPU], ids=lambda t: t.name)
def test_the_plan_has_the_peak_that_the_model_foresees(target: Target) -> None:
    program = training()
    model = timeline(program)
    before = compile_program(program, target).arena.live_peak
    chosen = evict(model, int(model.base.max() * 0.5))
    assert 0 < chosen.outcome.peak <= model.base.max() * 0.5
    after = compile_program(rematerialize(program, model, chosen.arrays), target).arena.live_peak
    assert after <= 0.65 * before
    assert after == pytest.approx(chosen.outcome.peak, rel=0.2)


def test_the_cheaper_of_two_values_is_computed_again() -> None:
    """One pass over memory instead of a product of the same size."""

    def fn(x: Any, w: Any) -> Any:
        dear, cheap = x @ w, vnp.exp(x)
        y = x
        for _ in range(12):
            y = vnp.cumsum(vnp.cos(y), axis=0)
        return vnp.sum(y * cheap), vnp.sum(dear + y), vnp.sum(cheap + vnp.sum(y))

    x = vj.ShapeDtypeStruct((256, 256), np.float32)
    program = simplify(vj.make_ir(fn)(x, x))
    model = timeline(program)
    chosen = evict(model, int(model.base.max()) - 1)
    made = [model.buffers[a].kind for a in chosen.arrays]
    assert made
    assert all("DotGeneral" not in str(kind) for kind in made)


def test_recomputations_are_regions_of_their_own() -> None:
    program = training()
    model = timeline(program)
    chosen = evict(model, int(model.base.max() * 0.6))
    again = rematerialize(program, model, chosen.arrays)
    known = {id(out) for eqn in program.eqns for out in eqn.outs}
    regions = {e.region for e in program.eqns}
    new = [e for e in again.eqns if id(e.outs[0]) not in known]
    assert new
    assert regions.isdisjoint(e.region for e in new)
    assert len(simplify(again).eqns) == len(again.eqns)  # nothing is merged with its original


def test_the_same_program_gives_the_same_choice() -> None:
    texts: set[str] = set()
    for _ in range(2):
        program = training()
        model = timeline(program)
        chosen = evict(model, int(model.base.max() * 0.4))
        texts.add(str(rematerialize(program, model, chosen.arrays)))
    assert len(texts) == 1


def test_a_tighter_bound_costs_no_less() -> None:
    model = timeline(training(24))
    peak = int(model.base.max())
    seconds = [evict(model, int(peak * part)).outcome.seconds for part in (1.0, 0.8, 0.6, 0.4)]
    assert seconds == sorted(seconds)
    assert seconds[0] == 0.0


def test_writes_are_never_computed_again() -> None:
    def fn(x: Any, w: Any) -> Any:
        kept = write.copy_into(vnp.exp(x), w, (0, 0))
        y = x
        for _ in range(10):
            y = vnp.cumsum(vnp.cos(y), axis=0)
        return y * kept

    x, w = (vj.ShapeDtypeStruct(s, np.float32) for s in ((64, 64), (8, 64)))
    program = simplify(vj.make_ir(fn)(x, w))
    model = timeline(program)
    written = [e.outs[0] for e in program.eqns if e.prim.traits.kind is Kind.WRITE]
    assert len(written) == 1
    assert not model.buffers[model.storage.stored[written[0]]].repeatable
    again = rematerialize(program, model, [b.array for b in model.candidates()])
    assert once(again) == once(program) == Counter({"copy_into": 1})


def test_random_bits_are_the_same_again() -> None:
    def loss(w: Any, x: Any, key: Any) -> Any:
        for n in range(6):
            keep = vj.random.bernoulli(vj.random.fold_in(key, n), 0.5, (64, 64))
            x = vnp.where(keep, vnp.tanh(x @ w), 0.0)
        return vnp.sum(x)

    key = vj.random.key(3)
    x = np.ones((64, 64), np.float32) * 0.1
    fn = vj.value_and_grad(loss)
    want = vj.jit(fn)(x, x, key)
    base = vj.jit(fn).lower(x, x, key).plan
    budget = base.peak_bytes - base.arena_bytes // 4
    got = vj.jit(fn, memory_budget=budget)(x, x, key)
    for a, b in zip(want, got, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_casts_cost_nothing() -> None:
    """A wide copy of a narrow value is read twice far apart: only the narrow one is kept."""

    def fn(x: Any) -> Any:
        narrow = (x * 2).astype(vnp.float16)
        first = vnp.cumsum(narrow.astype(vnp.float32), 0)
        y = first
        for _ in range(8):
            y = vnp.cumsum(vnp.cos(y), axis=0)
        return arithmetic.mul(y, vnp.cumsum(narrow.astype(vnp.float32), 1))

    program = simplify(vj.make_ir(fn)(vj.ShapeDtypeStruct((64, 64), np.float32)))
    model = timeline(program)
    kept = [b.size for b in model.buffers.values() if b.gap > 8]
    chosen = evict(model, 0)
    assert max(kept, default=0) <= 64 * 64 * 4
    assert chosen.outcome.seconds < 1e-3
