"""Checkpoints: bit for bit, verified, and whole whatever interrupts the writer."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from vkjit.errors import ConfigError, DataError
from vkjit_models.common import atomic
from vkjit_models.common.checkpoint import CheckpointStore, differing_keys

CONFIG: dict[str, Any] = {"lora": {"rank": 8, "targets": ["q_proj"]}, "seed": 1}


def _arrays(seed: int, size: int = 64) -> dict[str, NDArray[Any]]:
    return {"a": np.random.default_rng(seed).standard_normal(size).astype(np.float32)}


def test_every_bit_of_every_dtype(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    kinds = [
        "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
        "float16", "float32", "float64", "complex64", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn,
    ]  # fmt: skip
    arrays: dict[str, NDArray[Any]] = {}
    for kind in map(np.dtype, kinds):
        bits = rng.integers(0, 256, (3, 4, kind.itemsize), np.uint8)
        bits = bits & 1 if kind == np.bool_ else bits
        arrays[f"all.{kind.name}"] = bits.view(kind)[..., 0]  # NaN payloads among them
    arrays["scalar"] = np.array(7, np.uint32)
    arrays["empty"] = np.zeros((0, 3), np.float32)
    arrays["transposed"] = np.arange(6, dtype=np.float32).reshape(2, 3).T
    arrays["strided"] = np.arange(10)[::3]
    arrays["big_endian"] = np.arange(3, dtype=">f4")
    state = {"position": 12, "loss": 0.1 + 0.2, "tiny": 5e-324, "order": [3, 1], "name": "é"}
    store = CheckpointStore(tmp_path, CONFIG)
    store.save(12, arrays, state)
    loaded = CheckpointStore(tmp_path, CONFIG).load()
    assert loaded is not None
    assert (loaded.step, loaded.state) == (12, state)
    assert loaded.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        found = loaded.arrays[name]
        assert found.shape == array.shape
        assert found.dtype == array.dtype.newbyteorder("=")
        assert found.tobytes() == array.astype(found.dtype).tobytes(), name


def test_the_newest_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, CONFIG, keep=2)
    assert store.load() is None
    for step in (2, 4, 10, 12):
        store.save(step, _arrays(step), {})
    assert store.steps() == [10, 12]
    newest, chosen = store.load(), store.load(10)
    assert newest is not None
    assert chosen is not None
    assert (newest.step, chosen.step) == (12, 10)
    np.testing.assert_array_equal(chosen.arrays["a"], _arrays(10)["a"])
    store.save(12, _arrays(99), {"again": True})
    assert store.steps() == [10, 12]
    with pytest.raises(DataError, match=r"none for step 2 in .*, expected one of \[10, 12\]"):
        store.load(2)
    with pytest.raises(ConfigError, match="keep = 0"):
        CheckpointStore(tmp_path, CONFIG, keep=0)


def test_another_config_is_refused_by_key(tmp_path: Path) -> None:
    CheckpointStore(tmp_path, CONFIG).save(1, _arrays(1), {})
    other = {"lora": {"rank": 16, "targets": ("q_proj",)}, "seed": 1, "clip": 1.0}
    with pytest.raises(ConfigError) as caught:
        CheckpointStore(tmp_path, other).load()
    message = str(caught.value)
    assert "clip: 'nothing' there, 1.0 here; lora.rank: 8 there, 16 here" in message
    assert "seed" not in message
    assert "targets" not in message
    assert differing_keys({"a": {"b": 1}}, {"a": {"b": 1}}) == []


@pytest.mark.parametrize("place", ["first", "header", "middle", "last", "cut", "empty"])
def test_damage_is_noticed(tmp_path: Path, place: str) -> None:
    store = CheckpointStore(tmp_path, CONFIG)
    store.save(1, _arrays(1), {})
    path = store.save(2, _arrays(2), {"x": 1})
    data = bytearray(path.read_bytes())
    flipped = {"first": 0, "header": 40, "middle": len(data) // 2, "last": len(data) - 1}
    if place in flipped:
        data[flipped[place]] ^= 4
    path.write_bytes({"cut": data[:-3], "empty": b""}.get(place, data))
    with pytest.raises(DataError, match=r"step-00000002.* is damaged .* resume from step 1"):
        store.load()
    path.unlink()
    intact = store.load()
    assert intact is not None
    assert intact.step == 1


@contextmanager
def _largest_file(limit: int) -> Iterator[None]:
    """The kernel refuses to write past ``limit`` bytes: a real failure in the middle of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_the_system_breaks_off(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, CONFIG)
    arrays = _arrays(1, 1 << 20)
    store.save(1, arrays, {})
    with (
        _largest_file(3 << 20),
        pytest.raises(DataError, match=r"cannot write .* \(\d+ bytes\): .* step 1 is intact; free"),
    ):
        store.save(2, arrays, {})
    _assert_only(store, 1, arrays)


@pytest.mark.parametrize("stage", ["write", "fsync", "replace"])
def test_full_disk_at_each_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    store = CheckpointStore(tmp_path, CONFIG, keep=1)
    store.save(1, _arrays(1), {})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def half(handle: Any, data: bytes) -> None:
        handle.write(data[: len(data) // 2])
        full()

    with monkeypatch.context() as patch:
        if stage == "write":
            patch.setattr(atomic, "write_all", half)
        else:
            patch.setattr(atomic.os, stage, full)
        with pytest.raises(DataError, match="No space left on device; that of step 1 is intact"):
            store.save(2, _arrays(2), {})
    _assert_only(store, 1, _arrays(1))
    store.save(2, _arrays(2), {})
    assert store.steps() == [2]


def test_full_disk_at_the_first_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic, "write_all", full)
    store = CheckpointStore(tmp_path, CONFIG)
    with pytest.raises(DataError, match="No space left on device; none was written before"):
        store.save(1, _arrays(1), {})
    assert store.load() is None


WRITER = """
import sys
import time
from pathlib import Path
import numpy as np
from vkjit_models.common import atomic
from vkjit_models.common.checkpoint import CheckpointStore

def write_slowly(handle, data):  # so that the kill falls into a write
    for start in range(0, len(data), 1 << 16):
        handle.write(data[start : start + (1 << 16)])
        handle.flush()
        time.sleep(2e-4)

atomic.write_all = write_slowly
store = CheckpointStore(Path(sys.argv[1]), {"seed": 1}, keep=1)
step = store.steps()[-1] if store.steps() else 0
while True:
    step += 1
    store.save(step, {"a": np.full(1 << 19, step, np.uint32)}, {"step": step})
    print(step, flush=True)
"""


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """SIGKILL while checkpoints are written: the last one reported, or a later one, is whole."""
    store = CheckpointStore(tmp_path, {"seed": 1}, keep=1)
    reported = 0
    for delay in (0.0, 0.002, 0.005, 0.011):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            first = int(writer.stdout.readline())
            time.sleep(delay)
            writer.send_signal(signal.SIGKILL)
            rest = [int(line) for line in writer.stdout.read().splitlines(keepends=True)]
        assert first > reported
        reported = max([first, *rest])
        found = store.load()
        assert found is not None
        assert found.step >= reported
        assert found.state == {"step": found.step}
        assert (found.arrays["a"] == found.step).all()
        reported = found.step
    store.save(reported + 1, {"a": np.zeros(1)}, {})
    assert not list(atomic.partial_files(tmp_path))
    assert len(list(tmp_path.iterdir())) == 1


def _assert_only(store: CheckpointStore, step: int, arrays: dict[str, NDArray[Any]]) -> None:
    """One checkpoint, that of ``step``, whole, and nothing beside it."""
    found = store.load()
    assert found is not None
    assert found.step == step
    for name, array in arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array)
    assert [path.name for path in store.directory.iterdir()] == [store.path(step).name]
