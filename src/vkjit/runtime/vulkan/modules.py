"""SPIR-V modules of kernels, kept on disk so that the next process need not emit or validate them.

An entry is found by the kernel's text, everything the target says, and the source of the emitter:
a change of any of these makes another entry.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import sys
from array import array
from pathlib import Path
from typing import final
from weakref import WeakKeyDictionary

from vkjit.lowering import kernel as kernel_package
from vkjit.lowering import spirv as spirv_package
from vkjit.lowering.kernel.nodes import Kernel
from vkjit.lowering.kernel.text import text
from vkjit.lowering.spirv.emit import emit
from vkjit.lowering.spirv.validate import validate
from vkjit.lowering.target import Target
from vkjit.runtime.cache import cache_key, open_cache

_MAGIC = 0x07230203
_HEADER_WORDS = 5
_ALWAYS_VALIDATED = 8192  # words: up to here validation costs a few milliseconds


@final
class Modules:
    """The modules of one target. With ``strict`` each is validated, however large.

    They do not name source lines: kernels that are equal otherwise share a module, and moving a
    line of the user's program does not make the driver compile anew.
    """

    def __init__(self, target: Target, *, strict: bool) -> None:
        self._target = target
        self._strict = strict
        self._disk = open_cache("spirv")
        self._about = (emitter_version(), sys.byteorder, _described(target))
        self._known: dict[str, array[int]] = {}
        self._of: WeakKeyDictionary[Kernel, array[int]] = WeakKeyDictionary()
        self.emitted = 0

    def of(self, kernel: Kernel) -> array[int]:
        """The module of a legalized kernel.

        Raises:
            InternalError: it cannot be emitted, or is not valid.
        """
        found = self._of.get(kernel)
        if found is None:
            found = self._of[kernel] = self._by_text(kernel)
        return found

    def _by_text(self, kernel: Kernel) -> array[int]:
        bare = copy.copy(kernel)
        bare.origin = ()
        key = cache_key((*self._about, text(bare)))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._saved(key) or self._made(bare, key)
        return found

    def _saved(self, key: str) -> array[int] | None:
        data = self._disk.get(key) if self._disk else None
        if not data or len(data) % 4:
            return None
        words = array("I", data)
        if len(words) <= _HEADER_WORDS or words[0] != _MAGIC:
            return None
        if self._strict:
            validate(words)
        return words

    def _made(self, kernel: Kernel, key: str) -> array[int]:
        words = emit(kernel, self._target)
        self.emitted += 1
        if self._strict or len(words) <= _ALWAYS_VALIDATED:
            validate(words)
        if self._disk:
            self._disk.put(key, words.tobytes())
        return words


@functools.cache
def emitter_version() -> str:
    """Changes with every edit of the kernel IR or of the emitter."""
    digest = hashlib.sha256()
    for package in (kernel_package, spirv_package):
        for folder in package.__path__:
            for path in sorted(Path(folder).glob("*.py")):
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _described(target: Target) -> str:
    """All fields of a target, sets in order."""
    parts: list[str] = []
    for field in dataclasses.fields(target):
        value: object = getattr(target, field.name)
        if isinstance(value, frozenset):
            value = sorted(map(str, value))  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
        parts.append(f"{field.name}={value}")
    return "\n".join(parts)
