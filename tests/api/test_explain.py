"""explain: the program after each pass, with what changed; misses: why a function recompiled."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import vkjit as vj
from vkjit import explain, explain_misses
from vkjit import numpy as vnp
from vkjit.errors import ArgumentError, RecompileWarning, ShapeError

X = np.ones((3, 4), np.float32)


def wasteful(x: Any) -> Any:
    y = vnp.exp(x)
    unused = vnp.sin(y)
    del unused
    return y * vnp.log(2.0) + vnp.exp(x)


def test_each_pass_shows_what_it_changed() -> None:
    found = explain(wasteful)(X)
    views = {view.name: view for view in reversed(found.passes)}  # the first of each name
    assert [line[0] for line in views["dce"].diff.splitlines() if "sin" in line] == ["-"]
    assert "log" in views["fold"].diff
    assert "-%" in views["cse"].diff
    assert "exp" in views["cse"].diff
    assert found.passes[0].before == len(found.traced.eqns)
    assert found.passes[-1].after == len(found.lowered.program.eqns)


def test_variables_keep_their_numbers() -> None:
    found = explain(lambda x: vnp.tanh(x) + 0 * vnp.cos(x).sum() * 0)(X)
    for view in found.passes:
        kept = [line for line in view.diff.splitlines() if line.startswith(" ")]
        removed = [line[1:] for line in view.diff.splitlines() if line.startswith("-")]
        assert not {line[1:] for line in kept} & set(removed)


def test_the_text_names_kernels_lines_and_bytes() -> None:
    shown = str(explain(vj.jit(vj.grad(lambda x: vnp.tanh(x).sum())))(X))
    assert "== trace of" in shown
    assert "nothing changed" in shown
    assert f"tanh at {__file__}" in shown
    assert "floating-point operations" in shown
    assert "peak" in shown


def test_stages_run_nothing_until_the_last() -> None:
    f = vj.jit(lambda p, x: {"y": vnp.tanh(x @ p["w"]).sum(0)})
    traced = f.trace({"w": np.ones((4, 5), np.float32)}, X)
    assert traced.out_info == {"y": vj.ShapeDtypeStruct((5,), np.float32)}
    assert "tanh" in traced.as_text()
    lowered = traced.lower()
    assert lowered.cost_analysis().flops == 2 * 3 * 4 * 5 + 3 * 5 + 3 * 5
    compiled = lowered.compile()
    np.testing.assert_allclose(
        compiled({"w": np.ones((4, 5), np.float32)}, X)["y"], 3 * np.tanh(4.0), rtol=1e-6
    )
    assert compiled.memory_analysis().peak == lowered.memory().peak
    assert f.cache_size() == 0


def test_a_compiled_call_refuses_other_shapes() -> None:
    compiled = vj.jit(vnp.sin).lower(X).compile()
    with pytest.raises(ShapeError, match=r"leaf 0 is f32\[4\], expected f32\[3,4\]"):
        compiled(X[0])
    with pytest.raises(ArgumentError, match="compiled for"):
        compiled([X])


def test_a_stage_can_be_lowered_for_another_device() -> None:
    traced = vj.jit(vnp.sin).trace(X)
    assert traced.lower("reference").target.name == "reference"


def counted() -> tuple[Any, Callable[[], list[dict[str, tuple[str, str]]]]]:
    @vj.jit
    def f(params: Any, x: Any, *, k: int = 1) -> Any:
        return params["w"] * x * k

    return f, lambda: [dict(miss.changed) for miss in f.misses()]


def test_misses_say_what_differs_from_the_nearest_version() -> None:
    f, changes = counted()
    w = {"w": np.float32(1)}
    f(w, X)
    f(w, X)
    f(w, X[0])
    f({"w": X}, X)
    f({**w, "unused": 1.0}, X)
    assert changes()[:3] == [
        {},
        {"argument x": ("f32[3,4]", "f32[4]")},
        {"argument params['w']": ("f32[]", "f32[3,4]")},
    ]
    assert changes()[3]["argument params['unused']"] == ("absent", "f32[]*")
    assert all(miss.seconds > 0 for miss in f.misses())
    assert __file__ in str(f.misses()[1])


def test_misses_name_static_arguments_devices_and_modes() -> None:
    f = vj.jit(lambda x, n: x * n, static_argnums=1)
    with vj.default_device("cpu"):
        f(X, 2)
        f(X, 2.0)
    with vj.default_device("reference"):
        f(X, 2)
    with vj.default_device("reference"), vj.default_matmul_precision("bfloat16"):
        f(X, 2)
    assert [dict(m.changed) for m in f.misses()][1] == {"static n": ("int 2", "float 2.0")}
    assert list(f.misses()[2].changed) == ["device"]
    assert "matmul precision" in f.misses()[3].changed


def test_reports_are_logged_on_request(caplog: pytest.LogCaptureFixture) -> None:
    f, _ = counted()
    with caplog.at_level(logging.WARNING, "vkjit.jit"), explain_misses():
        f({"w": np.float32(1)}, X)
        f({"w": np.float32(1)}, X[:2])
    assert "version 1" in caplog.messages[0]
    assert "argument x: f32[3,4] -> f32[2,4]" in caplog.messages[1]


def test_many_versions_warn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKJIT_MANY_MISSES", "3")
    f = vj.jit(vnp.sin)

    def call_with_many_sizes() -> None:
        for n in range(1, 6):
            f(np.ones(n, np.float32))

    with pytest.warns(RecompileWarning, match=r"compiled 3 versions.* argument .*2 times") as seen:
        call_with_many_sizes()
    assert len(seen) == 1
    assert seen[0].filename == __file__


def test_a_limit_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKJIT_MANY_MISSES", "few")
    with pytest.raises(ArgumentError, match="VKJIT_MANY_MISSES: 'few'"):
        vj.jit(vnp.sin)(X)


def test_programs_inside_are_shown_as_passes_change_them() -> None:
    def total(x: Any) -> Any:
        return vj.lax.scan(lambda c, v: (vnp.sin(c) * v * (2.0 * 3.0), c), x[0], x)[1]

    shown = vj.explain(vj.checkpoint(total))(np.ones(4, np.float32))
    before, after = str(shown).split("== dce", 1)
    assert "body = total(" in before
    assert "    body = " in before.split("body = total(", 1)[1]
    assert "sin" in before
    inlined = next(p for p in shown.passes if p.name == "inline")
    assert "sin" in inlined.diff
    assert after
