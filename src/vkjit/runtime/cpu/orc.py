"""LLVM text to running code: one target machine and one ORC JIT for the process."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib
import itertools
import threading
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, final

from vkjit.errors import InternalError
from vkjit.runtime.cpu.host import Host

llvm: Any = importlib.import_module("llvmlite.binding")  # has no types: Any from here on

PIPELINE = "1: instcombine, codegen 2, small pic"
"""Names the passes in cache keys; change it when they change."""

_CODEGEN_LEVEL = 2


@final
class Library:
    """Linked code, unloaded when the last reference goes."""

    __slots__ = ("__weakref__", "_tracker")

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker

    def address(self, symbol: str) -> int:
        """Where an exported symbol stands."""
        return int(self._tracker[symbol])


@final
class Jit:
    """Compiles text to objects and links objects; safe to use from several threads."""

    def __init__(self, host: Host) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        llvm.initialize_native_asmparser()
        # A finalizer of the user's, which may run at any allocation under it, may compile, too.
        self._lock = threading.RLock()
        # Small code model: constants are reached relative to the instruction, in one load. Safe
        # because JITLink lays out each object as one block.
        self._machine: Any = llvm.Target.from_default_triple().create_target_machine(
            cpu=host.cpu,
            features=host.feature_text,
            opt=_CODEGEN_LEVEL,
            reloc="pic",
            codemodel="small",
            jit=True,
        )
        self._engine: Any = llvm.create_lljit_compiler(self._machine, use_jit_link=True)
        self._names = itertools.count()

    def compile(self, text: str) -> bytes:
        """The object code of a module.

        Raises:
            InternalError: LLVM does not accept the text; the message shows where.
        """
        with self._lock:
            module = self._optimized(text)
            return bytes(self._machine.emit_object(module))

    def assembly(self, text: str) -> str:
        """The assembly text of a module, for people."""
        with self._lock:
            return str(self._machine.emit_assembly(self._optimized(text)))

    def link(self, code: bytes, exports: Iterable[str], imports: Mapping[str, int]) -> Library:
        """Loads object code; every symbol it needs must be in ``imports``.

        Raises:
            InternalError: a symbol is missing.
        """
        builder: Any = llvm.JITLibraryBuilder().add_object_img(code)
        for name, address in imports.items():
            builder.import_symbol(name, address)
        for name in exports:
            builder.export_symbol(name)
        with self._lock:
            try:
                return Library(builder.link(self._engine, f"vkjit.{next(self._names)}"))
            except RuntimeError as error:
                raise InternalError(f"cpu: linking failed: {error}") from error

    def _optimized(self, text: str) -> Any:
        """The verified module after the one pass that pays for explicit vector code.

        Measured: whole pipelines double the compile time and run no faster, because code
        generation itself hoists invariants and merges equal expressions.
        """
        try:
            module: Any = llvm.parse_assembly(text)
            module.verify()
        except RuntimeError as error:
            raise InternalError(f"cpu: LLVM refused generated text: {error}") from error
        module.triple = self._machine.triple
        module.data_layout = str(self._machine.target_data)
        builder: Any = llvm.create_pass_builder(
            self._machine, llvm.create_pipeline_tuning_options(1)
        )
        passes: Any = llvm.create_new_module_pass_manager()
        passes.add_instruction_combine_pass()
        passes.run(module, builder)
        return module


@functools.cache
def library_symbols(names: tuple[str, ...]) -> Mapping[str, int]:
    """Addresses of those ``names`` that the C library or its mathematical part has."""
    found: dict[str, int] = {}
    for name in names:
        for library in _libraries():
            function = getattr(library, name, None)
            if function is not None:
                address = ctypes.cast(function, ctypes.c_void_p).value
                assert address is not None
                found[name] = address
                break
    return MappingProxyType(found)


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ...]:
    """The process, and the mathematical library where it is one of its own."""
    process = ctypes.CDLL(None)
    if hasattr(process, "erf"):
        return (process,)
    return process, ctypes.CDLL(ctypes.util.find_library("m"))  # slow: starts a program
