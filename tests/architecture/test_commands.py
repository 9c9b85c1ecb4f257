"""The commands that the documents tell a newcomer to type exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ["README.md", "CONTRIBUTING.md"]
PAGES = [
    "docs/architecture.md",
    "docs/debugging.md",
    "docs/differences.md",
    "docs/doctor.md",
    "docs/environment.md",
]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z][\w-]*):", MAKEFILE, flags=re.MULTILINE))


def shell_lines(document: str) -> list[str]:
    """Command lines in the fenced `sh` blocks of a document, comments dropped."""
    text = (ROOT / document).read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_exist(document: str) -> None:
    named = [word for line in shell_lines(document) for word in re.findall(r"make (\w+)", line)]
    assert named, f"{document} names no make target"
    assert set(named) <= TARGETS, set(named) - TARGETS


@pytest.mark.parametrize("document", [*DOCUMENTS, *PAGES])
def test_named_files_exist(document: str) -> None:
    path = ROOT / document
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    missing = [link for link in links if not (path.parent / link).exists()]
    assert not missing


def test_named_modules_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    whole = r"vkjit(?:\.[a-z_]+)+"
    named = set(re.findall(rf"\b{whole}\b(?!\.\{{)", text))
    for package, members in re.findall(rf"({whole})\.\{{([\w,]+)\}}", text):
        named |= {f"{package}.{member}" for member in members.split(",")}
    assert len(named) > 10
    unknown = [name for name in named if not is_module(name) and not is_module_member(name)]
    assert not unknown


def test_environment_variables_are_those_that_the_product_reads() -> None:
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(VKJIT_\w+)`", page, flags=re.MULTILINE)
    product = [*(ROOT / "src" / "vkjit").rglob("*.py"), *(ROOT / "models").rglob("*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in product)
    assert set(listed) == set(re.findall(r"\bVKJIT_[A-Z0-9_]+\b", text))


def is_module(name: str) -> bool:
    path = ROOT / "src" / Path(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def is_module_member(name: str) -> bool:
    module, _, member = name.rpartition(".")
    path = (ROOT / "src" / Path(*module.split("."))).with_suffix(".py")
    return path.is_file() and f"def {member}(" in path.read_text(encoding="utf-8")


def test_finetune_trains_a_config_that_exists() -> None:
    match = re.search(r"^CONFIG \?= (\S+)$", MAKEFILE, flags=re.MULTILINE)
    assert match
    assert (ROOT / match[1]).is_file()


def test_ci_runs_exactly_make_test() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    commands = [line for line in script.splitlines() if "make" in line and line[0] != "#"]
    assert commands == ["exec make test </dev/null 2>&1"]


def test_the_console_script_is_the_models_command_line() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["project"]["scripts"] == {"vkjit": "vkjit_models.cli:app"}
