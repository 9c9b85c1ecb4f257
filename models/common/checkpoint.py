"""Checkpoints that survive anything: one file a step, complete or absent, verified when read.

A checkpoint is one safetensors file holding every array (adapter, optimizer moments, random keys)
and, in its header, a JSON state (step, place in the data, ...), the configuration it belongs to and
a SHA-256 over all of it. It is written aside and renamed (:mod:`.atomic`), and older ones are
removed only after that: at each moment at least one complete checkpoint exists, whether the writer
meets a full disk or SIGKILL.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import ml_dtypes  # noqa: F401  registers bfloat16 and the 8-bit floats with NumPy
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from vkjit.errors import ConfigError, DataError

from .atomic import remove_partial, write_atomic

_NAME = re.compile(r"step-(\d{8,})\.safetensors")
_FORMAT = "vkjit-checkpoint-1"

Arrays = Mapping[str, NDArray[Any]]


@final
@dataclass(frozen=True)
class Checkpoint:
    """What was saved after ``step`` optimizer steps; arrays equal the saved ones bit for bit."""

    path: Path
    step: int
    arrays: dict[str, NDArray[Any]]
    state: dict[str, Any]


@final
class CheckpointStore:
    """The checkpoints of one run in one directory. One process writes at a time."""

    def __init__(self, directory: Path, config: Mapping[str, Any], *, keep: int = 2) -> None:
        """Use ``directory``, made at the first save.

        Args:
            directory: holds ``step-<n>.safetensors`` files.
            config: JSON values that must agree between the run that saved and the run that resumes.
            keep: how many of the newest checkpoints to keep, at least 1.

        Raises:
            ConfigError: ``keep`` below 1.
        """
        if keep < 1:
            raise ConfigError(f"checkpoint: keep = {keep}, expected at least 1")
        self.directory = directory
        self._config: dict[str, Any] = json.loads(json.dumps(config))
        self._keep = keep

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, in order."""
        names = (_NAME.fullmatch(path.name) for path in self.directory.glob("step-*.safetensors"))
        return sorted(int(name.group(1)) for name in names if name is not None)

    def path(self, step: int) -> Path:
        """File of a step's checkpoint."""
        return self.directory / f"step-{step:08d}.safetensors"

    def save(self, step: int, arrays: Arrays, state: Mapping[str, Any]) -> Path:
        """Write the checkpoint of ``step`` and remove what is older than the newest ``keep``.

        Args:
            step: optimizer steps done, 0 or more.
            arrays: any shapes and dtypes (NumPy's and ``ml_dtypes``').
            state: JSON values; floats keep every bit.

        Raises:
            DataError: it could not be written; the checkpoints before it are intact.
        """
        data = _pack(step, arrays, state, self._config)
        path = self.path(step)
        try:
            remove_partial(self.directory)
            write_atomic(path, data)
        except OSError as error:
            kept = self.steps()
            before = f"that of step {kept[-1]} is intact" if kept else "none was written before"
            raise DataError(
                f"checkpoint: cannot write {path} ({len(data)} bytes): {error.strerror}; {before}; "
                f"free some space and resume"
            ) from error
        for old in self.steps()[: -self._keep]:
            self.path(old).unlink(missing_ok=True)
        return path

    def clear(self) -> None:
        """Delete every checkpoint, the newest last: what is left after a kill is the best."""
        for step in self.steps():
            self.path(step).unlink(missing_ok=True)

    def load(self, step: int | None = None) -> Checkpoint | None:
        """Read and verify the checkpoint of ``step``, by default the newest; ``None`` if none.

        Raises:
            DataError: the file is damaged, or ``step`` has no checkpoint.
            ConfigError: it belongs to another configuration; the message names the keys.
        """
        steps = self.steps()
        if step is None:
            return self._read(steps[-1]) if steps else None
        if step not in steps:
            raise DataError(
                f"checkpoint: none for step {step} in {self.directory}, expected one of {steps}"
            )
        return self._read(step)

    def _read(self, step: int) -> Checkpoint:
        path = self.path(step)
        try:
            with safe_open(path, framework="numpy") as file:
                header = file.metadata() or {}
            raw = load(path.read_bytes())
        except (OSError, SafetensorError) as error:
            raise self._damaged(path, step, str(error)) from error
        if header.get("format") != _FORMAT:
            raise self._damaged(path, step, f"format {header.get('format')!r}, not {_FORMAT}")
        found = _digest(raw, header.get("meta", ""))
        if found != header.get("sha256"):
            raise self._damaged(path, step, f"SHA-256 {found}, not {header.get('sha256')}")
        meta = json.loads(header["meta"])
        _check_config(meta["config"], self._config, path)
        arrays = {
            name: array.view(np.dtype(meta["dtypes"][name])) if name in meta["dtypes"] else array
            for name, array in raw.items()
        }
        return Checkpoint(path, meta["step"], arrays, meta["state"])

    def _damaged(self, path: Path, step: int, reason: str) -> DataError:
        older = [other for other in self.steps() if other < step]
        advice = f"delete it to resume from step {older[-1]}" if older else "start the run anew"
        return DataError(f"checkpoint: {path} is damaged ({reason}), expected it whole; {advice}")


def differing_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Dotted keys whose values differ, as ``key: old there, new here``."""
    before, after = _flatten(old), _flatten(new)
    return [
        f"{key}: {before.get(key, 'nothing')!r} there, {after.get(key, 'nothing')!r} here"
        for key in sorted(before.keys() | after.keys())
        if key not in before or key not in after or before[key] != after[key]
    ]


def _check_config(saved: Mapping[str, Any], current: Mapping[str, Any], path: Path) -> None:
    differences = differing_keys(saved, current)
    if differences:
        raise ConfigError(
            f"checkpoint: {path} was written under another config ({'; '.join(differences)}), "
            f"expected the same; restore the keys or use another output directory"
        )


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _pack(step: int, arrays: Arrays, state: Mapping[str, Any], config: Mapping[str, Any]) -> bytes:
    stored: dict[str, NDArray[Any]] = {}
    foreign: dict[str, str] = {}
    for name in sorted(arrays):
        # order="C" matters: safetensors writes the memory of a transposed view as it lies
        array = np.asarray(arrays[name], order="C")
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        if array.dtype.isbuiltin != 1:  # ml_dtypes: stored as the bits they are
            foreign[name] = array.dtype.name
            array = array.view(f"u{array.dtype.itemsize}")
        stored[name] = array
    meta = json.dumps({"step": step, "state": state, "config": config, "dtypes": foreign})
    header = {"format": _FORMAT, "meta": meta, "sha256": _digest(stored, meta)}
    return save(stored, metadata=header)


def _digest(arrays: Arrays, meta: str) -> str:
    """SHA-256 over the JSON part and over name, dtype, shape and bytes of every array."""
    digest = hashlib.sha256(meta.encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
