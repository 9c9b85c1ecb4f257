"""The cache on disk: whole entries or none, bounded, shared between processes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from vkjit.errors import ArgumentError
from vkjit.runtime.cache import DiskCache, cache_key, open_cache


def test_entries_come_back(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "new" / "folder", 1 << 20)
    assert cache.get("a") is None
    cache.put("a", b"code")
    cache.put("empty", b"")
    assert cache.get("a") == b"code"
    assert cache.get("empty") == b""
    assert (cache.hits, cache.misses) == (2, 1)
    assert DiskCache(cache.folder, 1 << 20).get("a") == b"code"


@pytest.mark.parametrize("damage", ["cut", "flip", "foreign", "blank"])
def test_damaged_entries_count_as_missing(tmp_path: Path, damage: str) -> None:
    cache = DiskCache(tmp_path, 1 << 20)
    cache.put("a", b"code" * 100)
    path = tmp_path / "a"
    data = path.read_bytes()
    changed = {
        "cut": data[:-1],
        "flip": data[:-1] + bytes([data[-1] ^ 1]),
        "foreign": b"something else",
        "blank": b"",
    }
    path.write_bytes(changed[damage])
    assert cache.get("a") is None
    cache.put("a", b"again")
    assert cache.get("a") == b"again"


def test_pruning_removes_what_was_used_longest_ago(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 5000)
    for position, name in enumerate("abcdef"):
        cache.put(name, bytes(900))
        os.utime(tmp_path / name, (position, position))
    assert cache.get("a") is not None  # now the newest
    cache.prune()
    assert cache.get("b") is None
    assert cache.get("c") is None
    assert cache.get("f") is not None
    assert cache.get("a") is not None
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 5000


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    cache = DiskCache(blocked, 1 << 20)
    with pytest.warns(RuntimeWarning, match="cannot be written .*; set VKJIT_CACHE_DIR"):
        cache.put("a", b"code")
    cache.put("b", b"code")
    DiskCache(blocked, 1 << 20).put("a", b"code")
    assert cache.get("a") is None


def test_entries_of_a_read_only_folder_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system refuses every change, to the superuser, too."""
    folder = tmp_path / "kept" / "code"
    DiskCache(folder, 1 << 20).put("a", b"code")

    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for module, name in ((os, "utime"), (os, "mkdir"), (os, "replace"), (tempfile, "mkstemp")):
        monkeypatch.setattr(module, name, refuse)
    cache = DiskCache(folder, 1 << 20)
    assert cache.get("a") == b"code"
    with pytest.warns(RuntimeWarning, match=r"cannot be written \(Read-only file system\)"):
        cache.put("b", b"more")
    cache.put("c", b"more")  # told once
    assert (cache.get("a"), cache.get("b")) == (b"code", None)


def test_keys_tell_parts_apart() -> None:
    assert cache_key(["ab", "c"]) != cache_key(["a", "bc"])
    assert cache_key(["a", ""]) != cache_key(["a"])
    assert cache_key(["a", "b"]) == cache_key(iter(["a", "b"]))


def test_the_environment_sets_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VKJIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("VKJIT_CACHE", "1")
    monkeypatch.setenv("VKJIT_CACHE_BYTES", "12345")
    cache = open_cache("cpu")
    assert cache is not None
    assert (cache.folder, cache.limit) == (tmp_path / "cpu", 12345)
    monkeypatch.setenv("VKJIT_CACHE_BYTES", "lots")
    with pytest.raises(ArgumentError, match="VKJIT_CACHE_BYTES: got 'lots'"):
        open_cache("cpu")
    monkeypatch.setenv("VKJIT_CACHE", "0")
    assert open_cache("cpu") is None


COMPILE = """
from vkjit.lowering.artifact import Plan, PlannedBuffer, Role
from vkjit.runtime import get_device
from vkjit.runtime.cpu.orc import Jit

calls = []
compile_ = Jit.compile
Jit.compile = lambda self, text: calls.append(text) or compile_(self, text)
get_device("cpu").load(Plan("p", (PlannedBuffer(Role.OUTPUT, 64),), (), frozenset(), 0)).run([])
print(len(calls))
"""


def compilations(folder: Path, **environment: str) -> int:
    """How often LLVM runs in a new process that opens the device and loads one plan."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env={**os.environ, "VKJIT_CACHE": "1", "VKJIT_CACHE_DIR": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return int(done.stdout)


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    assert compilations(tmp_path) == 2  # the thread pool and the plan
    assert compilations(tmp_path) == 0
    assert compilations(tmp_path, VKJIT_CACHE="0") == 2


def test_processes_that_write_at_once_leave_whole_entries(tmp_path: Path) -> None:
    writer = (
        "import sys; from pathlib import Path; from vkjit.runtime.cache import DiskCache\n"
        "cache = DiskCache(Path(sys.argv[1]), 300_000)\n"
        "for i in range(200):\n"
        "    key = str(i % 10)\n"
        "    cache.put(key, key.encode() * 10_000)\n"
        "    found = cache.get(key)\n"
        "    assert found is None or found == key.encode() * 10_000\n"
    )
    command = [sys.executable, "-c", writer, str(tmp_path)]
    processes = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(i) for i in range(10)]
