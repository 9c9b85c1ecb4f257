"""The records of a run and which of them are held out, as the config's [data] section says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from vkjit.errors import DataError
from vkjit_models.common.conversation import Record, hash_fraction, split_held_out
from vkjit_models.common.jsonl import read_records
from vkjit_models.common.source_chat import SourceOptions, build_conversations

from .config import DataSection


def gather(section: DataSection, seed: int) -> tuple[list[Record], list[Record]]:
    """Reads or builds the records; returns those to train on and those held out.

    Raises:
        DataError: A file cannot be read or has a bad line; an id occurs in two files; a side of the
            split is empty.
    """
    if section.jsonl is None:
        options = SourceOptions(
            seed, section.files, section.functions_per_file, categories=section.categories
        )
        files: list[list[Record]] = [[*build_conversations(section.source, options)]]
    else:
        files = []
    paths = [*(section.jsonl or ()), *(section.validation or ())]
    files += read_records(paths, section.format, section.ignore_keys)
    held_out: list[Record]
    if section.validation is not None:
        count = len(files) - len(section.validation)
        held_out = [one for file in files[count:] for one in file]
        files = files[:count]
    else:
        everything = [one for file in files for one in file]
        _, held_out = split_held_out(everything, section.held_out, section.split)
        kept_back = {one.id for one in held_out}
        files = [[one for one in file if one.id not in kept_back] for file in files]
    weights = section.weights or (1.0,) * len(files)
    train = [
        one for file, weight in zip(files, weights, strict=True) for one in _weighted(file, weight)
    ]
    if not train:
        raise DataError(
            f"data: the weights {list(weights)} leave no record of "
            f"{', '.join(map(str, section.jsonl or ()))} to train on, expected some; raise them"
        )
    return train, held_out


def origin(section: DataSection) -> str:
    """Where the records come from, for people."""
    if section.jsonl is not None:
        return _names(section.jsonl)
    return str(section.source) if section.source is not None else "the Python standard library"


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths))


def _weighted(records: Sequence[Record], weight: float) -> list[Record]:
    """Each record ``weight`` times; the fraction decides by the hash of the id for one more."""
    whole = math.floor(weight)
    chosen: list[Record] = []
    for one in records:
        chosen += [one] * (whole + (hash_fraction(f"weight {one.id}") < weight - whole))
    return chosen
