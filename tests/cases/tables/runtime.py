# type: ignore  # data: NumPy scalar types called on lists, which its stubs refuse
"""Compiler and runtime: tracing, caches, errors, outputs, large programs."""

# ruff: noqa: E501, E741  one line of data each, in the words of the tables

from __future__ import annotations

import numpy as np

F, I = np.float32, np.int32


def count_traces(vj, x):
    seen = []

    def f(a, scale=1.0):
        seen.append(1)
        return a * scale

    g = vj.jit(f)
    out = [g(x, 2.0), g(x, 3.0), g(x + 1, 4.0)]
    one = len(seen)
    h = vj.jit(f, static_argnums=1)
    del seen[:]
    h(x, (1 + 1) * 1.0), h(x, 2.0), h(x, 3.0)
    return out, I(one), I(len(seen))


def equal_static_tuples(vj, x):
    seen = []

    def f(a, shape):
        seen.append(1)
        return a.reshape(shape)

    g = vj.jit(f, static_argnums=1)
    return g(x, (2, 3)), g(x, tuple([2, 3])), g(x, (3, 2)), I(len(seen))


def same_code_other_closure(vj, x):
    def make(k, shift):
        return vj.jit(lambda v: v * k + shift)

    fs = [make(k, F([k])) for k in (1, 2, 3)]
    return [f(x) for f in fs] + [f(x) for f in fs]


def after_an_error(vj, x):
    """A failing trace, nested as deep as it goes, must leave nothing behind."""

    class Mine(Exception):
        pass

    def bad(v):
        vj.numpy.sin(v)
        raise Mine("from inside a trace")

    def tries():
        yield lambda: vj.jit(bad)(x)
        yield lambda: vj.grad(lambda v: vj.jit(bad)(v).sum())(x)
        yield lambda: vj.vmap(vj.grad(bad))(x)
        yield lambda: vj.jit(lambda v: vj.lax.scan(lambda c, t: bad(c), v, x))(x[0])
        yield lambda: vj.jit(vj.grad(lambda v: vj.checkpoint(bad)(v)))(x[0])

    caught = 0
    for attempt in tries():
        try:
            attempt()
        except Mine:
            caught += 1
    return I(caught), vj.jit(lambda v: v + 1)(x), vj.grad(lambda v: (v**2).sum())(x), x * 2


def leaked(vj, x):
    kept = []

    def f(v):
        kept.append(v * 2)
        return v

    vj.jit(f)(x)
    return vj.jit(lambda v: v + kept[0])(x)


def deep(vj, x):
    def f(v):
        for _ in range(1500):
            v = v + v * 0.001
        return v

    return vj.jit(vj.value_and_grad(f))(x)


def wide_args():
    return tuple(np.full(3, i, F) for i in range(1200))


def wide(vj, *xs):
    total = 0.0
    for x in xs:
        total = total + x
    grads = vj.grad(lambda ts: sum((t * t).sum() for t in ts))(list(xs))
    return total, [x + 1 for x in xs][::400], grads[::400], vj.numpy.stack(xs)[::400, 0]


def donated(vj, a, b, c, val):
    def f(state, val):
        y = val - val
        return (y, y, y), state

    ys, state = vj.jit(f, donate_argnums=(0,))((a, b, c), val)
    return ys, state


CASES = [
    dict(
        id="run-one-trace-for-python-scalars",
        source="jax-ml/jax#3163, jax-ml/jax#4274",
        modes=("plain",),
        says="Each new Python scalar compiled the function again; a static one must compile once a value.",
        args=lambda: (F([1, 2]),),
        fn=count_traces,
        want=[[F([2, 4]), F([3, 6]), F([8, 12])], I(1), I(2)],
    ),
    dict(
        id="run-static-arguments-by-value",
        source="jax-ml/jax#4712, jax-ml/jax#883",
        modes=("plain",),
        says="Static arguments were compared by identity, so equal tuples compiled again.",
        args=lambda: (F(np.arange(6)),),
        fn=equal_static_tuples,
        want=lambda: [
            np.arange(6.0).reshape(2, 3),
            np.arange(6.0).reshape(2, 3),
            np.arange(6.0).reshape(3, 2),
            I(2),
        ],
    ),
    dict(
        id="run-unhashable-static-raises",
        source="jax-ml/jax#1038, jax-ml/jax#4712",
        says="An unhashable static argument must be refused, not compared by identity.",
        args=lambda: (F([1]),),
        fn=lambda vj, x: vj.jit(lambda a, s: a, static_argnums=1)(x, [1]),
        raises=(TypeError, ValueError),
    ),
    dict(
        id="run-closures-with-the-same-code",
        source="Xilinx/mlir-aie#2948",
        modes=("plain",),
        says="A cache keyed on the code alone mixed up closures that captured other values.",
        args=lambda: (F([1, 10]),),
        fn=same_code_other_closure,
        want=lambda: [F([1, 10]) * k + k for k in (1, 2, 3)] * 2,
    ),
    dict(
        id="run-error-in-trace-leaves-no-state",
        source="jax-ml/jax#2507, ykjit/yk#1302",
        modes=("plain",),
        says="An exception while tracing left the tracing state behind and broke later calls.",
        args=lambda: (F([1, 2]),),
        fn=after_an_error,
        want=[I(5), F([2, 3]), F([2, 4]), F([2, 4])],
    ),
    dict(
        id="run-leaked-tracer-raises",
        source="jax-ml/jax#4312, jax-ml/jax#23065",
        says="Using a value kept from a finished trace must be an error that says so, not a wrong number or a crash.",
        args=lambda: (F([1, 2]),),
        fn=leaked,
        raises=True,
    ),
    dict(
        id="run-deep-chain",
        source="tinygrad/tinygrad#8457, pytorch/pytorch#5534, karpathy/micrograd#90",
        modes=("plain",),
        limit_s=240,
        says="A chain of operations longer than the recursion limit failed in a recursive pass, or when it was freed.",
        args=lambda: (F(1),),
        fn=deep,
        want=[1.001**1500, 1.001**1500],
        rtol=1e-3,
    ),
    dict(
        id="run-1200-inputs-and-outputs",
        source="ml-explore/mlx#1880, tinygrad/tinygrad#8617, pytorch/pytorch#113131",
        modes=("jit",),
        limit_s=240,
        says="Fusing everything needed more buffers than one kernel can bind.",
        args=wide_args,
        fn=wide,
        want=[
            np.full(3, 719400.0),
            [np.full(3, v + 1.0) for v in (0, 400, 800)],
            [np.full(3, 2.0 * v) for v in (0, 400, 800)],
            F([0, 400, 800]),
        ],
    ),
    dict(
        id="run-donated-state-returned-after-others",
        source="jax-ml/jax#39625",
        modes=("plain",),
        says="Donated buffers were overwritten by other outputs before the state itself was passed on.",
        args=lambda: (F(1), F(2), F(3), F(0)),
        fn=donated,
        want=[[F(0)] * 3, [F(1), F(2), F(3)]],
    ),
    dict(
        id="run-donated-twice-raises-or-is-right",
        source="jax-ml/jax#9635, jax-ml/jax#12627",
        limit_s=30,
        says="Passing a donated buffer in two places hung; an error or the right sum are both fine.",
        args=lambda: (F([1, 2]),),
        fn=lambda vj, x: vj.jit(lambda a, b: a + b, donate_argnums=(0,))(x, x),
        raises=True,
        or_want=F([2, 4]),
    ),
]
