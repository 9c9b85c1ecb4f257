"""What can be read off a Python file without running it: names, signatures, calls, complexity."""

from __future__ import annotations

import ast
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
_BRANCHES = (
    ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case,
    ast.comprehension,
)  # fmt: skip


@final
@dataclass(frozen=True)
class FunctionSource:
    """One function or method as it stands in its file.

    Args:
        qualname: name with its classes in front.
        doc: first paragraph of the docstring on one line, empty if there is none.
        code: source without the docstring, indented from column 0.
        node: its syntax tree, for :func:`describe`.
    """

    qualname: str
    doc: str
    code: str
    node: ast.FunctionDef | ast.AsyncFunctionDef

    @property
    def lines(self) -> int:
        """Lines of code, the docstring left out."""
        return self.code.count("\n") + 1


@final
@dataclass(frozen=True)
class FunctionFacts:
    """What the body of one function shows.

    Args:
        parameters: names, ``self`` and ``cls`` left out, with ``*`` marks.
        defaults: ``name=value`` texts.
        calls: names called, in order of appearance, each once.
        raises: exceptions raised by name, each once.
        guards: for each of ``raises``, the innermost condition that leads to it where it is first
            raised, as written (``not (...)`` in an else branch); empty without one.
        result: ``"yields values"``, ``"returns a value"`` or ``"returns nothing"``.
        complexity: McCabe's number of independent paths, from 1.
        depth: deepest nesting of blocks, 0 for straight code.
        findings: what a reviewer would remark, as short phrases.
    """

    parameters: tuple[str, ...]
    defaults: tuple[str, ...]
    calls: tuple[str, ...]
    raises: tuple[str, ...]
    guards: tuple[str, ...]
    result: str
    complexity: int
    depth: int
    findings: tuple[str, ...]


@final
@dataclass(frozen=True)
class ClassFacts:
    """One top-level class: its bases as written, and its methods' names."""

    name: str
    bases: tuple[str, ...]
    methods: tuple[str, ...]
    lines: int


@final
@dataclass(frozen=True)
class ModuleFacts:
    """One file: ``functions`` holds methods too, ``top_level`` names and lines of the others."""

    name: str
    doc: str
    imports: tuple[str, ...]
    classes: tuple[ClassFacts, ...]
    top_level: tuple[tuple[str, int], ...]
    functions: tuple[FunctionSource, ...]


def analyse(source: str, name: str) -> ModuleFacts:
    """Read the facts of one module.

    Args:
        source: text of the file.
        name: dotted name to give it.

    Raises:
        SyntaxError: ``source`` is not Python of this interpreter's version.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the file's invalid escapes are its own affair
        tree = ast.parse(source)
    lines = source.splitlines()
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    found: dict[str, FunctionSource] = {}
    for qualname, node in _functions(tree.body, ""):
        doc = _first_paragraph(ast.get_docstring(node))
        found.setdefault(qualname, FunctionSource(qualname, doc, _code(node, lines), node))
    return ModuleFacts(
        name=name,
        doc=_first_paragraph(ast.get_docstring(tree)),
        imports=_unique(_imports(tree)),
        classes=tuple(_class(node) for node in classes),
        top_level=tuple(
            (node.name, _length(node)) for node in tree.body if isinstance(node, _Function)
        ),
        functions=tuple(found.values()),
    )


def describe(function: FunctionSource) -> FunctionFacts:
    """Read the facts of one function from its syntax tree."""
    node = function.node
    parameters, defaults = _signature(node.args)
    items = list(_own_nodes(node))
    depth, complexity = _depth(node), _complexity(items)
    size = (
        (len(parameters) > 5, f"{len(parameters)} parameters are many"),
        (depth > 3, f"nesting of {depth} is deep"),
        (complexity > 10, f"a complexity of {complexity} asks for a split"),
    )
    checks = ((not function.doc, "there is no docstring"), *_habits(node.args, items), *size)
    calls = (_called(item) for item in items if isinstance(item, ast.Call))
    raises = _raises(node.body, "")
    return FunctionFacts(
        parameters=parameters,
        defaults=defaults,
        calls=_unique(name for name in calls if name),
        raises=tuple(raises),
        guards=tuple(raises.values()),
        result=_result(items),
        complexity=complexity,
        depth=depth,
        findings=tuple(text for holds, text in checks if holds),
    )


def _functions(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, _Function]]:
    for node in body:
        if isinstance(node, _Function):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.")


def _class(node: ast.ClassDef) -> ClassFacts:
    return ClassFacts(
        name=node.name,
        bases=tuple(ast.unparse(base) for base in node.bases),
        methods=_unique(item.name for item in node.body if isinstance(item, _Function)),
        lines=_length(node),
    )


def _code(node: _Function, lines: Sequence[str]) -> str:
    """Source of a function without its docstring, dedented."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    numbers = list(range(first, (node.end_lineno or first) + 1))
    if ast.get_docstring(node) is not None:
        doc = node.body[0]
        removed = range(doc.lineno, (doc.end_lineno or doc.lineno) + 1)
        # a docstring that shares its line with code (``def f(): "..."``) stays
        if doc.lineno > node.lineno and len(node.body) > 1 and node.body[1].lineno not in removed:
            numbers = [number for number in numbers if number not in removed]
    return textwrap.dedent("\n".join(lines[number - 1] for number in numbers)).rstrip()


def _signature(arguments: ast.arguments) -> tuple[tuple[str, ...], tuple[str, ...]]:
    positional = [*arguments.posonlyargs, *arguments.args]
    names = [argument.arg for argument in positional]
    values: list[tuple[str, ast.expr]] = []
    if arguments.defaults:
        values += zip(names[-len(arguments.defaults) :], arguments.defaults, strict=True)
    if names[:1] in (["self"], ["cls"]):
        names = names[1:]
    if arguments.vararg:
        names.append("*" + arguments.vararg.arg)
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        names.append(argument.arg)
        if default is not None:
            values.append((argument.arg, default))
    if arguments.kwarg:
        names.append("**" + arguments.kwarg.arg)
    return tuple(names), tuple(f"{name}={ast.unparse(value)}" for name, value in values)


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a function in source order, without those of functions and classes inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            continue
        yield child
        yield from _own_nodes(child)


def _called(call: ast.Call) -> str:
    if isinstance(call.func, ast.Name):
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _raised(statement: ast.Raise) -> str:
    cause = statement.exc.func if isinstance(statement.exc, ast.Call) else statement.exc
    return ast.unparse(cause) if isinstance(cause, (ast.Name, ast.Attribute)) else ""


def _raises(body: Sequence[ast.stmt], guard: str) -> dict[str, str]:
    """Exceptions raised by name in statements that run under ``guard``, and their conditions."""
    found: dict[str, str] = {}
    for statement in body:
        for name, condition in _raises_of(statement, guard).items():
            found.setdefault(name, condition)
    return found


def _raises_of(statement: ast.stmt, guard: str) -> dict[str, str]:
    match statement:
        case ast.Raise():
            name = _raised(statement)
            return {name: guard} if name else {}
        case ast.If(test=test, body=body, orelse=orelse):
            condition = ast.unparse(test)
            blocks = [(body, condition), (orelse, f"not ({condition})")]
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {}  # raised when that is called, not here
        case ast.Match():
            blocks = [(case.body, "") for case in statement.cases]
        case ast.Try():
            blocks = [(statement.body, guard), *((one.body, "") for one in statement.handlers)]
            blocks += [(statement.orelse, guard), (statement.finalbody, guard)]
        case ast.For() | ast.AsyncFor() | ast.While():
            blocks = [(statement.body, ""), (statement.orelse, guard)]
        case ast.With() | ast.AsyncWith():
            blocks = [(statement.body, guard)]
        case _:
            return {}
    found: dict[str, str] = {}
    for block, condition in blocks:
        for name, where in _raises(block, condition).items():
            found.setdefault(name, where)
    return found


def _result(items: Sequence[ast.AST]) -> str:
    if any(isinstance(item, (ast.Yield, ast.YieldFrom)) for item in items):
        return "yields values"
    returns = (item for item in items if isinstance(item, ast.Return))
    values = (item.value for item in returns if item.value is not None)
    nothing = all(isinstance(value, ast.Constant) and value.value is None for value in values)
    return "returns nothing" if nothing else "returns a value"


def _complexity(items: Sequence[ast.AST]) -> int:
    total = 1
    for item in items:
        if isinstance(item, ast.BoolOp):
            total += len(item.values) - 1
        elif isinstance(item, ast.comprehension):
            total += 1 + len(item.ifs)
        elif isinstance(item, _BRANCHES):
            total += 1
    return total


def _depth(node: ast.AST) -> int:
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        # "elif" is an If inside an orelse: it reads as one level
        chained = isinstance(node, ast.If) and node.orelse == [child] and isinstance(child, ast.If)
        deepest = max(deepest, _depth(child) + (isinstance(child, _BLOCKS) and not chained))
    return deepest


def _habits(arguments: ast.arguments, items: Sequence[ast.AST]) -> tuple[tuple[bool, str], ...]:
    handlers = [item for item in items if isinstance(item, ast.ExceptHandler)]
    defaults = [*arguments.defaults, *arguments.kw_defaults]
    mutable = any(isinstance(value, (ast.List, ast.Dict, ast.Set)) for value in defaults)
    return (
        (any(handler.type is None for handler in handlers), "a bare except hides every error"),
        (_swallows(handlers), "an exception is swallowed with pass"),
        (mutable, "a default argument is mutable"),
        (any(isinstance(item, ast.Global) for item in items), "it changes global state"),
    )


def _swallows(handlers: Sequence[ast.ExceptHandler]) -> bool:
    return any(len(one.body) == 1 and isinstance(one.body[0], ast.Pass) for one in handlers)


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def _length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _first_paragraph(doc: str | None) -> str:
    text = " ".join(doc.strip().split("\n\n")[0].split()) if doc else ""
    return text.encode(errors="replace").decode()  # escapes in source may spell half a surrogate


def _unique(names: Iterator[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
