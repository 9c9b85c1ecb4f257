"""Answers about source code, put together from the facts that can be read off it."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from .source_facts import FunctionSource, ModuleFacts, describe


def explanation(one: FunctionSource) -> str:
    """What a function does: its docstring, parameters, calls and exceptions."""
    facts = describe(one)
    takes = f"takes {_listing(facts.parameters)}" if facts.parameters else "takes no arguments"
    defaults = f" ({_listing(facts.defaults)} by default)" if facts.defaults else ""
    parts = [sentence(one.doc), f"It {takes}{defaults} and {facts.result}."]
    if facts.calls:
        parts.append(f"It calls {_listing(facts.calls, 4)}.")
    if facts.raises:
        parts.append(f"It raises {_listing(facts.raises, 3)}.")
    return " ".join(parts)


def review(one: FunctionSource) -> str:
    """A verdict on how readable a function is, with the remarks of its facts."""
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


def usage(one: FunctionSource) -> str:
    """How a function is called: its header, what is needed, what may be left out."""
    facts = describe(one)
    optional = [text.partition("=")[0] for text in facts.defaults]
    needed = [name for name in facts.parameters if name[0] != "*" and name not in optional]
    parts = [f"Call it as `{one.node.name}({', '.join(_arguments(one))})`."]
    if needed:
        parts.append(f"{_listing(needed)} {'is' if len(needed) == 1 else 'are'} required.")
    if optional:
        parts.append(f"{_listing(optional)} may be left out ({_listing(facts.defaults)}).")
    return " ".join([*parts, f"It {facts.result}."])


def errors(one: FunctionSource) -> str:
    """Which exceptions a function raises and under which conditions."""
    facts = describe(one)
    parts = [
        f"It raises `{name}` when `{guard}`." if guard else f"It can raise `{name}`."
        for name, guard in zip(facts.raises, facts.guards, strict=True)
    ]
    return " ".join(parts)


def header(one: FunctionSource) -> str:
    """The ``def`` line of a function on one line, without decorators."""
    node = one.node
    prefix = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    result = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return f"{prefix} {node.name}({ast.unparse(node.args)}){result}:"


def _arguments(one: FunctionSource) -> list[str]:
    """Parameters as a call names them, ``self`` and ``cls`` left out."""
    facts = describe(one)
    values = dict(text.split("=", 1) for text in facts.defaults)
    return [f"{name}={values[name]}" if name in values else name for name in facts.parameters]


def architecture(facts: ModuleFacts) -> str:
    """The parts of a module and what it depends on."""
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


def outline(facts: ModuleFacts, limit: int) -> str:
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


def sentence(text: str) -> str:
    """``text`` with a full stop, where it lacks an end."""
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
