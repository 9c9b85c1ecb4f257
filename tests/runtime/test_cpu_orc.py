"""Compiling and linking from several places at once."""

from __future__ import annotations

import gc
import threading

import pytest

from vkjit.runtime.cpu.host import detect
from vkjit.runtime.cpu.orc import Jit

TEXT = "define i32 @answer() {\n  ret i32 42\n}\n"


def test_a_finalizer_may_compile_while_a_module_is_compiled(monkeypatch: pytest.MonkeyPatch):
    jit = Jit(detect())
    made: list[bytes] = []
    optimized = Jit._optimized

    class Late:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            monkeypatch.undo()
            made.append(jit.compile(TEXT))

    def collecting(self: Jit, text: str):
        gc.collect()
        return optimized(self, text)

    monkeypatch.setattr(Jit, "_optimized", collecting)
    Late()
    thread = threading.Thread(target=lambda: made.append(jit.compile(TEXT)), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "deadlock"
    assert len(made) == 2
    assert made[0] == made[1]
