"""The file of an exported function: a zip archive of JSON, text and NumPy arrays, nothing else.

    manifest.json     format and version, structures and avals of arguments and results
    program.txt       the simplified program, in the text form of ``vkjit.ir``
    constants/N.npy   the values that the function closes over
    plans/KEY.json    plans of targets it was lowered for, with their kernels as text

No part of it is code that Python would run.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast, final

import ml_dtypes
import numpy as np

from vkjit.blocks import block_of
from vkjit.dtypes import NAMED, DType, short
from vkjit.errors import DataError

FORMAT = "vkjit.export"
VERSION = 1
HostArray = np.ndarray[Any, Any]
_WORDS = {1: np.uint8, 2: np.uint16}


@final
@dataclass(frozen=True)
class Bundle:
    """The parts of a file, as data."""

    manifest: dict[str, Any]
    program: str
    constants: tuple[HostArray, ...]
    plans: dict[str, dict[str, Any]]


def write(bundle: Bundle) -> bytes:
    """The bytes of a file."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        head = {"format": FORMAT, "version": VERSION, **bundle.manifest}
        dtypes = [short(cast("DType", c.dtype)) for c in bundle.constants]
        archive.writestr("manifest.json", json.dumps({**head, "constants": dtypes}, indent=1))
        archive.writestr("program.txt", bundle.program)
        for number, value in enumerate(bundle.constants):
            archive.writestr(f"constants/{number}.npy", _npy(value))
        for key, plan in bundle.plans.items():
            archive.writestr(f"plans/{key}.json", json.dumps(plan))
    return stream.getvalue()


def read(data: bytes) -> Bundle:
    """The parts of a file.

    Raises:
        DataError: it is no such file, is damaged, or of a later version.
    """
    with (
        reading("this is no exported function, or it is damaged"),
        zipfile.ZipFile(io.BytesIO(data)) as archive,
    ):
        manifest = cast("dict[str, Any]", json.loads(archive.read("manifest.json")))
        _require_known(manifest)
        constants = tuple(
            _array(archive.read(f"constants/{n}.npy"), NAMED[name])
            for n, name in enumerate(manifest["constants"])
        )
        plans = {
            name.removeprefix("plans/").removesuffix(".json"): json.loads(archive.read(name))
            for name in archive.namelist()
            if name.startswith("plans/")
        }
        return Bundle(manifest, archive.read("program.txt").decode(), constants, plans)


@contextmanager
def reading(fault: str) -> Generator[None]:
    """Whatever is raised inside is a fault of the file: parsers expect what was once written.

    Raises:
        DataError: ``fault``, and what was raised.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"load: {fault}: {error or type(error).__name__}") from error


def _require_known(manifest: dict[str, Any]) -> None:
    if manifest.get("format") != FORMAT:
        raise DataError(f"load: the format is {manifest.get('format')!r}, expected {FORMAT!r}")
    version = manifest.get("version")
    if not isinstance(version, int) or not 1 <= version <= VERSION:
        raise DataError(
            f"load: the file has version {version}, this vkjit reads up to {VERSION}; "
            "update vkjit, or export again with this one"
        )


def _npy(value: HostArray) -> bytes:
    """Types that NumPy has no name for are written as the words that hold them, blocks as bytes."""
    stream = io.BytesIO()
    if block_of(value.dtype) is not None:
        blocks = np.ascontiguousarray(value)
        value = blocks.view(np.uint8).reshape((*blocks.shape, blocks.dtype.itemsize))
    plain = value.dtype.kind != "V" and value.dtype.name not in dir(ml_dtypes)
    words = value if plain else value.view(_WORDS[value.dtype.itemsize])
    np.save(stream, words, allow_pickle=False)
    return stream.getvalue()


def _array(data: bytes, dtype: DType) -> HostArray:
    found = np.load(io.BytesIO(data), allow_pickle=False)
    if block_of(dtype) is not None:
        return found.view(dtype)[..., 0]
    return found if found.dtype == dtype else found.view(dtype)
