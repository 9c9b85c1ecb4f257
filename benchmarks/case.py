"""What a benchmark is made of: a case, a program in an array namespace, a step of training.

A benchmark module defines

- ``CASES``, a tuple of `Case`;
- ``inputs(case)``, a tuple of pytrees of NumPy arrays and `Packed` matrices, the same in every
  process;
- ``program(ns, case)``, a function of those inputs written against `Namespace`, hence run by
  vkjit, by JAX and, in float64, by NumPy;
- ``torch_program(torch, case, inputs, wrap)``, the same as an idiomatic PyTorch program: a function
  without arguments returning tensors in the order of vkjit's flattened results. ``wrap`` is
  ``torch.compile`` or does nothing; the program applies it to what PyTorch users would compile.

This module and the benchmarks import NumPy alone: they are loaded in the peers' processes too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal, final

import numpy as np

from benchmarks.packed import Packed

Tree = Any
Array = Any

# Of the central differences: small, because the kinks of relu cost an error proportional to it.
STEP = 1e-8


@final
@dataclass(frozen=True)
class Case:
    """One row of a table.

    `kind` says what is timed of the program: its value (``forward``), its gradient with respect
    to the arguments `argnums` (``gradient``), both (``value_and_gradient``), or an AdamW step on
    argument 0 (``step``). `tolerance` bounds the relative error against float64. `flop` and
    `byte` are the least that any implementation must do; the floor is made from them. `first`
    cases measure the first call in a fresh process. Floating leaves of the arguments `low` are put
    on the device as `dtype`, the type that products are computed in. `blocks` are the block types
    of the frozen matrices and of the embedding: vkjit reads the blocks and, so that what this gains
    shows, runs once more as ``vkjit-numbers`` with the numbers, which the peers get. `on` says
    which kind of device the case is meant for; naming a case runs it anywhere.
    """

    name: str
    kind: Literal["forward", "gradient", "value_and_gradient", "step"]
    params: Mapping[str, Any]
    tolerance: float = 1e-5
    flop: float = 0.0
    byte: float = 0.0
    tokens: int = 0
    argnums: int | tuple[int, ...] = 0
    check: bool = True
    first: bool = False
    memory: bool = False
    quick: bool = True
    dtype: str = "float32"
    low: tuple[int, ...] = ()
    blocks: tuple[str, str] | None = None
    on: Literal["cpu", "gpu", "both"] = "cpu"


@final
@dataclass(frozen=True)
class Namespace:
    """The names a program may use: those that vkjit and JAX share."""

    name: str
    np: Any
    lax: Any
    nn: Any
    value_and_grad: Callable[..., Callable[..., Any]]
    jit: Callable[..., Any]
    checkpoint: Callable[..., Any]


def numpy_namespace() -> Namespace:
    """The same names over NumPy, to compute references in float64. No gradients."""

    def softmax(x: Array, axis: int = -1) -> Array:
        shifted = np.exp(x - x.max(axis, keepdims=True))
        return shifted / shifted.sum(axis, keepdims=True)

    def attention(q: Array, k: Array, v: Array, *, is_causal: bool) -> Array:
        _, length, heads, size = q.shape  # [1, S, heads, size]; k and v have fewer heads
        group = heads // k.shape[2]
        k, v = (np.repeat(x, group, axis=2) for x in (k, v))
        scores = np.einsum("bqhd,bkhd->bhqk", q, k) / size**0.5
        if is_causal:
            scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        return np.einsum("bhqk,bkhd->bqhd", softmax(scores), v)

    lax = SimpleNamespace(
        rsqrt=lambda x: 1.0 / np.sqrt(x),
        stop_gradient=lambda x: x,
        scan=_scan,
        while_loop=_while_loop,
        fori_loop=_fori_loop,
        cond=lambda pred, yes, no, *operands: (yes if pred else no)(*operands),
    )
    nn = SimpleNamespace(
        softmax=softmax, silu=lambda x: x / (1.0 + np.exp(-x)), dot_product_attention=attention
    )

    def no_gradient(*_args: Any, **_options: Any) -> Callable[..., Any]:
        raise NotImplementedError("value_and_grad: NumPy is the reference of values only")

    def unchanged(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        return function

    return Namespace("numpy", np, lax, nn, no_gradient, unchanged, unchanged)


def _scan(body: Callable[..., Any], carry: Tree, xs: Tree) -> tuple[Tree, Tree]:
    ys: list[Tree] = []
    for n in range(len(tree_leaves(xs)[0])):
        carry, y = body(carry, tree_map(lambda x, turn=n: x[turn], xs))
        ys.append(y)
    return carry, None if ys[0] is None else tree_map(lambda *parts: np.stack(parts), *ys)


def _while_loop(going: Callable[..., Any], body: Callable[..., Any], carry: Tree) -> Tree:
    while going(carry):
        carry = body(carry)
    return carry


def _fori_loop(first: int, last: int, body: Callable[..., Any], carry: Tree) -> Tree:
    for n in range(first, last):
        carry = body(n, carry)
    return carry


# --------------------------------------------------------------------------- pytrees


def tree_map(function: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Applies `function` to the leaves of dicts (in key order), lists and tuples."""
    if isinstance(tree, dict):
        return {k: tree_map(function, tree[k], *[r[k] for r in rest]) for k in sorted(tree)}
    if isinstance(tree, list | tuple):
        parts = [tree_map(function, x, *[r[i] for r in rest]) for i, x in enumerate(tree)]
        return type(tree)(parts)
    return function(tree, *rest)


def tree_leaves(tree: Tree) -> list[Any]:
    """The leaves in the order in which vkjit and JAX flatten them."""
    found: list[Any] = []
    tree_map(found.append, tree)
    return found


def tree_like(tree: Tree, leaves: Iterator[Any]) -> Tree:
    """A tree of the same structure with other leaves."""
    return tree_map(lambda _: next(leaves), tree)


# ------------------------------------------------------------------------- training


@final
@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), bias-corrected."""

    rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    decay: float = 0.01

    def start(self, params: Tree) -> Tree:
        """State for `params`: first and second moments and the count of steps, all float32."""
        return {
            "params": params,
            "first": tree_map(np.zeros_like, params),
            "second": tree_map(np.zeros_like, params),
            "count": np.zeros((), np.float32),
        }

    def update(self, ns: Namespace, state: Tree, grads: Tree) -> Tree:
        """The state after one step."""
        count = state["count"] + 1.0
        scale1, scale2 = 1.0 - self.beta1**count, 1.0 - self.beta2**count
        rows: list[tuple[Array, Array, Array]] = []
        trees = (state["params"], grads, state["first"], state["second"])
        columns = (tree_leaves(tree) for tree in trees)
        for p, g, m, v in zip(*columns, strict=True):
            m = self.beta1 * m + (1.0 - self.beta1) * g
            v = self.beta2 * v + (1.0 - self.beta2) * g * g
            direction = (m / scale1) / (ns.np.sqrt(v / scale2) + self.epsilon)
            rows.append((p - self.rate * (direction + self.decay * p), m, v))
        new = [tree_like(state["params"], iter(column)) for column in zip(*rows, strict=True)]
        return {"params": new[0], "first": new[1], "second": new[2], "count": count}


ADAMW = AdamW()


def make_step(ns: Namespace, loss: Callable[..., Array]) -> Callable[..., tuple[Tree, Array]]:
    """``step(state, *batch) -> (state, loss)`` from ``loss(params, *batch)``."""

    def step(state: Tree, *batch: Tree) -> tuple[Tree, Array]:
        value, grads = ns.value_and_grad(loss)(state["params"], *batch)
        return ADAMW.update(ns, state, grads), value

    return step


# ----------------------------------------------------------------------- references


@final
@dataclass
class Check:
    """Compares results with float64 NumPy: values element by element, gradients by a direction.

    With `rows` = (axis, step), only every step-th row of the output is looked at; it must depend on
    the first argument at the same place of that axis alone.

    The derivative along a random direction d is taken by central differences in float64 and
    compared with <grad, d>, relative to the norm of the gradient; one wrong row of 4096 moves
    this by 1e-2.
    """

    case: Case
    program: Callable[..., Array]
    inputs: tuple[Tree, ...]
    rows: tuple[int, int] | None = None
    _double: tuple[Tree, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._double = tuple(tree_map(_to_double, tree) for tree in self.inputs)

    def error(self, outputs: list[np.ndarray]) -> float:
        """Largest relative error of the outputs; infinite where shape or finiteness is wrong."""
        if self.rows is not None:
            return self._sampled_error(outputs)
        wanted = [np.asarray(x) for x in tree_leaves(self.program(*self._double))]
        if self.case.kind == "forward":
            return max(relative(got, want) for got, want in zip(outputs, wanted, strict=True))
        if self.case.kind == "gradient":
            return self._gradient_error(outputs)
        value, *grads = outputs
        return max(relative(value, wanted[0]), self._gradient_error(grads))

    def _sampled_error(self, outputs: list[np.ndarray]) -> float:
        """The error of some rows of a single output, from the same rows of the first argument."""
        assert self.rows is not None
        axis, step = self.rows
        index = (slice(None),) * axis + (slice(None, None, step),)
        first, *rest = self._double
        wanted = self.program(first[index], *rest)
        return relative(outputs[0][::step], np.asarray(wanted))

    def _gradient_error(self, grads: list[np.ndarray]) -> float:
        argnums = self.case.argnums
        numbers = argnums if isinstance(argnums, tuple) else (argnums,)
        generator = np.random.default_rng(99)
        leaves = tree_leaves([self._double[n] for n in numbers])
        direction = [generator.standard_normal(leaf.shape) for leaf in leaves]
        if [g.shape for g in grads] != [d.shape for d in direction]:
            return float("inf")
        ahead, behind = (self._moved(numbers, direction, sign * STEP) for sign in (1, -1))
        slope = (ahead - behind) / (2 * STEP)
        doubles = [g.astype(np.float64) for g in grads]
        got = sum(float(np.sum(g * d)) for g, d in zip(doubles, direction, strict=True))
        norm = float(np.sqrt(sum(np.sum(g * g) for g in doubles)))
        return abs(got - slope) / norm if np.isfinite(norm) and norm > 0 else float("inf")

    def _moved(self, numbers: tuple[int, ...], direction: list[np.ndarray], step: float) -> float:
        moves = iter(direction)
        moved = {n: tree_map(lambda x: x + step * next(moves), self._double[n]) for n in numbers}
        return float(self.program(*[moved.get(n, tree) for n, tree in enumerate(self._double)]))


def relative(got: np.ndarray, wanted: np.ndarray) -> float:
    """Norm of the difference over the norm of what was wanted."""
    got = np.asarray(got, np.float64)
    if got.shape != wanted.shape or not np.all(np.isfinite(got)):
        return float("inf")
    return float(np.linalg.norm(got - wanted) / (np.linalg.norm(wanted) + 1e-300))


def _to_double(leaf: np.ndarray | Packed) -> np.ndarray:
    if isinstance(leaf, Packed):
        return leaf.numbers().astype(np.float64)
    return leaf.astype(np.float64) if np.issubdtype(leaf.dtype, np.floating) else leaf
