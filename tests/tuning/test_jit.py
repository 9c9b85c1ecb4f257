"""How compiled functions come by tuned schedules, on a fake GPU; one run on real devices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from tests.tuning.fakes import DEFAULT, FAST, FakeGpu
from vkjit.errors import ArgumentError
from vkjit.lowering.plan.schedule import NaiveSchedule
from vkjit.runtime import get_device
from vkjit.tuning import choosing, defaults
from vkjit.tuning.records import Result, to_json
from vkjit.tuning.rig import Rig
from vkjit.tuning.session import jobs_of, run

Array = np.ndarray[Any, Any]
S = vj.ShapeDtypeStruct


def layer(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w) * 2


def arguments() -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    return rng.random((10, 9), np.float32), rng.random((9, 12), np.float32)


def tune(gpu: FakeGpu, function: Any = layer) -> list[Result]:
    """Tunes by the fake's clock; FAST wins."""
    report = run(jobs_of(function, arguments(), gpu), Rig(gpu, gpu.clock), 1e6)
    return [g.result for g in report.groups if g.result is not None]


def shown(lowered: vj.Lowered, schedule: NaiveSchedule) -> bool:
    size = f"workgroup=({schedule.columns},{schedule.rows},1)"
    return size in lowered.as_text("kernels")


def test_a_compiled_function_takes_what_was_tuned(gpu: FakeGpu) -> None:
    f = vj.jit(layer)
    x, w = arguments()
    with vj.default_device("fake:0"):
        before = f(x, w)
        assert shown(f.lower(x, w), DEFAULT)
        (result,) = tune(gpu)
        assert result.parsed() == FAST
        assert shown(f.lower(x, w), FAST)
        assert shown(f.compile(x, w), FAST)
        after = f(x, w)
    assert f.cache_size() == 1
    np.testing.assert_array_equal(np.asarray(before), np.asarray(after))
    np.testing.assert_allclose(np.asarray(after), np.tanh(x @ w) * 2, rtol=1e-5)


def test_calls_with_arrays_of_the_device_notice_it_too(gpu: FakeGpu) -> None:
    f = vj.jit(layer)
    with vj.default_device("fake:0"):
        x, w = (jnp.asarray(v) for v in arguments())
        f(x, w)
        first = f.compile(x, w)
        tune(gpu)
        f(x, w)
        assert f.compile(x, w) is not first


def test_what_tuning_does_not_change_is_not_compiled_again(gpu: FakeGpu) -> None:
    other = vj.jit(lambda x: x + 1)
    with vj.default_device("fake:0"):
        x = jnp.ones((3, 3))
        first = other.compile(x)
        tune(gpu)
        assert other.compile(x) is first


def test_jitted_functions_and_texts_can_be_tuned(gpu: FakeGpu) -> None:
    x, w = arguments()
    with vj.default_device("fake:0"):
        text = vj.jit(layer).lower(x, w).as_text()
    plain = jobs_of(layer, (S((10, 9), "float32"), S((9, 12), "float32")), gpu)
    assert jobs_of(vj.jit(layer), (x, w), gpu) == plain
    assert jobs_of(text, (), gpu) == plain
    assert len(plain) == 1


def test_equal_products_are_tuned_once_and_counted(gpu: FakeGpu) -> None:
    (job,) = jobs_of(lambda x, w: (layer(x, w), layer(-x, w)), arguments(), gpu)
    assert job.count == 2


def test_nothing_is_timed_unless_asked_for(gpu: FakeGpu) -> None:
    with vj.default_device("fake:0"):
        vj.jit(layer)(*arguments())
    assert gpu.timed == []


def test_compiling_in_the_context_tunes_and_says_so(
    gpu: FakeGpu, capsys: pytest.CaptureFixture[str]
) -> None:
    f = vj.jit(layer)
    with vj.default_device("fake:0"), vj.tuning.tune(budget_s=60):
        f(*arguments())
    assert gpu.timed
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert said[0].startswith("vkjit: tuning contract 10x12x9 f32")
    assert said[1].startswith("vkjit: tuned in ")
    count = len(gpu.timed)
    with vj.default_device("fake:0"), vj.tuning.tune():
        vj.jit(layer)(*arguments())
    assert len(gpu.timed) == count


def test_the_environment_asks_for_it(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKJIT_TUNE", "1")
    with vj.default_device("fake:0"):
        vj.jit(layer)(*arguments())
        assert gpu.timed
        monkeypatch.setenv("VKJIT_TUNE", "yes")
        with pytest.raises(ArgumentError, match="VKJIT_TUNE: got 'yes', expected 0 or 1"):
            vj.jit(layer)(*arguments())


def test_a_schedule_that_no_longer_serves_is_not_used(gpu: FakeGpu) -> None:
    (result,) = tune(gpu)
    for text in ("naive(rows=64, columns=64)", "unknown(rows=1)"):
        choosing.store().put([replace(result, schedule=text)])
        with vj.default_device("fake:0"):
            assert shown(vj.jit(layer).lower(*arguments()), DEFAULT)


def test_shipped_results_serve_devices_of_their_name_until_measured(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (result,) = tune(gpu)
    elsewhere = replace(result, hardware=replace(result.hardware, uuid="", driver="other"))
    elsewhere = replace(elsewhere, kernels="of another version")
    (tmp_path / "fake.json").write_text(json.dumps(to_json([elsewhere])))
    vj.tuning.clear()

    def files(package: str) -> Path:
        return tmp_path

    monkeypatch.setattr(defaults.resources, "files", files)
    forget_shipped()
    with vj.default_device("fake:0"):
        assert shown(vj.jit(layer).lower(*arguments()), FAST)
        gpu.hardware = replace(gpu.hardware, name="Another GPU")
        assert shown(vj.jit(layer).lower(*arguments()), DEFAULT)
        gpu.hardware = result.hardware
        x, w = arguments()
        for rows, schedule in ((7, FAST), (14, FAST), (6, DEFAULT), (16, DEFAULT)):
            y = np.resize(x, (rows, x.shape[1]))
            assert shown(vj.jit(layer).lower(y, w), schedule), rows
    monkeypatch.undo()
    forget_shipped()


def forget_shipped() -> None:
    for cached in (defaults._all, defaults.shipped, defaults._by_shape):
        cached.cache_clear()


def test_what_is_shipped_can_be_read() -> None:
    for result in defaults._all():
        assert result.parsed().text() == result.schedule
        assert result.hardware.name


def test_there_is_nothing_to_tune_on_the_cpu() -> None:
    report = vj.tuning.tune(layer, *arguments(), device="cpu")
    assert report.groups == ()
    assert "nothing to choose" in str(report)
    assert vj.tuning.lookup(get_device("cpu")) is None


def test_budgets_are_positive() -> None:
    with pytest.raises(ArgumentError, match="budget_s 0"):
        vj.tuning.tune(layer, *arguments(), budget_s=0)


def test_real_devices(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small schedules that drivers compile quickly; what it measures is not judged."""
    listed = [NaiveSchedule(4, 8), NaiveSchedule(8, 8)]
    monkeypatch.setattr("vkjit.lowering.compile.candidates", lambda *_: listed)
    monkeypatch.setattr("vkjit.lowering.gpu.lower.candidates", lambda *_: listed)
    x, w = arguments()
    with vj.default_device(device):
        before = np.asarray(vj.jit(layer)(x, w))
        report = vj.tuning.tune(layer, x, w, device=device, budget_s=20)
        after = np.asarray(vj.jit(layer)(x, w))
    np.testing.assert_array_equal(before, after)
    if not device.startswith("vulkan:"):
        assert report.groups == ()
        return
    (group,) = report.groups
    assert group.result is not None
    assert group.result.seconds > 0
    assert not group.result.receipt.refused
