"""Sizes that keep the tree readable: files, functions, docstrings, absent imports."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE_LINES = 500
FUNCTION_LINES = 60
# Generated from the Khronos grammar; not written, hence not read, by hand.
GENERATED = {"src/vkjit/lowering/spirv/grammar.py"}
# A longer function states why, in a comment on its `def` line: `# over budget: reason`.
EXCUSE = re.compile(r"#\s*over budget: \S+")

PRODUCT = [
    path
    for folder in ("src/vkjit", "models", "benchmarks", "scripts")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
ALL = PRODUCT + sorted((ROOT / "tests").rglob("*.py"))
# Programs under tests/data that made reference numbers with a peer; run by hand, never by a test.
MAKERS = ROOT / "tests" / "data"
FORBIDDEN = {"torch", "jax", "jaxlib", "tensorflow", "cupy", "triton", "pickle"}
NOTE = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path), filename=str(path))


def has_code(path: Path) -> bool:
    return any(not isinstance(node, ast.Expr) for node in tree_of(path).body)


def is_lazy(path: Path) -> bool:
    return any(
        isinstance(node, ast.ImportFrom)
        and node.module == "__future__"
        and "annotations" in {alias.name for alias in node.names}
        for node in tree_of(path).body
    )


def functions_of(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def lines_without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, minus those of the docstring."""
    total = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node) is None:
        return total
    docstring = node.body[0]
    return total - ((docstring.end_lineno or docstring.lineno) - docstring.lineno + 1)


def imported_packages(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module.split(".")[0]


def test_files_fit_their_budget() -> None:
    lines = {name_of(path): text_of(path).count("\n") for path in ALL}
    over = {name: n for name, n in lines.items() if n > FILE_LINES and name not in GENERATED}
    assert not over, f"more than {FILE_LINES} lines; split by purpose: {over}"


def test_functions_fit_their_budget() -> None:
    over = [
        f"{name_of(path)}:{node.lineno} {node.name}: {lines_without_docstring(node)} lines"
        for path in ALL
        for node in functions_of(path)
        if lines_without_docstring(node) > FUNCTION_LINES
        and not EXCUSE.search(text_of(path).splitlines()[node.lineno - 1])
    ]
    assert not over, f"more than {FUNCTION_LINES} lines: {over}"


def test_modules_say_what_they_are() -> None:
    silent = [name_of(p) for p in ALL if tree_of(p).body and not ast.get_docstring(tree_of(p))]
    assert not silent, f"no module docstring: {silent}"


def test_annotations_are_lazy() -> None:
    eager = [name_of(path) for path in ALL if has_code(path) and not is_lazy(path)]
    assert not eager, f"no `from __future__ import annotations`: {eager}"


def test_no_forbidden_import() -> None:
    ours = [path for path in ALL if MAKERS not in path.parents]
    found = {name_of(path): FORBIDDEN & set(imported_packages(path)) for path in ours}
    assert not any(found.values()), {name: sorted(names) for name, names in found.items() if names}


def test_no_note_to_self() -> None:
    found = {name_of(path): NOTE.findall(text_of(path)) for path in PRODUCT}
    assert not any(found.values()), {name: notes for name, notes in found.items() if notes}


def test_the_rules_see_the_product() -> None:
    names = {name_of(path) for path in PRODUCT}
    assert {"src/vkjit/errors.py", "benchmarks/harness.py", "scripts/end_of_file.py"} <= names
