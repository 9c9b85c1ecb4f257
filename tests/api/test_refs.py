"""Refs: traced indices, rows, and writes from bodies of control flow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from vkjit import lax
from vkjit.errors import ArgumentError, DTypeError, IndexingError, ShapeError, TracerError
from vkjit.lowering.artifact import Copy, Loop

INT = np.int32


def zeros(*shape: int) -> vj.Ref:
    return vj.Ref(jnp.zeros(shape))


def rows(*shape: int) -> Any:
    return np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)


INDICES = {
    "row": (INT(2),),
    "negative": (INT(-1),),
    "column": (slice(None), INT(1)),
    "element": (INT(1), INT(2), INT(0)),
    "points": (1, INT(2)),
    "strided": (slice(0, 4, 2), INT(1)),
    "inner": (INT(0), slice(None), INT(1)),
    "array": (np.array([3, 0]),),
    "array of columns": (slice(None), np.array([2, 0])),
    "pairs": (np.array([3, 0]), np.array([1, 2])),
    "grid": (np.array([[3], [0]]), np.array([1, 2])),
    "array behind a slice": (slice(1, 3), np.array([2, 0]), 1),
    "repeated": (np.array([1, 1, 2, 1]),),
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_traced_indices_write_as_numpy_does(index: Any):
    want = rows(4, 3, 2)
    plain = tuple(int(i) if isinstance(i, np.integer) else i for i in index)
    value = 100 + rows(*want[plain].shape)
    traced = [i for i in index if isinstance(i, (np.integer, np.ndarray))]

    @vj.jit
    def write(ref: Any, value: Any, *given: Any) -> Any:
        rest = iter(given)
        dynamic = (np.integer, np.ndarray)
        ref[tuple(next(rest) if isinstance(i, dynamic) else i for i in index)] = value

    ref = vj.Ref(want)
    write(ref, value, *traced)
    want = want.copy()
    want[plain] = value
    np.testing.assert_array_equal(ref[...], want)


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_add_adds_every_value(index: Any):
    start = rows(4, 3, 2)
    plain = tuple(int(i) if isinstance(i, np.integer) else i for i in index)
    ref = vj.Ref(start)
    ref.add(tuple(jnp.asarray(i) if isinstance(i, np.ndarray) else i for i in index), 10.0)
    want = start.copy()
    np.add.at(want, plain, np.float32(10))
    np.testing.assert_array_equal(ref[...], want)


def test_add_at_static_regions_and_by_operator():
    ref = vj.Ref(rows(4, 3))
    ref.add((slice(1, 3), 0), 5.0)
    ref[3] += 1.0
    ref.add(..., 1.0)
    want = rows(4, 3) + 1
    want[1:3, 0] += 5
    want[3] += 1
    np.testing.assert_array_equal(ref[...], want)


def test_set_rows_drops_counts_from_the_end_and_keeps_the_last(device: str):
    with vj.default_device(device):
        ref = zeros(5, 4, 3)
        given = rows(4, 4, 3)

        @vj.jit
        def write(ref: Any, at: Any, given: Any, columns: Any) -> Any:
            ref.set_rows(at, given)
            ref.set_rows(jnp.asarray([3, 0]), columns, axis=1, unique=True)
            return ref[jnp.asarray([1, -1])]

        columns = -rows(5, 2, 3)
        read = write(ref, np.array([-2, 3, 9, 0]), given, columns)
        want = np.zeros((5, 4, 3), np.float32)
        want[3], want[0] = given[1], given[3]
        want[:, [3, 0]] = columns
        np.testing.assert_array_equal(ref[...], want)
        np.testing.assert_array_equal(read, want[[1, -1]])


def test_set_rows_in_every_kind_of_dtype(device: str):
    with vj.default_device(device):
        for dtype in ("float16", "bfloat16", "int8", "bool", "int32"):
            ref = vj.Ref(jnp.zeros((6, 5), dtype))
            given = (rows(2, 5) % 3).astype(np.int32)

            @vj.jit
            def write(ref: Any, at: Any, given: Any, dtype: Any = dtype) -> None:
                ref.set_rows(at, given.astype(dtype), unique=True)

            write(ref, np.array([4, 1]), given)
            want = np.zeros((6, 5), np.float32)
            want[[4, 1]] = given.astype(bool) if dtype == "bool" else given
            np.testing.assert_array_equal(np.asarray(ref[...]).astype(np.float32), want)


def test_a_scan_writes_a_ref_of_outside(device: str):
    def run(ref: Any, xs: Any) -> Any:
        def body(i: Any, x: Any) -> Any:
            ref[i] = x + ref[i - 1]
            return i + 1, ref[0].sum()

        return lax.scan(body, 1, xs)

    xs = rows(3, 2)
    want = np.zeros((4, 2), np.float32)
    want[0] = 1
    for i in range(3):
        want[i + 1] = xs[i] + want[i]
    with vj.default_device(device):
        for call in (run, vj.jit(run)):
            ref = vj.Ref(jnp.zeros((4, 2)).at[0].set(1))
            last, seen = call(ref, xs)
            assert int(last) == 4
            np.testing.assert_array_equal(ref[...], want)
            np.testing.assert_array_equal(seen, [2, 2, 2])


def test_branches_and_loops_write_refs_of_outside(device: str):
    @vj.jit
    def run(ref: Any, other: Any, flag: Any, n: Any) -> Any:
        def yes(v: Any) -> Any:
            ref[0] = v
            return v * 2

        def no(v: Any) -> Any:
            other[1] = v
            return ref[0].sum() + v

        picked = lax.cond(flag, yes, no, jnp.float32(7))
        lax.switch(n, [lambda: None, lambda: ref.add(1, 5.0)])
        lax.fori_loop(0, 3, lambda i, c: (other.add(i, 1.0), c)[1], 0)

        def turn(i: Any) -> Any:
            ref[2] = ref[2] + i
            return i + 1

        return picked, lax.while_loop(lambda i: (i < n + 3) & (ref[2, 0] < 3), turn, 0)

    with vj.default_device(device):
        for flag, n in ((True, 0), (False, 1)):
            ref, other = vj.Ref(rows(3, 2)), vj.Ref(rows(3, 2))
            picked, turns = run(ref, other, flag, n)
            a, b = rows(3, 2), rows(3, 2)
            a[0], b[1] = (7, b[1]) if flag else (a[0], 7)
            assert float(picked) == (14 if flag else 10)
            a[1] += 5 * n
            b += 1
            np.testing.assert_array_equal(other[...], b)
            np.testing.assert_array_equal(ref[:2], a[:2])
            assert int(turns) == 0  # row 2 starts above the limit
            np.testing.assert_array_equal(ref[2], a[2])


@pytest.mark.parametrize("donated", [(), (1,)])
def test_linearizing_a_loop_computes_its_writes_again_in_memory_of_its_own(
    donated: Any, device: str
):
    """What is written does not move: the loop of results and that of tangents both need it."""

    def fn(x: Any, start: Any) -> Any:
        ref = vj.Ref(start)

        def turn(c: Any) -> Any:
            i, y = c
            ref[i] = ref[i] + 1
            return i + 1, y * ref[i]

        y = lax.while_loop(lambda c: c[0] < 3, turn, (0, x))[1]
        return y, ref[...]

    def run(x: Any, start: Any) -> Any:
        outs, pushed = vj.linearize(lambda x: fn(x, start), x)
        return outs, pushed(1.0)[0], pushed(2.0)[0]

    with vj.default_device(device):
        start = jnp.arange(4, dtype=jnp.float32)
        (y, written), once, twice = vj.jit(run, donate_argnums=donated)(5.0, start)
    np.testing.assert_array_equal(written, [1, 2, 3, 3])
    assert (float(y), float(once), float(twice)) == (30, 6, 12)


def test_bodies_nest():
    ref = zeros(3, 4)

    def outer(i: Any, _: Any) -> Any:
        def inner(j: Any, _: Any) -> Any:
            lax.cond(j % 2 == 0, lambda: ref.add((i, j), 10.0 * i + j), lambda: None)
            return j + 1, None

        lax.scan(inner, 0, None, length=4)
        vj.checkpoint(lambda v: ref.add((i, 3), v))(jnp.float32(1))
        return i + 1, None

    lax.scan(outer, 0, None, length=3)
    want = np.zeros((3, 4), np.float32)
    for i in range(3):
        want[i, 0], want[i, 2], want[i, 3] = 10 * i, 10 * i + 2, 1
    np.testing.assert_array_equal(ref[...], want)


def test_a_cache_written_row_by_row_in_a_scan_is_not_copied():
    def decode(cache: Any, rows: Any, start: Any) -> Any:
        def body(at: Any, row: Any) -> Any:
            cache[at] = row
            return at + 1, cache[at].sum()

        return lax.scan(body, start, rows)[1]

    cache = zeros(512, 64)
    given = rows(16, 64)
    lowered = vj.jit(decode).lower(cache, given, INT(5))
    memory = lowered.memory()
    assert memory.donated == cache.nbytes
    assert memory.temporaries < 4096
    assert memory.peak < cache.nbytes + given.nbytes + 8192
    (loop,) = [step for step in lowered.plan.steps if isinstance(step, Loop)]
    assert not any(isinstance(step, Copy) for step in loop.body.steps)
    vj.jit(decode)(cache, given, INT(5))
    np.testing.assert_array_equal(cache[5:21], given)
    np.testing.assert_array_equal(cache[:5], 0)


def test_writes_one_after_another_copy_nothing():
    def decode(cache: Any, x: Any, at: Any) -> Any:
        for layer in range(3):
            cache[layer, at] = x * layer
            x = x + cache[layer, at - 1] + cache[layer].sum(0)
        cache.add((0, at), 1.0)
        return x

    cache = zeros(3, 256, 32)
    memory = vj.jit(decode).lower(cache, rows(32), INT(4)).memory()
    assert memory.donated == cache.nbytes
    assert memory.temporaries < 8192
    got, want = zeros(3, 256, 32), zeros(3, 256, 32)
    np.testing.assert_allclose(
        vj.jit(decode)(got, rows(32), INT(4)), decode(want, rows(32), INT(4)), rtol=1e-6
    )
    np.testing.assert_array_equal(got[...], want[...])


def test_gradients_flow_through_writes_of_rows():
    def loss(x: Any, v: Any, i: Any) -> Any:
        ref = vj.Ref(x * 2)
        ref[i] = v
        ref.set_rows(jnp.asarray([0]), v[None] * 3)

        def body(c: Any, _: Any) -> Any:
            ref.add(i, 1.0)
            return c, None

        lax.scan(body, 0, None, length=2)
        return (ref[...] ** 2).sum()

    x, v = rows(3, 2), rows(2)
    gx, gv = vj.grad(loss, (0, 1))(x, v, INT(1))
    want = np.zeros((3, 2), np.float32)
    want[2] = 8 * x[2]
    np.testing.assert_allclose(gx, want)
    np.testing.assert_allclose(gv, 2 * (v + 2) + 18 * v)


def test_refs_under_vmap_are_one_for_each_example():
    def write(ref: Any, i: Any, x: Any) -> Any:
        ref[i] = x
        local = zeros(3)
        local[i] = x
        return ref[...].sum() + local[...]

    ref = vj.Ref(rows(2, 3))
    out = vj.vmap(write)(ref, np.array([0, 2]), np.array([10.0, 20.0], np.float32))
    np.testing.assert_array_equal(ref[...], [[10, 2, 3], [4, 5, 20]])
    np.testing.assert_array_equal(out, [[25, 15, 15], [29, 29, 49]])

    ref = vj.Ref(rows(3, 2))  # the examples along another axis
    vj.jit(lambda r, x: vj.vmap(lambda q, v: q.add(0, v), in_axes=(1, 0))(r, x))(ref, rows(2))
    np.testing.assert_array_equal(ref[...], rows(3, 2) + np.array([[1, 2], [0, 0], [0, 0]]))


def test_an_unbatched_ref_takes_unbatched_values_only():
    ref = zeros(3)

    def write(x: Any, r: Any) -> Any:
        r[0] = 5.0
        return x + r[0]

    out = vj.vmap(write, in_axes=(0, None))(rows(2), ref)
    np.testing.assert_array_equal(out, [6, 7])
    np.testing.assert_array_equal(ref[...], [5, 0, 0])

    def spread(x: Any, r: Any) -> Any:
        r[0] = x
        return x

    with pytest.raises(ArgumentError, match=r"vmap of spread.*a Ref f32\[3\] that is not mapped"):
        vj.vmap(spread, in_axes=(0, None))(rows(2), ref)


@pytest.mark.parametrize("transform", [vj.grad, vj.vmap, vj.jit, vj.make_ir])
def test_writes_that_would_be_lost_are_refused_with_their_line(transform: Any):
    ref = zeros(3)

    def f(x: Any) -> Any:
        ref[0] = x
        return x * 2.0

    with pytest.raises(TracerError, match=r"made outside the traced function(.|\n)*test_refs.py"):
        transform(f)(rows(2) if transform is vj.vmap else 1.0)
    np.testing.assert_array_equal(ref[...], np.zeros(3))


def test_a_transformation_between_the_ref_and_a_loop_is_refused():
    ref = zeros(3)

    def loss(x: Any) -> Any:
        lax.scan(lambda c, _: (ref.add(0, 1.0), (c, None))[1], 0, None, length=2)
        return x

    with pytest.raises(TracerError, match="inside grad, vmap or a custom rule make the Ref inside"):
        vj.grad(loss)(1.0)
    with pytest.raises(TracerError, match=r"while_loop|cond_fun"):
        lax.while_loop(lambda i: (ref.add(0, 1.0), i < 3)[1], lambda i: i + 1, 0)
    with pytest.raises(TracerError, match="map: the function writes a Ref"):
        lax.map(lambda x: ref.add(0, x), rows(4), batch_size=2)
    np.testing.assert_array_equal(ref[...], np.zeros(3))


def test_refs_are_no_arrays_and_do_not_leave_their_function():
    ref = zeros(3)
    for use in (
        lambda: vj.jit(lambda x: vj.Ref(x))(1.0),
        lambda: lax.scan(lambda c, _: (c, ref), 0, None, length=2),
        lambda: lax.cond(True, lambda: ref, lambda: ref),
        lambda: jnp.sin(ref),
        lambda: vj.grad(lambda r: r[0])(ref),
    ):
        with pytest.raises(DTypeError, match=r"\bRef\b"):
            use()
    kept: list[Any] = []
    vj.jit(lambda x: kept.append(vj.Ref(x)) or x)(rows(3))
    with pytest.raises(TracerError, match="finished trace"):
        jnp.sin(kept[0][...])
    with pytest.raises(TracerError, match=r"finished trace|after it"):
        kept[0][...] = rows(3)


def test_a_failing_body_leaves_refs_as_they_were():
    ref = zeros(3)

    def body(c: Any, _: Any) -> Any:
        ref[0] = 1.0
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        lax.scan(body, 0, None, length=2)
    np.testing.assert_array_equal(ref[...], np.zeros(3))
    ref[0] = 2.0
    assert float(ref[0]) == 2


def test_values_and_indices_that_do_not_fit_are_refused():
    ref = zeros(4, 3)
    with pytest.raises(ShapeError, match=r"value f32\[2\] does not fit the region \(3,\)"):
        ref[jnp.asarray(1)] = rows(2)
    with pytest.raises(ShapeError, match=r"does not fit the region \(2, 3\)"):
        ref.set_rows(np.array([0, 1]), rows(3, 3))
    with pytest.raises(IndexingError, match="expected integers"):
        ref.set_rows(rows(2), rows(2, 3))
    with pytest.raises(IndexingError, match="both sides of a slice"):
        zeros(4, 3, 2)[np.array([0, 1]), :, np.array([0, 1])] = 1.0
    with pytest.raises(DTypeError, match="was written to a Ref"):
        vj.Ref(jnp.zeros(3, jnp.int32)).add(0, 1.5)


def test_empty_writes():
    ref = zeros(4, 3)
    ref.set_rows(np.zeros(0, np.int32), np.zeros((0, 3), np.float32))
    ref[np.zeros(0, np.int32)] = 1.0
    ref[2:2] = 1.0
    np.testing.assert_array_equal(ref[...], np.zeros((4, 3)))
