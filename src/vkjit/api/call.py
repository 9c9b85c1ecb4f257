"""One call of a jitted function taken apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

from vkjit import tree
from vkjit.api.flat import name_of
from vkjit.api.ref import Ref
from vkjit.device_array import DeviceArray
from vkjit.errors import StaticArgumentError
from vkjit.ir.avals import Aval
from vkjit.ir.primitive import Value
from vkjit.trace import Traced, aval_of, trace

Function = Callable[..., Any]


@final
class Call:
    """One call taken apart: dynamic leaves, static values, and the key."""

    __slots__ = ("_args", "_fixed", "_kwargs", "_static", "in_tree", "key", "leaves", "refs")

    def __init__(
        self,
        fn: Function,
        names: Sequence[str],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        static: tuple[int, ...],
    ) -> None:
        self._args = args
        self._static = static
        fixed: tuple[tuple[tuple[int | str, Any], ...], ...] = ()
        dynamic: tuple[Any, ...] = args
        self._kwargs = kwargs
        if static or (names and kwargs):
            dynamic = tuple(a for i, a in enumerate(args) if i not in static)
            statics = tuple((i, args[i]) for i in static)
            named = tuple((n, kwargs[n]) for n in names if n in kwargs)
            kwargs = {k: v for k, v in kwargs.items() if k not in names}
            fixed = (statics, named)
            _require_hashable(fn, (*statics, *named))
        self._fixed = fixed
        leaves, self.in_tree = tree.flatten((dynamic, kwargs))
        self.refs = {i: v for i, v in enumerate(leaves) if type(v) is Ref}
        self.leaves = [v.value if type(v) is Ref else v for v in leaves] if self.refs else leaves
        avals = tuple([_aval(v) for v in self.leaves])
        self.key = (self.in_tree, avals, _typed(fixed), tuple(self.refs))

    def trace(self, fn: Function) -> tuple[Traced, tree.TreeDef]:
        """The program of the call, and the structure of its result.

        The contents of the Refs among the arguments are the last results.
        """
        out_trees: list[tree.TreeDef] = []

        def flat(*given: Value) -> list[Value]:
            leaves = [Ref(v) if i in self.refs else v for i, v in enumerate(given)]
            dynamic, kwargs = tree.unflatten(self.in_tree, leaves)
            rest = iter(dynamic)
            args = [a if i in self._static else next(rest) for i, a in enumerate(self._args)]
            static = {k: v for k, v in self._kwargs.items() if k not in kwargs}
            out, out_tree = tree.flatten(fn(*args, **static, **kwargs))
            out_trees.append(out_tree)
            return [*out, *[leaves[i].value for i in self.refs]]

        return trace(flat, [_aval(v) for v in self.leaves], name_of(fn)), out_trees[0]

    def facts(self, names: Sequence[str]) -> dict[str, str]:
        """What a version is compiled for, by name; ``names`` are those of the parameters."""

        def name(position: int | str) -> str:
            if isinstance(position, int) and position < len(names):
                return names[position]
            return str(position)

        found = {f"static {name(n)}": _shown(v) for part in self._fixed for n, v in part}
        dynamic = [i for i in range(len(self._args)) if i not in self._static]
        positional, named = tree.unflatten(self.in_tree, self.leaves)
        found["structure"] = str(self.in_tree)
        for number, value in zip(dynamic, positional, strict=True):
            for path, leaf in tree.leaves_with_path(value):
                found[f"argument {name(number)}{tree.keystr(path)}"] = str(_aval(leaf))
        for key, value in named.items():
            for path, leaf in tree.leaves_with_path(value):
                found[f"argument {key}{tree.keystr(path)}"] = str(_aval(leaf))
        return found

    def donated(self, argnums: Iterable[int]) -> tuple[int, ...]:
        """Positions of the leaves of donated arguments."""
        chosen = {n % len(self._args) for n in argnums if -len(self._args) <= n < len(self._args)}
        found: list[int] = []
        start = 0
        for i, arg in enumerate(self._args):
            if i in self._static:
                continue
            count = len(tree.leaves(arg))
            if i in chosen:
                found.extend(range(start, start + count))
            start += count
        return tuple(dict.fromkeys((*found, *self.refs)))


_LONGEST = 80
"""Characters of a static value in a message."""


def _shown(value: object) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... (hash {hash(value)})"


def _aval(value: Value) -> Aval:
    return value.aval if type(value) is DeviceArray else aval_of(value)


def _typed(fixed: object) -> object:
    """Static values with their types: 1, 1.0 and True are equal but not the same value."""
    if isinstance(fixed, tuple):
        return tuple(_typed(v) for v in fixed)  # type: ignore[misc]
    return (type(fixed), fixed)


def _require_hashable(fn: Function, statics: Iterable[tuple[int | str, Any]]) -> None:
    for name, value in statics:
        try:
            hash(value)
        except TypeError as error:
            raise StaticArgumentError(
                f"jit of {name_of(fn)}: static argument {name!r} is a {type(value).__name__}, "
                "which is not hashable; pass a tuple, a frozen dataclass or another hashable value"
            ) from error
