"""Conversations about a source tree, with answers read off the source itself.

Seven kinds of question per file. About a function: its ``explanation``, a ``review``, its ``usage``
(how it is called), its ``errors`` (what it raises and when) and its ``implementation`` (the code
for a signature and a docstring); about a module: its ``architecture`` and a ``summary``. Every
answer follows from what the question shows (signature, calls, complexity, conditions, imports,
classes), from the docstring that was taken out of it, or is the code itself: there is something to
learn and nothing made up. The same tree and options give the same data set, byte for byte.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, final, get_args

from vkjit.errors import DataError

from .conversation import Conversation
from .source_answers import (
    architecture,
    errors,
    explanation,
    header,
    outline,
    review,
    sentence,
    usage,
)
from .source_facts import FunctionSource, ModuleFacts, analyse, describe

Category: TypeAlias = Literal[
    "explanation", "review", "architecture", "summary", "usage", "errors", "implementation"
]
"""A kind of question."""

CATEGORIES: tuple[Category, ...] = get_args(Category)

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
    "usage": (
        "How do I call `{name}` from `{module}`?",
        "What arguments does `{name}` in `{module}` take?",
        "Show how `{name}` (module `{module}`) is called.",
    ),
    "errors": (
        "Which exceptions does `{name}` from `{module}` raise, and when?",
        "What can go wrong when I call `{name}` in `{module}`?",
        "When does `{name}` (module `{module}`) raise an error?",
    ),
    "implementation": (
        "Write `{name}` of `{module}`: {doc}",
        "Implement `{name}` for the module `{module}`. {doc}",
        "Fill in the body of `{name}` in `{module}`. {doc}",
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
        categories: kinds of question to ask; leaving one out changes nothing about the others.
    """

    seed: int = 0
    files: int | None = None
    functions_per_file: int = 2
    code_characters: int = 800
    answer_characters: int = 400
    categories: tuple[Category, ...] = CATEGORIES


def standard_library() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def build_conversations(
    root: Path | None = None,
    options: SourceOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Conversation]:
    """Build the data set of a source tree, sorted by file.

    Args:
        root: folder to walk, the standard library by default; tests, caches and installed packages
            inside it are left out, and so are files that do not parse.
        options: sizes and the seed.
        progress: called with the files done and their number, before each file and at the end.

    Raises:
        DataError: no folder, or nothing in it to ask about.
    """
    root = standard_library() if root is None else root
    options = SourceOptions() if options is None else options
    paths = _python_files(root)
    if options.files is not None and options.files < len(paths):
        paths = sorted(random.Random(f"{options.seed}:files").sample(paths, options.files))
    conversations: list[Conversation] = []
    for count, path in enumerate(paths):
        if progress is not None:
            progress(count, len(paths))
        found = _of_file(path, root, options)
        conversations += [one for one in found if one.category in options.categories]
    if progress is not None:
        progress(len(paths), len(paths))
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
    yield from _more_about_functions(facts, source, options)
    parts_shown = outline(facts, options.code_characters)
    if len(facts.classes) + len(facts.top_level) >= 2:
        yield _conversation(
            f"{source}#architecture",
            _ask(rng, "architecture", facts.name, code=parts_shown),
            architecture(facts),
        )
    if 20 <= len(facts.doc) <= options.answer_characters and parts_shown:
        yield _conversation(
            f"{source}#summary",
            _ask(rng, "summary", facts.name, code=parts_shown),
            sentence(facts.doc),
        )


def _about_functions(
    facts: ModuleFacts, source: str, options: SourceOptions, rng: random.Random
) -> Iterator[Conversation]:
    shown = _shown(facts, options)
    documented = _documented(shown, options)
    for category, candidates, answer in (
        ("explanation", documented, explanation),
        ("review", shown, review),
    ):
        for one in _sample(candidates, options, rng):
            question = _ask(rng, category, facts.name, name=one.qualname, code=one.code)
            yield _conversation(f"{source}#{category}:{one.qualname}", question, answer(one))


def _more_about_functions(
    facts: ModuleFacts, source: str, options: SourceOptions
) -> Iterator[Conversation]:
    """Categories that draw from streams of their own, so that one does not move another."""
    shown = _shown(facts, options)
    facts_of = [(one, describe(one)) for one in shown]
    for category, candidates in (
        ("usage", [one for one, found in facts_of if found.parameters]),
        ("errors", [one for one, found in facts_of if found.raises]),
        ("implementation", _documented(shown, options)),
    ):
        rng = random.Random(f"{options.seed}:{source}:{category}")
        for one in _sample(candidates, options, rng):
            match category:
                case "usage":
                    code, doc, answer = one.code, "", usage(one)
                case "errors":
                    code, doc, answer = one.code, "", errors(one)
                case _:
                    code, doc = f"{header(one)}\n    ...", sentence(one.doc)
                    answer = f"```python\n{one.code}\n```"
            question = _ask(rng, category, facts.name, name=one.qualname, code=code, doc=doc)
            yield _conversation(f"{source}#{category}:{one.qualname}", question, answer)


def _shown(facts: ModuleFacts, options: SourceOptions) -> list[FunctionSource]:
    return [
        one
        for one in facts.functions
        if one.lines >= 3 and len(one.code) <= options.code_characters
    ]


def _documented(shown: Sequence[FunctionSource], options: SourceOptions) -> list[FunctionSource]:
    return [one for one in shown if 20 <= len(one.doc) <= options.answer_characters]


def _sample(
    candidates: Sequence[FunctionSource], options: SourceOptions, rng: random.Random
) -> list[FunctionSource]:
    count = min(options.functions_per_file, len(candidates))
    return sorted(rng.sample(candidates, count), key=_qualname)


def _conversation(identity: str, question: str, answer: str) -> Conversation:
    category = identity.partition("#")[2].partition(":")[0]
    messages = ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    return Conversation(identity, category, messages)


def _ask(  # noqa: PLR0913  the parts of a question
    rng: random.Random, category: str, module: str, *, name: str = "", doc: str = "", code: str
) -> str:
    question = rng.choice(_QUESTIONS[category]).format(name=name, module=module, doc=doc)
    return f"{question}\n\n```python\n{code}\n```"


def _qualname(one: FunctionSource) -> str:
    return one.qualname
