"""Logs of a run: rows by optimizer step, as CSV and as JSON lines, on the disk once written.

A killed process loses nothing that `append` has returned from, and at most tears the last line,
which readers leave out and a resume removes. A resume also cuts the rows after its step: they will
be computed again.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from vkjit.errors import DataError

from .atomic import name_file, write_atomic

Value = float | int | str


@final
class JsonLines:
    """Appends JSON objects with a key ``step`` to a file, one a line.

    JSON has no NaN: it is written as null, infinities as 1e999, which every parser reads as such.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        """Open ``path`` for appending.

        Args:
            path: the file.
            resume_step: ``None`` starts anew and replaces an old file. A number keeps the objects
                up to and including that step and drops later ones.

        Raises:
            DataError: on resume, a line that is not such an object.
        """
        kept: list[dict[str, Any]] = []
        if resume_step is not None and path.exists():
            kept = [row for row in read_json_lines(path) if row["step"] <= resume_step]
        write_atomic(path, "".join(map(_json_line, kept)).encode())
        self._file = path.open("ab", buffering=0)  # nothing is left to write where one fails

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Write rows and wait until the disk has them."""
        _write(self._file, "".join(map(_json_line, rows)))

    def close(self) -> None:
        """Close the file; rows written before are kept."""
        self._file.close()


@final
class StepLog:
    """Appends rows to a CSV and to JSON lines beside it (``steps.csv``, ``steps.jsonl``).

    The first column is ``step``, increasing. Numbers are written so that reading them back gives
    the same bits.
    """

    def __init__(
        self,
        path: Path,
        columns: Sequence[str],
        *,
        resume_step: int | None = None,
        repeats: bool = False,
    ) -> None:
        """Open ``path`` for appending.

        Args:
            path: the CSV file.
            columns: names of the columns; the first must be ``step``.
            resume_step: ``None`` starts anew and replaces an old file. A number keeps the rows up
                to and including that step and drops later ones.
            repeats: whether a step may have several rows.

        Raises:
            DataError: columns without ``step`` first, or on resume a file with other columns.
        """
        self._columns = list(columns)
        if not columns or columns[0] != "step" or len(set(columns)) != len(columns):
            raise DataError(
                f"step log: columns {self._columns}, expected distinct names that begin with 'step'"
            )
        rows: list[list[str]] = []
        if resume_step is not None and path.exists():
            rows = self._kept_rows(path, resume_step)
        self._last = int(rows[-1][0]) if rows else -1
        self._least = 0 if repeats else 1  # what a row's step exceeds the one before it by
        write_atomic(path, _lines([self._columns, *rows]).encode())
        self._file = path.open("ab", buffering=0)  # nothing is left to write where one fails
        self._json = JsonLines(path.with_suffix(".jsonl"), resume_step=resume_step)

    @property
    def last(self) -> int:
        """Step of the last row; -1 without rows."""
        return self._last

    def append(self, *rows: Mapping[str, Value]) -> None:
        """Write rows to both files and wait until the disk has them.

        Raises:
            DataError: keys other than the columns, or a step that does not increase.
        """
        for row in rows:
            if row.keys() != set(self._columns):
                raise DataError(
                    f"step log: row with keys {sorted(row)}, expected {sorted(self._columns)}"
                )
            step = int(row["step"])
            if step < self._last + self._least:
                raise DataError(f"step log: step {step} after {self._last}, expected a later one")
            self._last = step
        texts = [[_format(row[name]) for name in self._columns] for row in rows]
        _write(self._file, _lines(texts))
        self._json.append(*({name: row[name] for name in self._columns} for row in rows))

    def close(self) -> None:
        """Close both files; rows written before are kept."""
        self._file.close()
        self._json.close()

    def __enter__(self) -> Self:
        """Return the log; leaving the block closes it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close both files."""
        self.close()

    def _kept_rows(self, path: Path, resume_step: int) -> list[list[str]]:
        header, rows = _read(path)
        if header != self._columns:
            raise DataError(
                f"step log: {path} has the columns {header}, expected {self._columns}; move it away"
            )
        return [row for row in rows if int(row[0]) <= resume_step]


def read_steplog(path: Path) -> dict[str, list[float | str]]:
    """Columns of a CSV step log by name; numbers as float, anything else as text.

    Raises:
        DataError: no such file, or no header.
    """
    header, rows = _read(path)
    return {name: [_parse(row[i]) for row in rows] for i, name in enumerate(header)}


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSON-lines log; a last line that a killed process tore is left out.

    Raises:
        DataError: no such file, or a line that is no object with a whole ``step``.
    """
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(_whole_lines(path).splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"step log: {path}:{number} is no JSON; move the file away") from error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise DataError(
                f"step log: {path}:{number} is no object with a step; move the file away"
            )
        rows.append(row)
    return rows


def json_text(value: Any, *, indent: int | None = None) -> str:
    """``value`` as JSON that every parser reads: NaN as null, infinities as 1e999."""
    text = json.dumps(_finite(value), ensure_ascii=False, indent=indent)
    return re.sub(rf'"(-?){_INFINITE}"', r"\g<1>1e999", text)


_INFINITE = "infinite:7c1f9e5a"  # stands for infinity until the text is made


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("-" if value < 0 else "") + _INFINITE
    if isinstance(value, Mapping):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value


def _json_line(row: Mapping[str, Any]) -> str:
    return json_text(row) + "\n"


def _write(file: io.FileIO, text: str) -> None:
    """Writes and flushes to the disk: a power cut loses nothing of it either."""
    rest = memoryview(text.encode())
    try:
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    except OSError as error:
        name_file(error, Path(os.fsdecode(file.name)))
        raise


def _whole_lines(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"step log: cannot read {path}: {error.strerror}") from error
    return text[: text.rfind("\n") + 1]


def _read(path: Path) -> tuple[list[str], list[list[str]]]:
    """Header and complete rows; a last line that a killed process tore is left out."""
    lines = list(csv.reader(io.StringIO(_whole_lines(path), newline="")))
    if not lines:
        raise DataError(f"step log: {path} has no header, expected a line of column names")
    header, rows = lines[0], lines[1:]
    for number, row in enumerate(rows, 2):
        if len(row) != len(header) or not row[0].isdecimal():
            raise DataError(
                f"step log: {path}:{number} has {len(row)} fields, expected {len(header)} with a "
                f"step first; move the file away"
            )
    return header, rows


def _lines(rows: Iterable[Sequence[str]]) -> str:
    buffer = io.StringIO(newline="")
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()


def _format(value: Value) -> str:
    return repr(float(value)) if isinstance(value, float) else str(value)


def _parse(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
