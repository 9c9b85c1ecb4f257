"""Sizes that keep the tree readable: files, functions, docstrings, absent imports."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

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
TESTS = sorted((ROOT / "tests").rglob("*.py"))
FORBIDDEN = {"torch", "jax", "jaxlib", "tensorflow", "cupy", "triton", "pickle"}
# The peers of a benchmark run in an environment of their own and exist to import these.
PEERS = ROOT / "benchmarks" / "peers"


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


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


@pytest.mark.parametrize("path", PRODUCT + TESTS, ids=name_of)
def test_a_file_fits_its_budget(path: Path) -> None:
    if name_of(path) in GENERATED:
        pytest.skip("generated")
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= FILE_LINES, f"{name_of(path)}: {lines} lines; split it by purpose"


@pytest.mark.parametrize("path", PRODUCT + TESTS, ids=name_of)
def test_functions_fit_their_budget(path: Path) -> None:
    source = path.read_text(encoding="utf-8").splitlines()
    over = [
        f"{name_of(path)}:{node.lineno} {node.name}: {lines_without_docstring(node)} lines"
        for node in functions_of(path)
        if lines_without_docstring(node) > FUNCTION_LINES
        and not EXCUSE.search(source[node.lineno - 1])
    ]
    assert not over, over


@pytest.mark.parametrize("path", PRODUCT + TESTS, ids=name_of)
def test_a_module_says_what_it_is(path: Path) -> None:
    tree = tree_of(path)
    if tree.body:
        assert ast.get_docstring(tree), f"{name_of(path)} has no module docstring"


@pytest.mark.parametrize("path", PRODUCT + TESTS, ids=name_of)
def test_annotations_are_lazy(path: Path) -> None:
    tree = tree_of(path)
    if any(not isinstance(node, ast.Expr) for node in tree.body):
        names = [
            alias.name
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and node.module == "__future__"
            for alias in node.names
        ]
        assert "annotations" in names, f"{name_of(path)}: from __future__ import annotations"


@pytest.mark.parametrize("path", PRODUCT + TESTS, ids=name_of)
def test_no_forbidden_import(path: Path) -> None:
    if PEERS in path.parents:
        pytest.skip("a peer's own program")
    found = FORBIDDEN & set(imported_packages(path))
    assert not found, f"{name_of(path)} imports {sorted(found)}"


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_no_note_to_self(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = re.findall(r"\b(?:TODO|FIXME|XXX|HACK)\b", text)
    assert not found, f"{name_of(path)}: {found}; finish it or file an issue"
