# type: ignore  # data: NumPy scalar types called on lists, which its stubs refuse
"""What drivers and SPIR-V leave open, seen from the values."""

# ruff: noqa: E501, E741  one line of data each, in the words of the tables

from __future__ import annotations

import numpy as np

F, H, I = np.float32, np.float16, np.int32


def multiples():
    b = np.arange(1, 2049)[:, None] * np.ones((1, 64))
    k = np.arange(1, 65)[None, :] * np.ones((2048, 1))
    return F(b * k), F(b), F(k)


SIZES = (1, 2, 5, 31, 32, 33, 63, 64, 65, 127, 255, 256, 257, 1023, 1025, 4097)


def rows(n, count):
    return ((np.arange(count * n, dtype=np.int64) * 7919) % 1009 - 500).reshape(count, n)


CASES = [
    dict(
        id="dev-division-exact-quotients",
        source="Genesis-Embodied-AI/quadrants#773, microsoft/onnxruntime#27662, tinygrad/tinygrad#10425",
        says="Vulkan allows 2.5 ulp for a division, so 180/180 may be 0.99999994 and floor(a/b) one too small.",
        args=multiples,
        fn=lambda vj, a, b, k: (vj.numpy.floor(a / b) != k).sum(),
        want=I(0),
    ),
    dict(
        id="dev-division-by-a-broadcast",
        source="Genesis-Embodied-AI/quadrants#773",
        jax_ok=False,
        says="The same with the divisor a column: rewriting it into a product with a reciprocal breaks exact quotients.",
        args=lambda: (multiples()[0], multiples()[1][:, :1], multiples()[2]),
        fn=lambda vj, a, b, k: (vj.numpy.floor(a / b) != k).sum(),
        want=I(0),
        note="jax 0.10.2 on CPU gets some of these wrong.",
    ),
    dict(
        id="dev-integer-division-beyond-24-bits",
        source="tinygrad/tinygrad#10425, llvm/llvm-project#210684, tenstorrent/tt-metal#48732",
        says="Integer division through a 32-bit float reciprocal is off by one for large or exact quotients.",
        args=lambda: (
            I([16777217, 2147483647, -2147483648, 2147483647, 110, 28, 2147483646, -2147483647]),
            I([1, 3, 7, 1000, 55, 14, 2147483647, 2]),
        ),
        fn=lambda vj, a, b: (a // b, a % b),
        want=lambda: [
            np.floor_divide(
                np.int64(
                    [
                        16777217,
                        2147483647,
                        -2147483648,
                        2147483647,
                        110,
                        28,
                        2147483646,
                        -2147483647,
                    ]
                ),
                [1, 3, 7, 1000, 55, 14, 2147483647, 2],
            ).astype(I),
            np.mod(
                np.int64(
                    [
                        16777217,
                        2147483647,
                        -2147483648,
                        2147483647,
                        110,
                        28,
                        2147483646,
                        -2147483647,
                    ]
                ),
                [1, 3, 7, 1000, 55, 14, 2147483647, 2],
            ).astype(I),
        ],
    ),
    dict(
        id="dev-reductions-at-group-edges",
        source="pytorch/executorch#22326, ggml-org/ggml#1619, uxlfoundation/oneDNN#3474",
        says="Reductions were wrong, or hung, when a row did not fill a subgroup or workgroup, or when some rows of a group were out of range before a barrier.",
        args=lambda: tuple(rows(n, c).astype(F) for n in SIZES for c in (1, 3, 5)),
        fn=lambda vj, *xs: [
            (x.sum(axis=1), x.max(axis=1), vj.numpy.argmin(x, axis=1), x.sum(axis=0)[-1])
            for x in xs
        ],
        want=lambda: [
            (
                x.sum(1).astype(float),
                x.max(1).astype(float),
                x.argmin(1).astype(I),
                float(x.sum(0)[-1]),
            )
            for x in (rows(n, c) for n in SIZES for c in (1, 3, 5))
        ],
        rtol=0,
        atol=0,
    ),
    dict(
        id="dev-softmax-at-group-edges",
        source="ggml-org/llama.cpp#5545, uxlfoundation/oneDNN#3474",
        says="Softmax rows did not sum to one, or a row took the maximum of another, for lengths that are no power of two.",
        args=lambda: tuple((rows(n, 3) / 8).astype(F) + F([[0], [300], [-300]]) for n in SIZES),
        fn=lambda vj, *xs: [vj.nn.softmax(x, axis=1) for x in xs],
        want=lambda: [
            np.exp(t - t.max(1, keepdims=True))
            / np.exp(t - t.max(1, keepdims=True)).sum(1, keepdims=True)
            for t in (
                (F(rows(n, 3) / 8) + F([[0], [300], [-300]])).astype(np.float64) for n in SIZES
            )
        ],
        rtol=1e-4,
        atol=1e-7,
    ),
    dict(
        id="dev-narrow-stores-spare-neighbours",
        source="microsoft/DirectXShaderCompiler#8646, tinygrad/tinygrad#7954, gpuweb/gpuweb#229",
        says="Without 8- and 16-bit storage a store became a read-modify-write of a word and lost its neighbours.",
        args=lambda: (
            np.arange(7, dtype=np.uint8),
            np.arange(5).astype(H),
            np.arange(1001) % 3 == 0,
            np.arange(9, dtype=np.int8),
        ),
        fn=lambda vj, a, h, t, b: (
            a.at[3].set(200),
            h.at[2].add(0.5),
            vj.numpy.logical_not(t).sum(),
            vj.numpy.concatenate([a, a])[::-1],
            (b * 3)[1:8],
            vj.numpy.concatenate([h, h + 1, h])[3:12],
            a[::2].at[1].set(9),
        ),
        want=[
            np.uint8([0, 1, 2, 200, 4, 5, 6]),
            H([0, 1, 2.5, 3, 4]),
            I(667),
            np.uint8([6, 5, 4, 3, 2, 1, 0] * 2),
            np.int8([3, 6, 9, 12, 15, 18, 21]),
            H([3, 4, 1, 2, 3, 4, 5, 0, 1]),
            np.uint8([0, 9, 4, 6]),
        ],
    ),
]
