"""The step log: one CSV row per optimizer step, on disk as soon as it is written."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, final

from vkjit.errors import DataError

from .atomic import write_atomic

Value = float | int | str


@final
class StepLog:
    """Appends rows to a CSV; a resumed run continues the file of the run before it.

    The first column is ``step``, strictly increasing. Numbers are written so that reading them back
    gives the same bits; rows reach the operating system one by one, so a killed process loses none
    and at most tears the last, which a resume drops.
    """

    def __init__(
        self, path: Path, columns: Sequence[str], *, resume_step: int | None = None
    ) -> None:
        """Open ``path`` for appending.

        Args:
            path: the CSV file.
            columns: names of the columns; the first must be ``step``.
            resume_step: ``None`` starts anew and replaces an old file. A number keeps the rows up
                to and including that step and drops later ones: they will be computed again.

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
        self._path = path
        self._last = int(rows[-1][0]) if rows else -1
        write_atomic(path, _lines([self._columns, *rows]).encode())
        self._file = path.open("a", encoding="utf-8", newline="")

    def append(self, row: Mapping[str, Value]) -> None:
        """Write one row.

        Raises:
            DataError: keys other than the columns, or a step that does not increase.
        """
        if row.keys() != set(self._columns):
            raise DataError(
                f"step log: row with keys {sorted(row)}, expected {sorted(self._columns)}"
            )
        step = int(row["step"])
        if step <= self._last:
            raise DataError(f"step log: step {step} after {self._last}, expected a later one")
        self._file.write(_lines([[_format(row[name]) for name in self._columns]]))
        self._file.flush()
        self._last = step

    def close(self) -> None:
        """Close the file; rows written before are kept."""
        self._file.close()

    def __enter__(self) -> Self:
        """Return the log; leaving the block closes it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        self.close()

    def _kept_rows(self, path: Path, resume_step: int) -> list[list[str]]:
        header, rows = _read(path)
        if header != self._columns:
            raise DataError(
                f"step log: {path} has the columns {header}, expected {self._columns}; move it away"
            )
        return [row for row in rows if int(row[0]) <= resume_step]


def read_steplog(path: Path) -> dict[str, list[float | str]]:
    """Columns of a step log by name; numbers as float, anything else as text.

    Raises:
        DataError: no such file, or no header.
    """
    header, rows = _read(path)
    return {name: [_parse(row[i]) for row in rows] for i, name in enumerate(header)}


def _read(path: Path) -> tuple[list[str], list[list[str]]]:
    """Header and complete rows; a last line that a killed process tore is left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"step log: cannot read {path}: {error.strerror}") from error
    whole = text[: text.rfind("\n") + 1]
    lines = list(csv.reader(io.StringIO(whole, newline="")))
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


def _lines(rows: Sequence[Sequence[str]]) -> str:
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
