"""The layer contracts cover every module, and nothing looks up at the public package."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src" / "vkjit").rglob("*.py"))
MODELS = sorted((ROOT / "models").rglob("*.py"))
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTRACTS = {c["id"]: c for c in SETTINGS["tool"]["importlinter"]["contracts"]}
LAYERS = [set(re.findall(r"[\w.]+", line)) for line in CONTRACTS["layers"]["layers"]]
SUBMODULES = {path.stem for path in SOURCES if path.parent.name == "vkjit"} | {
    path.parent.name for path in SOURCES if path.name == "__init__.py"
}
# What models/ may name: the public package and its public modules.
PUBLIC = {
    "vkjit",
    "vkjit.blocks",
    "vkjit.debug",
    "vkjit.doctor",
    "vkjit.errors",
    "vkjit.export",
    "vkjit.lax",
    "vkjit.nn",
    "vkjit.numpy",
    "vkjit.optim",
    "vkjit.quant",
    "vkjit.random",
    "vkjit.tree",
    "vkjit.tuning",
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


def homes_of(module: str) -> list[set[str]]:
    """The layers that list a module or one of its packages."""
    parts = module.split(".")
    prefixes = {".".join(parts[: n + 1]) for n in range(len(parts))}
    return [layer for layer in LAYERS if layer & prefixes]


def test_every_module_is_in_a_layer() -> None:
    modules = [module_of(path) for path in SOURCES if not is_package_file_without_code(path)]
    homeless = [m for m in modules if m != "vkjit" and len(homes_of(m)) != 1]
    assert not homeless, f"add to the layers in pyproject.toml: {homeless}"


def test_every_listed_layer_exists() -> None:
    modules = {module_of(path) for path in SOURCES} | {"vkjit_models"}
    assert set().union(*LAYERS) <= modules


def test_the_vocabulary_can_be_imported_without_the_compiler() -> None:
    assert is_package_file_without_code(ROOT / "src" / "vkjit" / "lowering" / "__init__.py")


def public_names_used(path: Path) -> set[str]:
    """Names that a file takes from the bare package `vkjit` and that are no modules of it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names} & {"vkjit"}
        elif isinstance(node, ast.ImportFrom) and node.module == "vkjit" and node.level == 0:
            names |= {alias.name for alias in node.names} - SUBMODULES
    return names


def test_nothing_inside_imports_the_public_package() -> None:
    inside = [path for path in SOURCES if module_of(path) != "vkjit"]
    found = {module_of(path): public_names_used(path) for path in inside}
    assert not any(found.values()), {m: names for m, names in found.items() if names}


def test_passes_name_only_the_structural_ops() -> None:
    for path in SOURCES:
        if module_of(path).startswith("vkjit.passes"):
            ops = {n for n in imports_of(path) if re.match(r"vkjit\.ops\.\w+", n)}
            others = {n for n in ops if not n.startswith("vkjit.ops.structural")}
            assert not others, f"{module_of(path)}: {sorted(others)}"


def private_imports(path: Path) -> set[str]:
    """Modules of vkjit that are not public and that a file imports."""
    names = {n for n in imports_of(path) if re.match(r"vkjit(\.|$)", n)}
    return {n for n in names if n not in PUBLIC and is_module(n)}


def is_module(name: str) -> bool:
    return any(module_of(path) == name for path in SOURCES)


def test_models_import_only_public_modules() -> None:
    found = {path.relative_to(ROOT).as_posix(): private_imports(path) for path in MODELS}
    assert not any(found.values()), {m: names for m, names in found.items() if names}
