# type: ignore  # data: NumPy scalar types called on lists, which its stubs refuse
"""Numerical behaviour: overflow, cancellation, special values, accuracy at extremes."""

# ruff: noqa: E501  one line of data each, in the words of the tables

from __future__ import annotations

import math

import numpy as np

F, H = np.float32, np.float16
INF, NAN = np.inf, np.nan


def near_constant():
    return (
        F(4096 + np.arange(16) * 2.0**-9),
        np.full(256, 1234, F),
        F(np.stack([10000 + np.arange(16) * 2.0**-6] * 3)),
    )


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


CASES = [
    dict(
        id="num-logsumexp-minus-inf",
        source="jax-ml/jax#1624, ekzhang/jax-js#223, pytorch/pytorch#49724",
        says="Subtracting an infinite maximum gave NaN where the answer is an infinity.",
        args=lambda: (
            F([[-INF, -INF, -INF], [-INF, 0, math.log(3)]]),
            F([1, INF, INF, -INF]),
            F([INF, INF, 1, -INF]),
        ),
        fn=lambda vj, x, a, b: (
            vj.nn.logsumexp(x, axis=1),
            vj.numpy.logaddexp(a, b),
            vj.grad(lambda v: vj.nn.logsumexp(v))(x[1]),
        ),
        want=[F([-INF, math.log(4)]), F([INF, INF, INF, -INF]), F([0, 0.25, 0.75])],
    ),
    dict(
        id="num-variance-large-mean",
        source="tracel-ai/burn#5607, pytorch/pytorch#51102, microsoft/onnxruntime#21935, tenstorrent/tt-metal#45968",
        says="E[x^2] - E[x]^2 cancels: wrong, zero or negative variance, and NaN after the square root.",
        args=near_constant,
        fn=lambda vj, x, c, y: (x.var(), c.var(), vj.numpy.std(y, axis=1)),
        want=[F(2.0**-18 * 255 / 12), F(0), np.full(3, math.sqrt(2.0**-12 * 255 / 12))],
        rtol=2e-2,
        atol=0,
    ),
    dict(
        id="num-rms-norm-extremes",
        source="skyzh/tiny-llm#18, nntrainer/nntrainer#3935, tenstorrent/tt-metal#55159",
        hooks=("rms_norm",),
        says="Squares overflow in f16 (output 0 or NaN); near zero a clamp or an identity fallback gives another function than the model was trained with.",
        args=lambda: (
            np.full((2, 512), 1000, H),
            np.full((1, 8), 1e-4, F),
            np.zeros((1, 8), F),
            np.ones(512, H),
            np.ones(8, F),
        ),
        fn=lambda vj, big, small, zero, w, v: (
            vj.hooks.rms_norm(vj, big, w, 1e-6),
            vj.hooks.rms_norm(vj, small, v, 1e-6),
            vj.hooks.rms_norm(vj, zero, v, 1e-6),
            vj.grad(lambda t: vj.hooks.rms_norm(vj, t, v, 1e-6).sum())(zero),
        ),
        want=[
            np.ones((2, 512)),
            np.full((1, 8), 1e-4 / math.sqrt(1e-8 + 1e-6)),
            np.zeros((1, 8)),
            np.full((1, 8), 1e3),
        ],
        rtol=1e-3,
    ),
    dict(
        id="num-saturating-activations",
        source="pytorch/executorch#22323, ggml-org/llama.cpp#5243, intel/llm-scaler#574",
        says="tanh as a quotient of exponentials overflows to inf/inf, so gelu and tanh gave NaN from about |x| = 13 and 88 on.",
        args=lambda: (
            F([-1e4, -100, -13.24, -3, 0, 13.24, 20.625, 1e4]),
            F([-1e4, -200, -90, 0, 90, 200, 1e4]),
        ),
        fn=lambda vj, g, x: (
            vj.nn.gelu(g, approximate=True),
            vj.numpy.tanh(x),
            vj.nn.sigmoid(x),
            vj.nn.silu(x),
            vj.nn.softplus(x),
            vj.vmap(vj.grad(vj.nn.sigmoid))(x),
            vj.vmap(vj.grad(vj.nn.softplus))(x),
            vj.vmap(vj.grad(lambda t: vj.nn.gelu(t, approximate=True)))(g)[::7],
        ),
        want=lambda: [
            gelu_tanh(np.array([-1e4, -100, -13.24, -3, 0, 13.24, 20.625, 1e4])),
            *(
                np.array(t)
                for t in (
                    [-1, -1, -1, 0, 1, 1, 1],
                    [0, 0, 0, 0.5, 1, 1, 1],
                    [0, 0, 0, 0, 90, 200, 1e4],
                    [0, 0, 0, math.log(2), 90, 200, 1e4],
                    [0, 0, 0, 0.25, 0, 0, 0],
                    [0, 0, 0, 0.5, 1, 1, 1],
                    [0, 1.0],
                )
            ),
        ],
        atol=1e-6,
    ),
    dict(
        id="num-expm1-log1p",
        source="ml-explore/mlx#1277, ml-explore/mlx#574, tenstorrent/tt-metal#28187",
        says="exp(x)-1 and log(1+x) lose small arguments; an overflow branch gave 0 and NaN, and log1p(inf) was not inf.",
        args=lambda: (
            F([1e-7, -1e-7, 1e-3, -88, -86, 87, 89, 90, -INF]),
            F([1e-8, -1e-8, 1e-3, INF, -1]),
        ),
        fn=lambda vj, a, b: (vj.numpy.expm1(a), vj.numpy.log1p(b)),
        want=lambda: [
            np.r_[np.expm1(F([1e-7, -1e-7, 1e-3, -88, -86, 87]).astype(float)), INF, INF, -1],
            np.r_[np.log1p(F([1e-8, -1e-8, 1e-3]).astype(float)), INF, -INF],
        ],
        rtol=2e-6,
        atol=0,
    ),
    dict(
        id="num-sin-cos-large-arguments",
        source="ml-explore/mlx#4157, tinygrad/tinygrad#5383, intel/intel-xpu-backend-for-triton#7118",
        says="Range reduction in 32 bits fails from 1e5 on (values outside [-1, 1], even inf); a fast sine flushed small arguments to zero.",
        args=lambda: (F([1e-10, 1e-7, 3.1415927, 1e5, 39800, 1e9, 1e10, 1e30]),),
        fn=lambda vj, x: (vj.numpy.sin(x), vj.numpy.cos(x)),
        want=lambda: [
            f(F([1e-10, 1e-7, 3.1415927, 1e5, 39800, 1e9, 1e10, 1e30]).astype(np.float64))
            for f in (np.sin, np.cos)
        ],
        rtol=1e-5,
        atol=1e-12,
    ),
    dict(
        id="num-f16-subnormals-survive",
        source="tsotchke/eshkol#36, jax-ml/jax#19689",
        says="Half-precision subnormals (block scales of quantized weights among them) must not be flushed when widened.",
        args=lambda: (np.array([1, 2, 3, 0x3FF, 0x400, 0x8001], np.uint16).view(H),),
        fn=lambda vj, x: (x.astype("float32"), x.astype("float32") * 2.0**24),
        want=lambda: [
            np.array([1, 2, 3, 1023, 1024, -1]) * 2.0**-24,
            np.array([1.0, 2, 3, 1023, 1024, -1]),
        ],
        rtol=0,
        atol=0,
    ),
    dict(
        id="num-nan-in-min-max",
        source="llvm/llvm-project#225665, google/clspv#506, openxla/xla#41242, iree-org/iree#15069",
        says="FMin/FMax leave NaN undefined and NMin/NMax drop it, so NaN vanished or depended on the operand order.",
        args=lambda: (
            F([NAN, 1, NAN, -INF]),
            F([1, NAN, NAN, INF]),
            F(np.r_[np.zeros(300), NAN, np.ones(50)]),
        ),
        fn=lambda vj, a, b, c: (
            vj.numpy.maximum(a, b),
            vj.numpy.minimum(a, b),
            c.max(),
            c.min(),
            vj.numpy.clip(a, 0, 1),
            vj.nn.relu(a),
            vj.numpy.isnan(a).sum(),
        ),
        want=[
            F([NAN, NAN, NAN, INF]),
            F([NAN, NAN, NAN, -INF]),
            F(NAN),
            F(NAN),
            F([NAN, 1, NAN, 0]),
            F([NAN, 1, NAN, 0]),
            np.int32(2),
        ],
        note="jax and numpy: NaN spreads.",
    ),
    dict(
        id="num-no-fold-of-zero-times-x",
        source="tile-ai/tilelang#2638, jax-ml/jax#4780, rigetti/quil-rs#457",
        says="x*0, x-x and x/x were folded to constants although x may be NaN or infinite.",
        args=lambda: (F([INF, NAN, 2, 0]),),
        fn=lambda vj, x: (x * 0.0, x - x, x / x, 0.0 / x, x != x),
        want=[
            F([NAN, NAN, 0, 0]),
            F([NAN, NAN, 0, 0]),
            F([NAN, NAN, 1, NAN]),
            F([0, NAN, 0, NAN]),
            np.array([False, True, False, False]),
        ],
    ),
    dict(
        id="num-atan2-zeros-constant-folded",
        source="openxla/xla#46594",
        says="A comparison folded to zero and then atan2(0, 0) folded to NaN; IEEE gives signed zeros and pi.",
        args=lambda: (F([0, -0.0, 0, -0.0]), F([0, 0, -0.0, -0.0]), F(1), F(2)),
        fn=lambda vj, y, x, a, b: (
            vj.numpy.arctan2(y, x),
            vj.numpy.arctan2(vj.numpy.logical_xor(a > b, a > b).astype("float32"), 0.0),
        ),
        want=[F([0, -0.0, math.pi, -math.pi]), F(0)],
        signed_zero=True,
        jax_ok=False,
        note="jax 0.10.2 gives NaN for the second under jit.",
    ),
    dict(
        id="num-f16-product-accumulates-wide",
        source="ggml-org/llama.cpp#18969",
        says="A 16-bit accumulator stalls when the sum is large against a term, and overflows on the way to a small result.",
        args=lambda: (
            np.full((1, 4096), 0.1, H),
            np.ones((4096, 1), H),
            H([[300, 300, 300, 300]]),
            H([[300], [300], [-300], [-300]]),
        ),
        fn=lambda vj, a, b, c, d: (a @ b, c @ d),
        want=[F([[4096 * float(H(0.1))]]), F([[0]])],
        dtype="float16",
        rtol=1e-3,
        atol=0,
    ),
    dict(
        id="num-log-softmax-extremes",
        source="jax-ml/jax#777, pytorch/pytorch#31829",
        says="log of a softmax that underflowed gives -inf, and NaN gradients.",
        args=lambda: (F([1000, 0, -1000]), F([1e4, 1e4, -1e30])),
        fn=lambda vj, x, y: (
            vj.nn.log_softmax(x),
            vj.nn.softmax(y),
            vj.grad(lambda v: -vj.nn.log_softmax(v)[2])(x),
            vj.grad(lambda v: vj.nn.log_softmax(v)[0])(y),
        ),
        want=[F([0, -1000, -2000]), F([0.5, 0.5, 0]), F([1, 0, -1]), F([0.5, -0.5, 0])],
    ),
]
