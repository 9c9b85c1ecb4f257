"""Conversations about a source tree, with answers read off the source itself.

Four kinds of question per file: ``explanation`` and ``review`` of a function, ``architecture`` and
``summary`` of a module. Every answer follows from what the question shows (signature, calls,
complexity, imports, classes) or from the docstring that was taken out of it, so there is something
to learn and nothing made up. The same tree and options give the same data set, byte for byte.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from vkjit.errors import DataError

from .conversation import Conversation
from .source_facts import FunctionSource, ModuleFacts, analyse, describe

CATEGORIES: tuple[str, ...] = ("explanation", "review", "architecture", "summary")

_SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "_bundled",
        "dist-packages",
        "encodings",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)  # fmt: skip  tests, tables and what does not belong to the tree itself

_QUESTIONS = {
    "explanation": (
        "Explain what `{name}` from `{module}` does.",
        "What does this function, `{name}` in `{module}`, do?",
        "Describe the purpose of `{name}` (module `{module}`).",
    ),
    "review": (
        "Review `{name}` from `{module}`.",
        "Give a short code review of `{name}` in `{module}`.",
        "How readable is `{name}` in `{module}`, and what would you change?",
    ),
    "architecture": (
        "How is the module `{module}` organised?",
        "Describe the architecture of `{module}`.",
        "What are the parts of `{module}` and what does it depend on?",
    ),
    "summary": (
        "Summarise the module `{module}` in a sentence or two.",
        "What is `{module}` for?",
        "Give a one-paragraph summary of `{module}`.",
    ),
}


@final
@dataclass(frozen=True)
class SourceOptions:
    """What to build from a tree.

    Args:
        seed: chooses files, functions and wordings.
        files: how many files to use; ``None`` for all.
        functions_per_file: explanations and reviews per file, at most, of each.
        code_characters: longest code or outline shown in a question.
        answer_characters: longest docstring quoted in an answer.
    """

    seed: int = 0
    files: int | None = None
    functions_per_file: int = 2
    code_characters: int = 800
    answer_characters: int = 400


def standard_library() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def build_conversations(
    root: Path | None = None, options: SourceOptions | None = None
) -> list[Conversation]:
    """Build the data set of a source tree, sorted by file.

    Args:
        root: folder to walk, the standard library by default; tests, caches and installed packages
            inside it are left out, and so are files that do not parse.
        options: sizes and the seed.

    Raises:
        DataError: no folder, or nothing in it to ask about.
    """
    root = standard_library() if root is None else root
    options = SourceOptions() if options is None else options
    paths = _python_files(root)
    if options.files is not None and options.files < len(paths):
        paths = sorted(random.Random(f"{options.seed}:files").sample(paths, options.files))
    conversations = [one for path in paths for one in _of_file(path, root, options)]
    if not conversations:
        raise DataError(
            f"source data set: {len(paths)} usable Python files in {root} give no conversation, "
            f"expected modules with functions or docstrings; name another folder"
        )
    return conversations


def _python_files(root: Path) -> list[Path]:
    if not root.is_dir():
        raise DataError(f"source data set: {root} is not a folder, expected a source tree")
    return sorted(
        path
        for path in root.rglob("*.py")
        if not any(
            part in _SKIPPED_FOLDERS or part.startswith(".")
            for part in path.relative_to(root).parts[:-1]
        )
    )


def _of_file(path: Path, root: Path, options: SourceOptions) -> Iterator[Conversation]:
    relative = path.relative_to(root)
    parts = relative.with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
    try:
        facts = analyse(path.read_text(encoding="utf-8"), name)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return  # not readable as Python of this version: nothing can be said about it
    source = relative.as_posix()
    rng = random.Random(f"{options.seed}:{source}")
    yield from _about_functions(facts, source, options, rng)
    outline = _outline(facts, options.code_characters)
    if len(facts.classes) + len(facts.top_level) >= 2:
        yield _conversation(
            f"{source}#architecture",
            _ask(rng, "architecture", facts.name, code=outline),
            _architecture(facts),
        )
    if 20 <= len(facts.doc) <= options.answer_characters and outline:
        yield _conversation(
            f"{source}#summary",
            _ask(rng, "summary", facts.name, code=outline),
            _sentence(facts.doc),
        )


def _about_functions(
    facts: ModuleFacts, source: str, options: SourceOptions, rng: random.Random
) -> Iterator[Conversation]:
    shown = [
        one
        for one in facts.functions
        if one.lines >= 3 and len(one.code) <= options.code_characters
    ]
    documented = [one for one in shown if 20 <= len(one.doc) <= options.answer_characters]
    for category, candidates, answer in (
        ("explanation", documented, _explanation),
        ("review", shown, _review),
    ):
        count = min(options.functions_per_file, len(candidates))
        for one in sorted(rng.sample(candidates, count), key=_qualname):
            question = _ask(rng, category, facts.name, name=one.qualname, code=one.code)
            yield _conversation(f"{source}#{category}:{one.qualname}", question, answer(one))


def _conversation(identity: str, question: str, answer: str) -> Conversation:
    category = identity.partition("#")[2].partition(":")[0]
    messages = ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    return Conversation(identity, category, messages)


def _ask(rng: random.Random, category: str, module: str, *, name: str = "", code: str) -> str:
    question = rng.choice(_QUESTIONS[category]).format(name=name, module=module)
    return f"{question}\n\n```python\n{code}\n```"


def _explanation(one: FunctionSource) -> str:
    facts = describe(one)
    takes = f"takes {_listing(facts.parameters)}" if facts.parameters else "takes no arguments"
    defaults = f" ({_listing(facts.defaults)} by default)" if facts.defaults else ""
    parts = [_sentence(one.doc), f"It {takes}{defaults} and {facts.result}."]
    if facts.calls:
        parts.append(f"It calls {_listing(facts.calls, 4)}.")
    if facts.raises:
        parts.append(f"It raises {_listing(facts.raises, 3)}.")
    return " ".join(parts)


def _review(one: FunctionSource) -> str:
    facts = describe(one)
    if facts.complexity > 10 or facts.depth > 3:
        verdict = "It is hard to follow."
    elif facts.complexity > 5 or facts.depth > 2:
        verdict = "It needs a careful reader."
    else:
        verdict = "It is easy to follow."
    remarks = f"Remarks: {'; '.join(facts.findings)}." if facts.findings else "Nothing to remark."
    return (
        f"`{one.qualname}`: {_count(one.lines, 'line')}, complexity {facts.complexity}, nesting "
        f"depth {facts.depth}. {verdict} {remarks}"
    )


def _architecture(facts: ModuleFacts) -> str:
    parts = [
        f"It imports {_listing(facts.imports, 6)}." if facts.imports else "It imports nothing."
    ]
    if facts.classes:
        names = [f"`{one.name}` ({_count(len(one.methods), 'method')})" for one in facts.classes]
        count = _count(len(names), "class", "classes")
        parts.append(f"It defines {count}: {_join(names, 5)}.")
    if facts.top_level:
        names = [name for name, _ in facts.top_level]
        parts.append(f"It has {_count(len(names), 'function')}: {_listing(names, 6)}.")
    sizes = [(one.lines, one.name) for one in facts.classes]
    sizes += [(lines, name) for name, lines in facts.top_level]
    lines, name = max(sizes)
    parts.append(f"The largest part is `{name}` with {_count(lines, 'line')}.")
    return " ".join(parts)


def _outline(facts: ModuleFacts, limit: int) -> str:
    """Imports, classes with their methods, functions: what fits into ``limit`` characters."""
    lines = [f"import {', '.join(facts.imports)}"] if facts.imports else []
    for one in facts.classes:
        bases = f"({', '.join(one.bases)})" if one.bases else ""
        lines.append(
            f"class {one.name}{bases}: ...  # {one.lines} lines, {len(one.methods)} methods"
        )
    lines += [f"def {name}(...): ...  # {length} lines" for name, length in facts.top_level]
    kept: list[str] = []
    size = 0
    for line in lines:
        size += len(line) + 1
        if size > limit:
            kept.append("...")
            break
        kept.append(line)
    return "\n".join(kept)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?", ":", ")")) else text + "."


def _listing(names: Sequence[str], limit: int = 12) -> str:
    return _join([f"`{name}`" for name in names], limit)


def _join(items: Sequence[str], limit: int) -> str:
    """``a, b and c``, or ``a, b and 4 more`` when there are more than ``limit``."""
    shown = list(items[:limit])
    shown.append(f"{len(items) - limit} more" if len(items) > limit else shown.pop())
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _qualname(one: FunctionSource) -> str:
    return one.qualname
