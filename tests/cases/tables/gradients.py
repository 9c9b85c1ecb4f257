# type: ignore  # data: NumPy scalar types called on lists, which its stubs refuse
"""Gradients: undefined points, ties, duplicates, control flow, recomputation."""

# ruff: noqa: E501, E731, PLC0415  one line of data each, in the words of the tables

from __future__ import annotations

import numpy as np

F = np.float32


def dropout_under_checkpoint(vj, x):
    key = vj.random.PRNGKey(7)
    block = lambda v: (vj.random.bernoulli(key, 0.5, (64,)).astype(v.dtype) * v**2).sum()
    mask = vj.random.bernoulli(key, 0.5, (64,)).astype(x.dtype)
    g = vj.grad(vj.checkpoint(block))(x)
    # right gradient: 2 * x * the mask that the forward pass drew; and half of the mask, about, is on
    kept = mask.sum()
    return vj.numpy.abs(g - 2 * x * mask).max(), vj.numpy.logical_and(kept > 10, kept < 54)


def nested_checkpoint(vj, x, w):
    np_ = vj.numpy

    def layer(v):
        return np_.tanh(w @ v)

    plain = lambda v: layer(layer(layer(v))).sum()
    inner = vj.checkpoint(layer)
    outer = vj.checkpoint(lambda v: inner(inner(v)))
    return vj.grad(lambda v: inner(outer(v)).sum())(x) - vj.grad(plain)(x), vj.grad(plain)(x)


def nested_checkpoint_want():
    x, w = (a.astype(np.float64) for a in nested_checkpoint_args())
    values = [x]
    for _ in range(3):
        values.append(np.tanh(w @ values[-1]))
    g = np.ones(4)
    for h in values[:0:-1]:
        g = w.T @ (g * (1 - h * h))
    return np.zeros(4), g


def nested_checkpoint_args():
    return F([0.1, -0.2, 0.3, 0.7]), F(
        [[0.5, -0.1, 0.2, 0], [0.3, 0.4, -0.6, 0.1], [0, 0.2, 0.1, -0.3], [0.7, -0.5, 0.3, 0.2]]
    )


def scaled_grad(vj, x):
    """custom_vjp with a non-differentiated second argument: bwd gets it first."""
    import functools

    @functools.partial(vj.custom_vjp, nondiff_argnums=(1,))
    def scale(v, factor):
        return v

    def fwd(v, factor):
        return v, (v,)

    def bwd(factor, saved, g):
        return (factor * g + 0 * saved[0],)

    scale.defvjp(fwd, bwd)
    return vj.grad(lambda v: (scale(v, 3.0) ** 2).sum())(x)


def loop_with_branch(vj, x):
    body = lambda i, v: vj.lax.cond(i % 2 == 0, lambda u: u + 0.01, lambda u: u * 1.001, v)
    return vj.value_and_grad(lambda v: vj.lax.fori_loop(0, 130, body, v))(x)


def loop_with_branch_want():
    v, d = 1.0, 1.0
    for i in range(130):
        v, d = (v + 0.01, d) if i % 2 == 0 else (v * 1.001, d * 1.001)
    return v, d


CASES = [
    dict(
        id="grad-where-inner-guard",
        source="jax-ml/jax#5798, jax-ml/jax#1052",
        says="The guarded branch of a where still sent NaN into the gradient; with the argument of sqrt itself guarded it must be finite.",
        args=lambda: (F([0, 4, -1]),),
        fn=lambda vj, x: vj.grad(
            lambda v: vj.numpy.where(v > 0, vj.numpy.sqrt(vj.numpy.where(v > 0, v, 1.0)), 0.0).sum()
        )(x),
        want=F([0, 0.25, 0]),
    ),
    dict(
        id="grad-vmap-of-cond-is-nan-safe",
        source="jax-ml/jax#5658, jax-ml/jax#9159",
        says="Batching a cond turns it into a select; the branch not taken then put NaN into the gradient.",
        args=lambda: (F([0, 4]),),
        fn=lambda vj, x: vj.vmap(
            vj.grad(lambda v: vj.lax.cond(v > 0, vj.numpy.sqrt, lambda u: 0.0 * u, v))
        )(x),
        want=F([0, 0.25]),
        note="jax convention: the operands of the branch not taken are shielded.",
    ),
    dict(
        id="grad-max-ties-share",
        source="jax-ml/jax#13600, pytorch/pytorch#56734, Theano/Theano#4568",
        says="Tied maxima each got the full gradient, or only one did; the parts must sum to one.",
        args=lambda: (F([1, 3, 3, 2]), F([[2, 2], [5, 1]])),
        fn=lambda vj, x, y: (
            vj.grad(lambda v: v.max())(x),
            vj.grad(lambda v: v.min(axis=1).sum())(y),
            vj.grad(lambda a, b: vj.numpy.maximum(a, b).sum(), argnums=(0, 1))(x, x),
        ),
        want=[F([0, 0.5, 0.5, 0]), F([[0.5, 0.5], [0, 1]]), [F([0.5] * 4), F([0.5] * 4)]],
        note="jax convention: equal shares (torch amax as well; torch max(dim) picks one).",
    ),
    dict(
        id="grad-power-at-zero-and-negative-base",
        source="tensorflow/tfjs#346, stan-dev/math#3031, jax-ml/jax#12409",
        says="log(base) in the rule gave NaN at base 0 and at negative bases although the derivative in the base is finite.",
        args=lambda: (F([0, 0, 0, -2, -2]), F([1, 2, 3, 3, 2])),
        fn=lambda vj, x, p: (
            vj.vmap(vj.grad(vj.numpy.power, 0))(x, p),
            vj.grad(lambda v: v**0)(x[0]),
            vj.grad(vj.numpy.power, 1)(x[0], p[1]),
        ),
        want=[F([1, 0, 0, 12, -4]), F(0), F(0)],
    ),
    dict(
        id="grad-cumprod-and-prod-with-zeros",
        source="tensorflow/tensorflow#119430, tracel-ai/burn#5141, tenstorrent/tt-metal#55564",
        says="A rule that divides by the input gives NaN or drops terms when an input is zero.",
        args=lambda: (F([2, 0, 3, 4]), F([2, 0, 0, 3]), F([0, 2, 3])),
        fn=lambda vj, a, b, c: (
            [vj.grad(lambda v: vj.numpy.cumprod(v).sum())(t) for t in (a, b, c)]
            + [vj.grad(lambda v: vj.numpy.prod(v))(t) for t in (a, b)]
        ),
        want=[F([1, 32, 0, 0]), F([1, 2, 0, 0]), F([9, 0, 0]), F([0, 24, 0, 0]), F([0, 0, 0, 0])],
    ),
    dict(
        id="grad-top-k-goes-to-the-chosen",
        source="ml-explore/mlx#1428",
        says="The gradient of the largest k went to positions of the sorted order instead of the input order.",
        args=lambda: (F([[1, 2, 6, 4, 5], [9, 5, 6, 7, 8]]),),
        fn=lambda vj, x: (
            vj.grad(lambda v: (vj.lax.top_k(v, 2)[0] * vj.numpy.asarray(F([10, 1]))).sum())(x),
            vj.lax.top_k(x, 2)[1],
        ),
        want=[F([[0, 0, 10, 0, 1], [10, 0, 0, 0, 1]]), np.int32([[2, 4], [0, 4]])],
    ),
    dict(
        id="grad-gather-duplicates-add",
        source="jax-ml/jax#1521, ml-explore/mlx#3787",
        says="Gathering an entry twice must add both cotangents; broadcast operands lost theirs; computed indices made the backward pass fail.",
        args=lambda: (F([1, 2, 3]), np.int32([0, 2, 2, -1]), F([1, 10, 100, 1000])),
        fn=lambda vj, x, i, w: (
            vj.grad(lambda v: (w * v[i]).sum())(x),
            vj.grad(
                lambda v: vj.numpy.take_along_axis(
                    v * vj.numpy.ones((4, 3)),
                    vj.numpy.argsort(v * vj.numpy.ones((4, 3)), axis=1),
                    axis=1,
                ).sum()
            )(x),
        ),
        want=[F([1, 0, 1110]), F([4, 4, 4])],
    ),
    dict(
        id="grad-scatter-add-and-set",
        source="jax-ml/jax#12469, jax-ml/jax#7538, jax-ml/jax#1104",
        says="Scatter with repeated indices lost updates, and an overwritten entry kept a gradient.",
        args=lambda: (F([1, 2, 3, 4]), np.int32([1, 1, 3]), F([10, 20, 30])),
        fn=lambda vj, x, i, u: (
            x.at[i].add(u),
            vj.grad(lambda a, b: (a.at[i].add(b) ** 2).sum(), argnums=(0, 1))(x, u),
            vj.grad(
                lambda a, b: (a.at[vj.numpy.asarray(np.int32([1, 3]))].set(b[:2]) ** 2).sum(),
                argnums=(0, 1),
            )(x, u),
        ),
        want=[
            F([1, 32, 3, 34]),
            [F([2, 64, 6, 68]), F([64, 64, 68])],
            [F([2, 0, 6, 0]), F([20, 40, 0])],
        ],
    ),
    dict(
        id="grad-dynamic-slice-clamps",
        source="jax-ml/jax#34228, jax-ml/jax#5760, jax-ml/jax#11580",
        says="Forward clamped an out-of-range start and backward did not, so the gradient landed elsewhere or vanished.",
        args=lambda: (F(np.arange(10)), np.int32([8, 100, 2])),
        fn=lambda vj, x, starts: (
            [vj.lax.dynamic_slice(x, (starts[i],), (4,)) for i in range(3)],
            vj.grad(lambda v: vj.lax.dynamic_slice(v, (starts[0],), (4,)).sum())(x),
            vj.grad(lambda v: vj.vmap(lambda s: vj.lax.dynamic_slice(v, (s,), (4,)))(starts).sum())(
                x
            ),
        ),
        want=[
            [F([6, 7, 8, 9]), F([6, 7, 8, 9]), F([2, 3, 4, 5])],
            F([0] * 6 + [1] * 4),
            F([0, 0, 1, 1, 1, 1, 2, 2, 2, 2]),
        ],
        note="StableHLO: a start is clamped to [0, dim - size].",
    ),
    dict(
        id="grad-custom-vjp-nondiff-argument-order",
        source="jax-ml/jax#4617, jax-ml/jax#2912",
        says="Arguments marked as not differentiated come first in the backward rule and in their own place in the forward rule.",
        args=lambda: (F([1, -2]),),
        fn=scaled_grad,
        want=F([6, -12]),
    ),
    dict(
        id="grad-scan-wrt-sequence-and-carry",
        source="jax-ml/jax#753",
        says="Reverse mode through scan gave zeros for the scanned sequence.",
        args=lambda: (F(0.5), F([1, 2, 3, 4]), F([1, 10, 100, 1000])),
        fn=lambda vj, c, xs, w: vj.grad(
            lambda c, xs: (
                vj.lax.scan(lambda s, x: (s + 2.0 * x, s + 2.0 * x), c, xs)[1] * w
            ).sum(),
            argnums=(0, 1),
        )(c, xs),
        want=[F(1111), F([2222, 2220, 2200, 2000])],
    ),
    dict(
        id="grad-fori-loop-with-cond",
        source="tillahoffmann/jax-mps#195",
        says="Value right, gradient wrong and different from run to run, for a branch in a counted loop on a GPU backend.",
        args=lambda: (F(1),),
        fn=loop_with_branch,
        want=loop_with_branch_want,
        rtol=1e-4,
    ),
    dict(
        id="grad-checkpoint-replays-randomness",
        source="openai/guided-diffusion#167, pytorch/pytorch#190758, allenai/OLMo-core#828",
        says="The recomputed forward pass drew a new dropout mask, so the gradient belonged to another sample than the loss.",
        args=lambda: (F(np.linspace(-2, 2, 64)),),
        fn=dropout_under_checkpoint,
        want=[F(0), True],
    ),
    dict(
        id="grad-nested-checkpoint-equals-plain",
        source="CambrianTech/llama.cpp#57, jax-ml/jax#4663",
        says="Recomputation must change memory only: nested checkpoints give the plain gradient.",
        args=nested_checkpoint_args,
        fn=nested_checkpoint,
        want=nested_checkpoint_want,
    ),
    dict(
        id="grad-einsum-repeated-and-broadcast",
        source="HIPS/autograd#115, tinygrad/tinygrad#18229, jax-ml/jax#2189, HIPS/autograd#242",
        says="Trace and diagonal subscripts: transposed results, wrong axis summed, or no gradient; ellipsis axes of size one did not broadcast.",
        args=lambda: (
            F(np.arange(9).reshape(3, 3)),
            F(np.arange(12).reshape(2, 2, 3)),
            F(np.ones((2, 1, 3, 3))),
            F(np.arange(24).reshape(2, 4, 3)),
        ),
        fn=lambda vj, a, b, c, d: (
            vj.grad(lambda v: vj.numpy.einsum("ii->", v))(a),
            vj.numpy.einsum("iij->ij", b),
            vj.numpy.einsum("iij->i", b),
            vj.grad(
                lambda v: (vj.numpy.einsum("iij->ij", v) * vj.numpy.einsum("iij->ij", b)).sum()
            )(b),
            vj.numpy.einsum("...ij,...j->...i", c, d),
        ),
        want=lambda: [
            np.eye(3),
            F([[0, 1, 2], [9, 10, 11]]),
            F([3, 30]),
            F([[[0, 1, 2], [0, 0, 0]], [[0, 0, 0], [9, 10, 11]]]),
            np.repeat(np.arange(24.0).reshape(2, 4, 3).sum(-1)[..., None], 3, axis=-1),
        ],
    ),
]
