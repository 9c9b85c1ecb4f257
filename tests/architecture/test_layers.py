"""The layer contracts cover every module, and nothing looks up at the public package."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src" / "vkjit").rglob("*.py"))
MODELS = sorted((ROOT / "models").rglob("*.py"))
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTRACTS = {c["id"]: c for c in SETTINGS["tool"]["importlinter"]["contracts"]}
LAYERS = [set(re.findall(r"[\w.]+", line)) for line in CONTRACTS["layers"]["layers"]]
# What models/ may name: the public package and its public modules.
PUBLIC = {
    "vkjit",
    "vkjit.debug",
    "vkjit.errors",
    "vkjit.lax",
    "vkjit.nn",
    "vkjit.numpy",
    "vkjit.optim",
    "vkjit.random",
    "vkjit.tree",
}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT / "src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    """Absolute module names that a file imports, `from a import b` as both a and a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def is_package_file_without_code(path: Path) -> bool:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return path.name == "__init__.py" and all(isinstance(node, ast.Expr) for node in body)


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_every_module_is_in_a_layer(path: Path) -> None:
    module = module_of(path)
    if module == "vkjit" or is_package_file_without_code(path):
        return
    prefixes = {".".join(module.split(".")[: n + 1]) for n in range(module.count(".") + 1)}
    homes = [layer for layer in LAYERS if layer & prefixes]
    assert len(homes) == 1, f"{module}: add it to the layers in pyproject.toml"


def test_the_vocabulary_can_be_imported_without_the_compiler() -> None:
    init = ROOT / "src" / "vkjit" / "lowering" / "__init__.py"
    assert is_package_file_without_code(init)


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_nothing_inside_imports_the_public_package(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert "vkjit" not in {alias.name for alias in node.names}, f"line {node.lineno}"
        if isinstance(node, ast.ImportFrom) and node.module == "vkjit" and node.level == 0:
            modules = {p.stem for p in SOURCES if p.parent.name == "vkjit"}
            packages = {p.parent.name for p in SOURCES if p.name == "__init__.py"}
            names = {alias.name for alias in node.names}
            assert names <= modules | packages, f"line {node.lineno}: {names}"


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_passes_name_only_the_structural_ops(path: Path) -> None:
    if not module_of(path).startswith("vkjit.passes"):
        return
    ops = {name for name in imports_of(path) if re.match(r"vkjit\.ops\.\w+", name)}
    others = {name for name in ops if not name.startswith("vkjit.ops.structural")}
    assert not others, f"{module_of(path)}: {sorted(others)}"


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_models_import_only_public_modules(path: Path) -> None:
    allowed = {name.removeprefix("vkjit.") for name in PUBLIC}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            ours = {a.name for a in node.names if re.match(r"vkjit(\.|$)", a.name)}
            assert ours <= PUBLIC, f"line {node.lineno}: {sorted(ours - PUBLIC)}"
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            if re.match(r"vkjit(\.|$)", node.module):
                assert node.module in PUBLIC, f"line {node.lineno}: {node.module}"
            if node.module == "vkjit":
                modules = {p.stem for p in SOURCES if p.parent.name == "vkjit"}
                private = {a.name for a in node.names} & modules - allowed
                assert not private, f"line {node.lineno}: {sorted(private)}"
