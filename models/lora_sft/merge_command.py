"""What ``vkjit merge`` and ``vkjit export`` do and print."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from vkjit.errors import ConfigError, DataError
from vkjit_models.common.adapter_gguf import load_any_adapter, save_gguf_adapter
from vkjit_models.common.adapter_io import load_adapter, save_adapter
from vkjit_models.common.gguf import llama_hyper, open_gguf
from vkjit_models.common.smollm2 import find_smollm2
from vkjit_models.common.tensor_rows import ENCODED_TYPES
from vkjit_models.llama.lora import from_peft, to_peft

from .base import SMOLLM2
from .merge import KEEP, Merged, Stored, merge_adapter
from .merge_check import MergeCheck, check_merge, default_text


def merge(  # noqa: PLR0913  the options of the command
    console: Console,
    base: str,
    adapter: Path,
    out: Path,
    kind: str,
    *,
    text: Path | None = None,
    check: bool = True,
) -> Merged:
    """Merges, prints how well the result is stored, and compares it with the adapter apart.

    Args:
        console: Where the report goes.
        base: A GGUF file, or "smollm2".
        adapter: A folder in PEFT's layout, or a GGUF file.
        out: The new GGUF file.
        kind: Type of the merged tensors, or "keep".
        text: A text to compare on; None: `default_text`.
        check: Whether both models are run over the text.

    Raises:
        ConfigError: ``kind`` is no type.
        DataError: A file cannot be read, or base and adapter do not fit.
    """
    known = [KEEP, *(one.lower() for one in ENCODED_TYPES)]
    if kind.lower() not in known:
        raise ConfigError(
            f"merge: --type {kind} was given, expected one of {', '.join(known)}; choose one"
        )
    words = default_text() if text is None else _read(text)
    file = open_gguf(find_smollm2() if base == SMOLLM2 else Path(base))
    with _writing("merge", out):
        merged = merge_adapter(file, adapter, out, kind.lower())
    console.print(
        f"{out}: {merged.written:,} bytes, {len(merged.tensors)} tensors merged, {merged.copied} "
        "copied",
        markup=False,
        highlight=False,
    )
    console.print(_table(merged.tensors))
    if check:
        with console.status("comparing with the adapter apart"):
            found = check_merge(base, adapter, out, words)
        for line in _lines(found):
            console.print(line, markup=False, highlight=False)
    for warning in merged.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    return merged


def export(
    console: Console, adapter: Path, out: Path, kind: Literal["peft", "gguf"], model: str | None
) -> None:
    """Writes an adapter in another format.

    Args:
        console: Where notes go.
        adapter: A folder in PEFT's layout, or a GGUF file.
        out: A folder for PEFT's layout, a file for GGUF.
        kind: The format.
        model: The base model, for the order of rows; None: the one that the adapter names.

    Raises:
        ConfigError: The adapter names no base model and none is given.
        DataError: A file cannot be read, or the format cannot hold the adapter.
    """
    hyper = llama_hyper(open_gguf(_base_of(adapter, model)))
    config, tensors = load_any_adapter(adapter, hyper)
    arrays = to_peft(from_peft(hyper, tensors))
    notes: tuple[str, ...] = ()
    with _writing("export", out):
        if kind == "peft":
            save_adapter(out, config, arrays)
        else:
            notes = save_gguf_adapter(out, hyper, config, arrays)
    console.print(f"{out}: {len(arrays)} tensors", markup=False, highlight=False)
    for note in notes:
        console.print(f"note: {note}", markup=False, highlight=False)


@contextmanager
def _writing(command: str, out: Path) -> Generator[None]:
    """Says of an operating system's refusal what could not be written."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{command}: cannot write {out}: {error.strerror}, expected a path with room for the "
            "result; choose another"
        ) from error


def _base_of(adapter: Path, model: str | None) -> Path:
    if not adapter.exists():
        raise DataError(
            f"export: {adapter} does not exist, expected a folder in PEFT's layout or a GGUF file; "
            "check the path"
        )
    name = model
    if name is None and adapter.is_dir():
        name = load_adapter(adapter)[0].base_model_name_or_path
    path = None if name is None else find_smollm2() if name == SMOLLM2 else Path(name)
    if path is None or (model is None and not path.is_file()):
        named = "no base model" if name is None else f"{name!r} as its base model, which is no file"
        raise ConfigError(
            f"export: {adapter} names {named}, and no --model was given, "
            "expected a GGUF file: its heads decide the order of rows; pass --model"
        )
    return path


def _table(rows: Iterable[Stored]) -> Table:
    """Errors by type, each the largest of the type's tensors."""
    table = Table(
        "from", "to", "tensors", "error", "error / adapter's change", "change kept",
        title="Merged tensors (the worst of each type)", title_justify="left",
    )  # fmt: skip
    groups: dict[tuple[str, str], list[Stored]] = {}
    for row in rows:
        groups.setdefault((row.source, row.kind), []).append(row)
    for (source, kind), those in groups.items():
        table.add_row(
            source.lower(),
            kind.lower(),
            str(len(those)),
            f"{max(row.relative_error for row in those):.2e}",
            f"{max(row.delta_error for row in those):.2e}",
            f"{min(row.delta_kept for row in those):.4f}",
        )
    return table


def _lines(found: MergeCheck) -> tuple[str, str]:
    change = found.perplexity_merged / found.perplexity_apart - 1.0
    return (
        f"largest change of a logit: {found.logit_change:.3g} (their root mean square is "
        f"{found.logit_size:.3g})",
        f"perplexity on {found.tokens} tokens: {found.perplexity_apart:.4f} with the adapter "
        f"apart, {found.perplexity_merged:.4f} merged ({100.0 * change:+.3f}%)",
    )


def _read(text: Path) -> str:
    try:
        return text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"merge: cannot read {text}: {error}; check the path") from error
