"""Exported functions: the file holds data alone, and loading traces nothing."""

from __future__ import annotations

import contextlib
import io
import json
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vkjit as vj
from tests import devices
from vkjit import export
from vkjit import numpy as vnp
from vkjit.errors import ArgumentError, DataError, DonatedBufferError, ShapeError
from vkjit.export import plans
from vkjit.lowering.artifact import Launch
from vkjit.lowering.kernel.text import text as kernel_text

RNG = np.random.default_rng(5)
TABLE = RNG.normal(size=(4, 6)).astype(np.float32)


def layer(params: dict[str, Any], x: Any) -> dict[str, Any]:
    hidden = vnp.tanh(x @ TABLE + params["bias"])
    return {"loss": vnp.mean(hidden**2), "rows": (hidden.sum(1), [x.astype("bfloat16")])}


PARAMS = {"bias": vnp.asarray(RNG.normal(size=6).astype(np.float32))}
X = vnp.asarray(RNG.normal(size=(5, 4)).astype(np.float32))


def altered(data: bytes, name: str, change: Any) -> bytes:
    """The file with one of its parts changed."""
    source, stream = zipfile.ZipFile(io.BytesIO(data)), io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for entry in source.namelist():
            part = source.read(entry)
            archive.writestr(entry, change(part) if entry.startswith(name) else part)
    return stream.getvalue()


@pytest.mark.parametrize("device", devices.names(), indirect=True, scope="session")
def test_a_loaded_function_gives_the_same_bits(device: str, tmp_path: Path) -> None:
    with vj.default_device(device):
        params, x = {"bias": vj.device_put(PARAMS["bias"], device)}, vj.device_put(X, device)
        jitted = vj.jit(layer)
        want = jitted(params, x)
        export.export(jitted)(params, x).save(tmp_path / "layer.vkj")
        loaded = export.load(tmp_path / "layer.vkj")
        assert loaded.has_plan(device)
        got = loaded.call(params, x)
    assert vj.tree.structure(got) == vj.tree.structure(want)
    for a, b in zip(vj.tree.leaves(got), vj.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_nothing_is_traced_again(tmp_path: Path) -> None:
    calls: list[int] = []

    def counted(x: Any) -> Any:
        calls.append(1)
        return vnp.exp(x) * 2

    export.export(vj.jit(counted))(X).save(tmp_path / "f.vkj")
    assert calls == [1]
    loaded = export.load(tmp_path / "f.vkj")
    np.testing.assert_allclose(loaded.call(X), np.exp(np.asarray(X)) * 2, rtol=2e-6)
    assert calls == [1]


def test_another_target_lowers_the_program() -> None:
    exported = export.export(vj.jit(layer), devices=["reference"])(PARAMS, X)
    loaded = export.deserialize(exported.serialize())
    assert loaded.has_plan("reference")
    assert not loaded.has_plan("cpu")
    with vj.default_device("cpu"):
        on_cpu = vj.tree.map(lambda v: vj.device_put(v, "cpu"), (PARAMS, X))
        got, want = loaded.call(*on_cpu), vj.jit(layer)(*on_cpu)
    np.testing.assert_array_equal(got["rows"][0], want["rows"][0])


def test_files_are_the_same_whenever_they_are_made() -> None:
    def parts() -> dict[str, bytes]:
        data = export.export(vj.jit(layer))(PARAMS, X).serialize()
        archive = zipfile.ZipFile(io.BytesIO(data))
        return {name: archive.read(name) for name in archive.namelist()}

    assert parts() == parts()


def test_shapes_stand_for_arrays() -> None:
    shapes = vj.tree.map(lambda v: vj.ShapeDtypeStruct(v.shape, v.dtype), (PARAMS, X))
    exported = export.export(vj.jit(layer))(*shapes)
    assert [a.shape for a in exported.in_avals] == [(6,), (5, 4)]
    np.testing.assert_allclose(exported.call(PARAMS, X)["loss"], layer(PARAMS, X)["loss"], 1e-6)


def test_donation_is_part_of_the_file() -> None:
    step = vj.jit(lambda state, x: state + x, donate_argnums=0)
    loaded = export.deserialize(export.export(step)(X, X).serialize())
    state = vnp.asarray(np.asarray(X))
    np.testing.assert_array_equal(loaded.call(state, X), np.asarray(X) * 2)
    with pytest.raises(DonatedBufferError):
        np.asarray(state)


def test_refs_are_written() -> None:
    def write(cache: vj.Ref, x: Any) -> Any:
        cache[1:3] = x
        return x.sum()

    jitted = vj.jit(write)
    rows = np.ones((2, 4), np.float32)
    loaded = export.deserialize(export.export(jitted)(vj.Ref(vnp.zeros((5, 4))), rows).serialize())
    cache = vj.Ref(vnp.zeros((5, 4)))
    assert float(loaded.call(cache, rows)) == 8.0
    assert np.asarray(cache.value).sum() == 8.0


def test_plans_read_back_as_they_were() -> None:
    plan = vj.jit(layer).lower(PARAMS, X).plan
    again = plans.from_data(json.loads(json.dumps(plans.to_data(plan))))
    assert (again.buffers, again.barriers) == (plan.buffers, plan.barriers)
    for before, after in zip(plan.steps, again.steps, strict=True):
        assert isinstance(before, Launch)
        assert isinstance(after, Launch)
        assert (before.arguments, before.origin) == (after.arguments, after.origin)
        assert kernel_text(before.kernel) == kernel_text(after.kernel)


def test_other_arguments_are_refused() -> None:
    exported = export.export(vj.jit(layer))(PARAMS, X)
    with pytest.raises(ShapeError, match=r"argument leaf 1 is f32\[2,4\], expected f32\[5,4\]"):
        exported.call(PARAMS, X[:2])
    with pytest.raises(ArgumentError, match="compiled for"):
        exported.call(X)


def test_what_is_no_jitted_function_is_refused() -> None:
    with pytest.raises(ArgumentError, match="expected what jit returns"):
        export.export(layer)


def test_structures_that_are_no_data_are_refused_before_anything_is_written() -> None:
    keyed = vj.jit(lambda d: d[1])
    with pytest.raises(ArgumentError, match=r"keys \[1\], expected strings"):
        export.export(keyed)({1: X})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no exported function"),
        (b"PK\x03\x04 and then nothing", "no exported function"),
    ],
)
def test_foreign_bytes_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        export.deserialize(data)


def test_damaged_and_newer_files_are_refused() -> None:
    whole = export.export(vj.jit(layer))(PARAMS, X).serialize()

    def newer(part: bytes) -> bytes:
        return json.dumps({**json.loads(part), "version": 99}).encode()

    with pytest.raises(DataError, match="version 99"):
        export.deserialize(altered(whole, "manifest", newer))
    with pytest.raises(DataError, match="damaged"):
        export.deserialize(altered(whole, "program", lambda part: part[: len(part) // 2]))

    def beyond(part: bytes) -> bytes:
        data = json.loads(part)
        data["plan"]["steps"][0]["arguments"][0][1] += 1 << 40
        return json.dumps(data).encode()

    with pytest.raises(DataError, match="reaches beyond its buffer"):
        export.deserialize(altered(whole, "plans", beyond)).call(PARAMS, X)


def test_an_interrupted_save_leaves_the_file_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = export.export(vj.jit(layer))(PARAMS, X)
    path = tmp_path / "f.vkj"
    exported.save(path)
    before = path.read_bytes()

    def fail(self: Path, data: bytes) -> int:
        with self.open("wb") as stream:
            stream.write(data[:10])
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="disk full"):
        exported.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_whatever_is_damaged_is_told_as_such() -> None:
    exported = export.export(vj.jit(layer))(PARAMS, X)
    whole = exported.serialize()
    rng = random.Random(0)

    def odd(part: bytes) -> bytes:
        where = rng.randrange(len(part))
        return part[:where] + rng.choice([b"", b"(", b'"', b"-1", b"[]", b"%z"]) + part[where + 2 :]

    for _ in range(150):
        damaged = altered(whole, rng.choice(["manifest", "program", "plans", "constants"]), odd)
        with contextlib.suppress(DataError):
            export.deserialize(damaged).lowered("cpu")


def test_parts_that_do_not_belong_together_are_refused() -> None:
    whole = export.export(vj.jit(layer))(PARAMS, X).serialize()

    def with_(key: str, value: object) -> Any:
        return lambda part: json.dumps({**json.loads(part), key: value}).encode()

    for key, value in (("in_tree", "*"), ("donated", [7]), ("version", 0), ("constants", [])):
        with pytest.raises(DataError, match=r"damaged|version 0"):
            export.deserialize(altered(whole, "manifest", with_(key, value)))
