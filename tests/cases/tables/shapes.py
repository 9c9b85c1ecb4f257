# type: ignore  # data: NumPy scalar types called on lists, which its stubs refuse
"""Shapes: empty, odd, huge, strided and broadcast arrays."""

# ruff: noqa: E501, E741  one line of data each, in the words of the tables

from __future__ import annotations

import numpy as np

F, I = np.float32, np.int32


def gemm_args():
    rng = np.random.default_rng(3)
    sizes = [
        (17, 31, 33),
        (1, 1, 1),
        (129, 65, 127),
        (16, 16, 16),
        (15, 48, 1),
        (1, 257, 96),
        (64, 1, 63),
        (2, 1030, 5),
    ]
    return tuple(
        rng.integers(-4, 5, size=s).astype(F) for m, k, n in sizes for s in ((m, k), (k, n))
    )


def long_row():
    n = 65535 * 256 + 77
    return (np.arange(n, dtype=I) % 1000,)


CASES = [
    dict(
        id="shape-empty-contraction-is-zero",
        source="apache/tvm#19578, numba/numba#5779, cupy/cupy#1231",
        says="A product over an empty axis returned whatever was in the output buffer.",
        args=lambda: (
            np.zeros((4, 0), F),
            np.zeros((0, 3), F),
            np.zeros((2, 5, 0), F),
            np.zeros((2, 0, 3), F),
        ),
        fn=lambda vj, a, b, c, d: (
            a @ b,
            vj.numpy.matmul(c, d),
            a.sum(axis=1),
            vj.numpy.prod(a, axis=1),
            vj.grad(lambda v: (v @ b).sum())(a),
        ),
        want=[np.zeros((4, 3)), np.zeros((2, 5, 3)), np.zeros(4), np.ones(4), np.zeros((4, 0))],
    ),
    dict(
        id="shape-no-identity-over-empty-raises",
        source="jax-ml/jax#2899",
        says="argmax of an empty array returned the largest integer.",
        args=lambda: (np.zeros(0, F),),
        fn=lambda vj, x: vj.numpy.argmax(x),
        raises=(ValueError,),
    ),
    dict(
        id="shape-gemm-odd-edges",
        source="ml-explore/mlx#4250, modular/modular#5700, ml-explore/mlx#1084",
        says="Tiled products were wrong in the last rows or columns; a grid rounded down left whole columns unwritten. Small integers: exact.",
        args=gemm_args,
        fn=lambda vj, *t: [t[i] @ t[i + 1] for i in range(0, len(t), 2)],
        want=lambda: [
            gemm_args()[i].astype(np.float64) @ gemm_args()[i + 1]
            for i in range(0, len(gemm_args()), 2)
        ],
        rtol=0,
        atol=0,
    ),
    dict(
        id="shape-gemm-of-slices-and-transposes",
        source="ml-explore/mlx#1163",
        says="A product of slices of a larger array read with the strides of a dense one.",
        args=lambda: (F(np.arange(16).reshape(4, 4)),),
        fn=lambda vj, m: (m[0:3, 0:3] @ m[0:3, 3:4], m[1:, ::2].T @ m[1:, 1:], m[::-1].T @ m),
        want=lambda: (
            [m[0:3, 0:3] @ m[0:3, 3:4] for m in [np.arange(16.0).reshape(4, 4)]]
            + [m[1:, ::2].T @ m[1:, 1:] for m in [np.arange(16.0).reshape(4, 4)]]
            + [m[::-1].T @ m for m in [np.arange(16.0).reshape(4, 4)]]
        ),
        rtol=0,
        atol=0,
    ),
    dict(
        id="shape-more-than-65535-workgroups",
        source="ggml-org/llama.cpp#28592, 0xShug0/audio.cpp#542, gfx-rs/naga#1205",
        says="A one-dimensional launch over the limit of 65535 workgroups failed, or left the tail unwritten.",
        args=long_row,
        fn=lambda vj, x: (
            (x * 2 + 1)[-100:],
            (x * 2 + 1).sum() - x.shape[0],
            (x * 2 + 1)[65535 * 64 - 3 : 65535 * 64 + 3],
        ),
        want=lambda: [
            (long_row()[0] * 2 + 1)[-100:],
            I(
                (2 * long_row()[0].astype(np.int64)).sum() % 2**32
                - (2**32 if (2 * long_row()[0].astype(np.int64)).sum() % 2**32 >= 2**31 else 0)
            ),
            (long_row()[0] * 2 + 1)[65535 * 64 - 3 : 65535 * 64 + 3],
        ],
        note="the sum wraps modulo 2**32.",
    ),
    dict(
        id="shape-more-than-65535-rows",
        source="leejet/stable-diffusion.cpp#1991, ggml-org/llama.cpp#28247",
        says="One workgroup a row: the grid passed the limit when there were more rows than that.",
        args=lambda: (np.arange(70000 * 3, dtype=I).reshape(70000, 3),),
        fn=lambda vj, x: (
            x.sum(axis=1)[-3:],
            x.max(axis=0),
            x.T.sum(axis=1),
            vj.numpy.argmax(x.T, axis=1),
        ),
        want=lambda: [
            np.arange(210000).reshape(-1, 3).sum(1)[-3:].astype(I),
            I([209997, 209998, 209999]),
            (lambda s: ((s + 2**31) % 2**32 - 2**31).astype(I))(
                np.arange(210000, dtype=np.int64).reshape(-1, 3).sum(0)
            ),
            I([69999] * 3),
        ],
    ),
    dict(
        id="shape-negative-strides-fused",
        source="ml-explore/mlx#3720, ml-explore/mlx#3716",
        says="A fused kernel took a reversed view for a dense one.",
        args=lambda: (F(np.arange(6)), F(np.arange(24).reshape(4, 6))),
        fn=lambda vj, x, y: (
            x[::-1] * 2 + x,
            y[::-1, ::-2] + y[:, 3:] * 100,
            (y.T[::-1] + 1).reshape(4, 6),
            vj.numpy.flip(y, 1)[1] + x,
        ),
        want=lambda: [
            np.arange(6.0)[::-1] * 2 + np.arange(6.0),
            np.arange(24.0).reshape(4, 6)[::-1, ::-2] + np.arange(24.0).reshape(4, 6)[:, 3:] * 100,
            (np.arange(24.0).reshape(4, 6).T[::-1] + 1).reshape(4, 6),
            np.arange(24.0).reshape(4, 6)[1][::-1] + np.arange(6.0),
        ],
        rtol=0,
        atol=0,
    ),
    dict(
        id="shape-batched-dot-broadcast",
        source="jax-ml/jax#2189, HIPS/autograd#376",
        says="Batch axes of size one did not broadcast in products, or their gradient had the wrong shape.",
        args=lambda: (
            F(np.arange(24).reshape(2, 1, 3, 4)),
            F(np.arange(40).reshape(5, 4, 2)),
            F(np.arange(4)),
        ),
        fn=lambda vj, a, b, c: (
            vj.numpy.matmul(a, b),
            c @ b,
            a @ c,
            vj.grad(lambda v: (v @ b).sum())(a),
        ),
        want=lambda: [
            np.arange(24.0).reshape(2, 1, 3, 4) @ np.arange(40.0).reshape(5, 4, 2),
            np.arange(4.0) @ np.arange(40.0).reshape(5, 4, 2),
            np.arange(24.0).reshape(2, 1, 3, 4) @ np.arange(4.0),
            np.broadcast_to(np.arange(40.0).reshape(5, 4, 2).sum((0, 2)), (2, 1, 3, 4)),
        ],
    ),
    dict(
        id="shape-argmax-ties-and-nan",
        source="jax-ml/jax#4640, jax-ml/jax#3193, pytorch/pytorch#41998",
        says="With NaN present argmax gave the largest integer; with ties it gave a later index, depending on how the reduction was split.",
        args=lambda: (
            F([0, 1, np.nan, 2]),
            F([np.nan] * 3),
            F([1, 3, 3]),
            F([-0.0, 0.0]),
            F(np.r_[np.zeros(3), 9, np.zeros(70000), 9]),
        ),
        fn=lambda vj, a, b, c, d, e: (
            [vj.numpy.argmax(t) for t in (a, b, c, d, e)]
            + [vj.numpy.argmin(t) for t in (a, b, c, e)]
        ),
        want=[I(v) for v in (2, 0, 1, 0, 3, 2, 0, 0, 0)],
        note="numpy: the first NaN wins, else the first of the ties.",
    ),
    dict(
        id="shape-zero-size-through-transforms",
        source="apache/tvm#19578, jax-ml/jax#2899",
        says="Empty arrays must go through grad, vmap, scan and reshape.",
        args=lambda: (np.zeros((0, 3), F), np.zeros((0,), F)),
        fn=lambda vj, x, y: (
            x.sum(),
            x.reshape(3, 0),
            vj.grad(lambda v: (v**2).sum())(x),
            vj.vmap(lambda r: r * 2)(x),
            vj.lax.scan(lambda c, t: (c + t, c), vj.numpy.float32(5), y),
            vj.numpy.concatenate([x, vj.numpy.ones((2, 3)), x]),
            vj.numpy.mean(y),
        ),
        want=[
            F(0),
            np.zeros((3, 0)),
            np.zeros((0, 3)),
            np.zeros((0, 3)),
            [F(5), np.zeros(0)],
            np.ones((2, 3)),
            F(np.nan),
        ],
    ),
]
