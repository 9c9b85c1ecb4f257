"""checkpoint: the same values and derivatives, bit for bit, in less memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, assume, given, settings

import vkjit as vj
from tests.derivatives import noise, of
from tests.oracles import Array, arrays_of, on_device
from tests.strategies import CONTROL_STEPS, named, programs, seeds, written
from tests.targets import LARGE_GPU
from vkjit import checkpoint_policies as policies
from vkjit import dtypes
from vkjit import numpy as vnp
from vkjit.errors import ArgumentError, ShapeError, TracerError
from vkjit.ir.evaluate import evaluate
from vkjit.ir.primitive import Kind
from vkjit.ir.program import Program
from vkjit.lowering.compile import Compiled, compile_program
from vkjit.lowering.target import Target
from vkjit.passes.dce import dce
from vkjit.passes.inline import inline
from vkjit.passes.pipeline import SIMPLIFY, bodies, simplify
from vkjit.runtime import get_device

POLICIES = (
    None,
    policies.everything_saveable,
    policies.dots_saveable,
    policies.dots_with_no_batch_dims_saveable,
    policies.save_only_these_names("h"),
    policies.save_any_names_but_these("other"),
    policies.save_anything_except_these_names("h"),
    policies.save_from_both_policies(policies.dots_saveable, policies.save_only_these_names("h")),
)
Layer = Callable[[Any, Any], Any]


def layer(x: Any, w: Any) -> Any:
    h = vj.checkpoint_name(vnp.tanh(x @ w), "h")
    return x + vnp.sin(h) @ w


def loss_of(fn: Layer, turns: int = 2) -> Layer:
    def loss(x: Any, w: Any) -> Any:
        for _ in range(turns):
            x = fn(x, w)
        return (x * x).sum()

    return loss


def arguments(rows: int = 4) -> list[Array]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(s).astype(np.float32) * 0.5 for s in ((rows, 4), (4, 4))]


def bits(values: Any) -> list[bytes]:
    return [np.asarray(v).tobytes() for v in vj.tree.leaves(values)]


def gradient(program: Program) -> Program:
    """Values and cotangents of a program: of its arguments and the cotangents of its results."""

    def both(xs: Any, cts: Any) -> Any:
        values, pullback = vj.vjp(of(program), *xs)
        return values, pullback(cts)

    shapes = [
        [vj.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        for avals in (program.in_avals, program.out_avals)
    ]
    return vj.make_ir(both)(*shapes)


def names_of(program: Program) -> list[str]:
    """Names of all primitives, those of inner programs included."""
    found: list[str] = []
    for eqn in program.eqns:
        found.append(eqn.prim.name)
        for inner in eqn.prim.programs():
            found += names_of(inner)
    return found


# -- values ---------------------------------------------------------------------------------------

checkpointed = programs(max_steps=25, kinds=(dtypes.float32,), smooth=True, control=True)


@settings(max_examples=60)
@given(program=checkpointed, seed=seeds)
def test_derivatives_have_the_bits_of_those_without(program: Program, seed: int) -> None:
    assume("checkpoint" in names_of(program))
    inputs = [*arrays_of(program, seed), *noise(program.out_avals, seed + 1)]
    with_, without = gradient(program), gradient(inline(program))
    with np.errstate(all="ignore"):
        wanted = bits(evaluate(without, inputs))
        assert bits(evaluate(with_, inputs)) == wanted
        assert bits(evaluate(simplify(with_, checked=True), inputs)) == wanted


EXAMPLES = {"reference": 5, "cpu": 4}
"""Vulkan drivers take some 50 ms for each kernel: fewer programs there."""


def test_compiled_derivatives_have_the_bits_of_those_without(device: str) -> None:
    @settings(max_examples=EXAMPLES.get(device, 2), phases=[Phase.generate])
    @given(
        program=programs(max_steps=10, kinds=(dtypes.float32,), smooth=True, control=True),
        seed=seeds,
    )
    def check(program: Program, seed: int) -> None:
        assume("checkpoint" in names_of(program))
        inputs = [*arrays_of(program, seed), *noise(program.out_avals, seed + 1)]
        with_, without = (
            on_device(simplify(gradient(p)), inputs, device) for p in (program, inline(program))
        )
        assert bits(with_) == bits(without)

    check()


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_bits_on_devices(device: str, policy: policies.Policy | None) -> None:
    args = arguments()
    results: list[list[bytes]] = []
    with vj.default_device(device):
        for fn in (layer, vj.checkpoint(layer, policy=policy)):
            step = vj.jit(vj.value_and_grad(loss_of(fn), (0, 1)))
            results.append(bits(step(*args)))
    assert results[0] == results[1]


def test_random_bits_are_drawn_again(device: str) -> None:
    def noisy(x: Any, key: Any) -> Any:
        mask = vj.random.bernoulli(key, 0.5, x.shape).astype(x.dtype)
        return (vnp.exp(x) * mask).sum()

    x, key = arguments()[0], vj.random.PRNGKey(3)
    with vj.default_device(device):
        plain, again = (vj.jit(vj.grad(f))(x, key) for f in (noisy, vj.checkpoint(noisy)))
    assert bits(plain) == bits(again)
    assert 0 < np.count_nonzero(np.asarray(plain)) < x.size


TRANSFORMED: dict[str, Callable[[Layer], Callable[..., Any]]] = {
    "jvp": lambda f: lambda x, w: vj.jvp(loss_of(f), (x, w), (w, x)),
    "hessian": lambda f: vj.hessian(loss_of(f), (0, 1)),
    "vmap of a gradient": lambda f: vj.vmap(vj.grad(lambda x, w: f(x, w).sum(), 1), (0, None)),
    "gradient of a vmap": lambda f: vj.grad(lambda x, w: vj.vmap(f, (0, None))(x, w).sum(), (0, 1)),
    "linearize": lambda f: lambda x, w: vj.linearize(loss_of(f), x, w)[1](w, x),
    "inside a checkpoint": lambda f: vj.grad(loss_of(vj.checkpoint(loss_body(f))), (0, 1)),
    "inside a scan": lambda f: vj.grad(
        lambda x, w: vj.lax.scan(lambda c, _: (f(c, w), c.sum()), x, None, 3)[0].sum(), (0, 1)
    ),
    "around a scan": lambda f: vj.grad(
        lambda x, w: vj.checkpoint(
            lambda x: vj.lax.scan(lambda c, _: (f(c, w), c.sum()), x, None, 3)
        )(x)[0].sum(),
        (0, 1),
    ),
    "inside a branch": lambda f: vj.grad(
        lambda x, w: vj.lax.cond(x.sum() > 0, f, lambda x, w: x * 2, x, w).sum(), (0, 1)
    ),
}


def loss_body(fn: Layer) -> Layer:
    def twice(x: Any, w: Any) -> Any:
        return fn(fn(x, w), w)

    return twice


@pytest.mark.parametrize("name", TRANSFORMED)
@pytest.mark.parametrize("policy", [None, policies.dots_saveable], ids=str)
def test_bits_of_transformations(name: str, policy: policies.Policy | None) -> None:
    args = arguments()
    made = [TRANSFORMED[name](f)(*args) for f in (layer, vj.checkpoint(layer, policy=policy))]
    assert bits(made[0]) == bits(made[1])


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_gradients_of_gradients(policy: policies.Policy | None) -> None:
    """Originals and recomputations are differentiated apart: sums have another order."""

    def second(fn: Layer) -> Any:
        inner = vj.grad(loss_of(fn))
        return vj.grad(lambda x, w: (inner(x, w) ** 2).sum(), (0, 1))(*arguments())

    for got, want in zip(second(vj.checkpoint(layer, policy=policy)), second(layer), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5)


# -- what happens once ----------------------------------------------------------------------------


def test_writes_are_not_repeated() -> None:
    """A value that needs a write is saved: no pass changes the number of writes."""

    def written(x: Any, w: Any, cache: Any) -> Any:
        ref = vj.Ref(cache)
        ref[1:3] = vnp.sin(x @ w)
        return (vnp.tanh(ref[...]) ** 2).sum()

    cache = np.zeros((4, 4), np.float32)
    x, w = arguments(2)
    plain, again = (vj.make_ir(vj.grad(f)) for f in (written, vj.checkpoint(written)))
    counts = [names_of(p(x, w, cache)).count("copy_into") for p in (plain, again)]
    assert counts == [1, 1]
    program = simplify(again(x, w, cache))
    assert names_of(program).count("copy_into") == 1
    assert bits(vj.grad(written)(x, w, cache)) == bits(vj.grad(vj.checkpoint(written))(x, w, cache))


@settings(max_examples=40)
@given(
    program=programs(
        max_steps=25,
        kinds=(dtypes.float32,),
        smooth=True,
        control=(*CONTROL_STEPS, written, named),
    ),
    seed=seeds,
)
def test_passes_keep_the_number_of_writes(program: Program, seed: int) -> None:
    def writes(p: Program) -> int:
        own = sum(e.prim.traits.kind is Kind.WRITE for e in p.eqns)
        return own + sum(writes(inner) for e in p.eqns for inner in e.prim.programs())

    assume("copy_into" in names_of(program))
    with_, without = gradient(program), gradient(inline(program))
    count = writes(without)
    assert writes(with_) == count
    for run in SIMPLIFY:
        with_ = run(with_)
        # What nobody reads need not be written.
        assert writes(with_) <= count if run in (dce, bodies) else writes(with_) == count
        count = writes(with_)
    inputs = [*arrays_of(program, seed), *noise(program.out_avals, seed + 1)]
    with np.errstate(all="ignore"):
        assert bits(evaluate(with_, inputs)) == bits(evaluate(without, inputs))


def test_calls_of_the_host_happen_once() -> None:
    seen: list[float] = []

    def watched(x: Any) -> Any:
        y = vnp.sin(x)
        vj.debug.callback(lambda v: seen.append(float(v)), y.sum())
        return (y * vnp.cos(y)).sum()

    x = arguments()[0]
    vj.grad(vj.checkpoint(watched))(x)
    assert len(seen) == 1
    vj.jit(vj.grad(vj.checkpoint(watched)))(x)
    assert len(seen) == 2


# -- interface ------------------------------------------------------------------------------------


def test_arguments_and_results_are_pytrees() -> None:
    @vj.checkpoint
    def fn(p: Any, *, scale: Any) -> Any:
        return {"y": p["x"] * scale, "same": p["x"]}, 3.0

    x = arguments()[0]
    out, three = fn({"x": x}, scale=vnp.float32(2))
    assert bits(out["y"]) == bits(x * 2)
    assert bits(out["same"]) == bits(x)
    assert float(three) == 3.0
    grads = vj.grad(lambda x: fn({"x": x}, scale=2.0)[0]["y"].sum())(x)
    assert bits(grads) == bits(np.full_like(x, 2))


def test_static_arguments() -> None:
    @vj.checkpoint(static_argnums=(1,))
    def power(x: Any, exponent: int) -> Any:
        for _ in range(exponent):
            x = x * x
        return x.sum()

    x = arguments()[0]
    assert bits(vj.grad(power)(x, 1)) == bits(2 * x)
    with pytest.raises(TracerError, match="range"):
        vj.checkpoint(power.__wrapped__)(x, 2)


def test_one_value_for_two_arguments() -> None:
    def product(x: Any, y: Any) -> Any:
        return (vnp.sin(x) * y).sum()

    x = arguments()[0]
    plain, again = (vj.grad(lambda x, f=f: f(x, x))(x) for f in (product, vj.checkpoint(product)))
    assert bits(plain) == bits(again)


def test_remat_without_a_budget_is_checkpoint() -> None:
    residuals = [
        vj.saved_residuals(loss_of(wrap(layer, policy=policies.dots_saveable)), *arguments())
        for wrap in (vj.remat, vj.checkpoint)
    ]
    assert residuals[0] == residuals[1]


def test_refuses_what_is_not_a_function() -> None:
    number: Any = 3
    with pytest.raises(ArgumentError, match="expected a function"):
        vj.checkpoint(number)
    text: Any = "dots"
    with pytest.raises(ArgumentError, match="checkpoint_policies"):
        vj.checkpoint(layer, policy=text)


def test_refuses_shapes_that_do_not_fit() -> None:
    with pytest.raises(ShapeError):
        vj.checkpoint(layer)(np.ones((2, 3), np.float32), np.ones((4, 4), np.float32))


# -- policies -------------------------------------------------------------------------------------


def test_policies_are_data() -> None:
    first, second = (policies.save_only_these_names(*names) for names in (("a", "b"), ("b", "a")))
    assert first == second
    assert hash(first) == hash(second)
    assert first != policies.save_any_names_but_these("a", "b")


@pytest.mark.parametrize("policy", [p for p in POLICIES if p is not None], ids=str)
def test_text_of_policies(policy: policies.Policy) -> None:
    assert policies.parse(str(policy)) == policy


def test_own_policies() -> None:
    asked: list[tuple[str, int]] = []

    def policy(prim: Any, *avals: Any, **params: Any) -> bool:
        asked.append((prim.name, len(avals)))
        return prim.name == "dot_general"

    args = arguments()
    plain = vj.grad(loss_of(layer))(*args)
    assert bits(plain) == bits(vj.grad(loss_of(vj.checkpoint(layer, policy=policy)))(*args))
    assert ("dot_general", 2) in asked


def test_names_cost_nothing_when_compiled() -> None:
    def fn(x: Any) -> Any:
        return vj.checkpoint_name(vnp.sin(x), "s") + 1

    program = simplify(vj.make_ir(fn)(arguments()[0]))
    assert [e.prim.name for e in program.eqns] == ["sin", "add"]


def test_refuses_names_that_are_none() -> None:
    with pytest.raises(ArgumentError, match="expected strings"):
        policies.save_only_these_names(("a", "b"))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="both lists"):
        policies.save_and_offload_only_these_names(
            names_which_can_be_saved=["a"],
            names_which_can_be_offloaded=["a"],
            offload_src="device",
            offload_dst="pinned_host",
        )


# -- memory ---------------------------------------------------------------------------------------

ROWS, WIDTH = 128, 64
TARGETS: dict[str, Callable[[], Target]] = {
    "cpu": lambda: get_device("cpu").target,
    "gpu": lambda: LARGE_GPU,
}


def block(x: Any, p: Sequence[Any]) -> Any:
    """A feed-forward layer with a norm; most of its memory is inside."""
    up, gate, down = p
    h = x * vj.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    return x + (vj.nn.silu(h @ gate) * (h @ up)) @ down


def step_of(count: int, fn: Callable[[Any, Any], Any], target: Target) -> Compiled:
    """The gradient step of ``count`` layers in a Python loop."""

    def loss(ps: Any, x: Any) -> Any:
        for p in ps:
            x = fn(x, p)
        return (x * x).mean()

    def shape(*sizes: int) -> vj.ShapeDtypeStruct:
        return vj.ShapeDtypeStruct(sizes, np.float32)

    wide = shape(WIDTH, 4 * WIDTH)
    ps = [(wide, wide, shape(4 * WIDTH, WIDTH)) for _ in range(count)]
    program = vj.make_ir(vj.value_and_grad(loss))(ps, shape(ROWS, WIDTH))
    return compile_program(simplify(program), target)


@pytest.mark.parametrize("target", TARGETS)
def test_memory_grows_by_one_boundary_a_layer(target: str) -> None:
    boundary = ROWS * WIDTH * 4
    small, large = (
        step_of(n, vj.checkpoint(block), TARGETS[target]()).plan.arena_bytes for n in (12, 24)
    )
    assert 12 * boundary <= large - small <= 12 * boundary * 1.01
    plain = step_of(24, block, TARGETS[target]()).plan.arena_bytes
    assert plain > 4 * large


@pytest.mark.parametrize("target", TARGETS)
def test_nested_checkpoints_take_less(target: str) -> None:
    def four(x: Any, ps: Any) -> Any:
        for p in ps:
            x = vj.checkpoint(block)(x, p)
        return x

    def loss(ps: Any, x: Any) -> Any:
        for i in range(0, len(ps), 4):
            x = vj.checkpoint(four)(x, ps[i : i + 4])
        return (x * x).mean()

    wide, narrow = (
        vj.ShapeDtypeStruct(s, np.float32) for s in ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
    )
    x = vj.ShapeDtypeStruct((ROWS, WIDTH), np.float32)
    arenas: list[int] = []
    for count in (8, 24):
        program = vj.make_ir(vj.value_and_grad(loss))([(wide, wide, narrow)] * count, x)
        arenas.append(compile_program(simplify(program), TARGETS[target]()).plan.arena_bytes)
    # One boundary for four layers.
    assert arenas[1] - arenas[0] <= 4 * ROWS * WIDTH * 4 * 1.01
    assert arenas[1] < step_of(24, vj.checkpoint(block), TARGETS[target]()).plan.arena_bytes


@pytest.mark.parametrize("transform", ["vmap of a gradient", "jvp of a gradient"])
def test_memory_falls_under_transformations(transform: str) -> None:
    def loss(ps: Any, x: Any, fn: Any) -> Any:
        for p in ps:
            x = fn(x, p)
        return (x * x).mean()

    wide, narrow = (
        vj.ShapeDtypeStruct(s, np.float32) for s in ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
    )
    ps = [(wide, wide, narrow)] * 8
    arenas: list[int] = []
    for fn in (block, vj.checkpoint(block)):
        grad = vj.grad(lambda x, ps, fn=fn: loss(ps, x, fn))
        if transform == "vmap of a gradient":
            x = vj.ShapeDtypeStruct((2, ROWS, WIDTH), np.float32)
            program = vj.make_ir(vj.vmap(grad, (0, None)))(x, ps)
        else:
            x = vj.ShapeDtypeStruct((ROWS, WIDTH), np.float32)
            push = lambda x, t, ps, g=grad: vj.jvp(lambda x: g(x, ps), (x,), (t,))  # noqa: E731
            program = vj.make_ir(push)(x, x, ps)
        arenas.append(compile_program(simplify(program), LARGE_GPU).plan.arena_bytes)
    assert arenas[1] < arenas[0] / 2
