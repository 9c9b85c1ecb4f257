"""Files of results: merging, processes at once, damage, read-only folders, exchange."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import vkjit as vj
from tests.tuning.fakes import DEFAULT, FAST, product
from vkjit.errors import ConfigError
from vkjit.runtime.device import Hardware
from vkjit.tuning import choosing
from vkjit.tuning.records import Receipt, Result, group_key, kernels_version
from vkjit.tuning.store import Store

HARDWARE = Hardware("Fake GPU", "0123", "driver 1")
KEY = group_key(product())


def result(group: str = KEY, hardware: Hardware = HARDWARE, seconds: float = 1.0) -> Result:
    times = {DEFAULT.text(): 3.0, FAST.text(): seconds}
    receipt = Receipt("2026-01-01", "0", DEFAULT.text(), times, {}, ("all: 0",), 0.5, "1e-6", 2.0)
    return Result(hardware, kernels_version(), group, FAST.text(), receipt)


def only_file(folder: Path) -> Path:
    (path,) = folder.glob("*.json")
    return path


def test_another_process_finds_what_one_kept(folder: Path) -> None:
    Store(folder).put([result()])
    again = Store(folder)
    assert again.get(HARDWARE, KEY) == result()
    assert again.all() == [result()]


def test_results_that_others_add_are_seen(folder: Path) -> None:
    ours = Store(folder)
    assert ours.get(HARDWARE, KEY) is None
    before = ours.version
    Store(folder).put([result()])
    assert ours.get(HARDWARE, KEY) == result()
    assert ours.version > before


def test_other_drivers_devices_and_kernels_have_their_own(folder: Path) -> None:
    store = Store(folder)
    store.put([result()])
    for other in (
        replace(HARDWARE, driver="driver 2"),
        replace(HARDWARE, uuid="4567"),
        replace(HARDWARE, name="Other"),
    ):
        assert store.get(other, KEY) is None
    store.put([replace(result(group="old"), kernels="of another version")])
    assert store.get(HARDWARE, "old") is None
    assert len(store.all()) == 2


_WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from tests.tuning.test_store import result
from vkjit.tuning.store import Store
store = Store(Path(sys.argv[1]))
for number in range(15):
    store.put([result(f"{sys.argv[2]} {number}")])
"""


def test_two_processes_write_at_once_and_nothing_is_lost(folder: Path) -> None:
    root = str(Path(__file__).resolve().parents[2])
    writers = [
        subprocess.Popen([sys.executable, "-c", _WRITER, str(folder), name, root])
        for name in ("a", "b")
    ]
    assert [w.wait(timeout=120) for w in writers] == [0, 0]
    groups = {r.group for r in Store(folder).all()}
    assert groups == {f"{name} {number}" for name in ("a", "b") for number in range(15)}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": "vkjit tuning", "schema": 99, "results": []}',
        '{"format": "vkjit tuning", "schema": 1, "results": [{"group": 1}]}',
        '{"format": "vkjit tuning", "schema": 1, "results": 3}',
        "\x00\xff",
    ],
)
def test_a_damaged_or_foreign_file_is_ignored_with_one_warning_and_rebuilt(
    folder: Path, text: str
) -> None:
    Store(folder).put([result()])
    only_file(folder).write_text(text, encoding="latin-1")
    store = Store(folder)
    with pytest.warns(RuntimeWarning, match="its results are not used") as caught:
        assert store.get(HARDWARE, KEY) is None
    assert store.get(HARDWARE, KEY) is None
    assert len(caught) == 1
    store.put([result()])
    assert Store(folder).get(HARDWARE, KEY) == result()


def test_results_last_in_memory_where_the_folder_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    store = Store(blocked / "tuning")
    with pytest.warns(RuntimeWarning, match="cannot be kept") as caught:
        store.put([result()])
    store.put([result("another")])  # a second warning would be an error
    assert len(caught) == 1
    assert store.get(HARDWARE, KEY) == result()


def test_without_a_cache_nothing_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKJIT_CACHE", "0")
    choosing.store().put([result()])
    assert choosing.store().get(HARDWARE, KEY) == result()
    assert not folder.exists()


def test_exported_results_can_be_loaded_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choosing.store().put([result(), result(hardware=replace(HARDWARE, name="Other"))])
    assert vj.tuning.export(tmp_path / "all.json") == 2
    vj.tuning.clear()
    assert vj.tuning.results() == []
    monkeypatch.setenv("VKJIT_CACHE_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(choosing._state, "store", None)
    assert vj.tuning.load(tmp_path / "all.json") == 2
    assert choosing.store().get(HARDWARE, KEY) == result()
    assert vj.tuning.export(tmp_path / "again.json") == 2
    assert (tmp_path / "again.json").read_text() == (tmp_path / "all.json").read_text()


def test_a_foreign_file_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "foreign.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        vj.tuning.load(path)
    path.write_text(json.dumps({"format": "vkjit tuning", "schema": 2, "results": []}))
    with pytest.raises(ConfigError, match="schema 2, expected 'vkjit tuning' and 1"):
        vj.tuning.load(path)


def test_a_result_without_its_checks_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "unchecked.json"
    choosing.store().put([result()])
    vj.tuning.export(path)
    document = json.loads(path.read_text())
    document["results"][0]["receipt"]["checks"] = []
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="has no receipt of its checks"):
        vj.tuning.load(path)
