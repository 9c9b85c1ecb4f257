"""Compiled functions as files: ``export(jit(f))(x).save(path)``, and ``load(path).call(x)``.

A file holds data alone: the program as text, constants as arrays, and plans with kernels. Loading
traces nothing. On a target that the file has a plan for it lowers nothing either; on another it
lowers the program. Names follow ``jax.export``.
"""

from __future__ import annotations

from vkjit.export.exported import Exported, deserialize, export, load

__all__ = ["Exported", "deserialize", "export", "load"]
