"""Policies: what a checkpoint may save, under JAX's names.

A policy is called with a primitive, the avals of its operands and its static parameters by name; it
says whether results of that operation may be saved: True, False, or ``Offload`` to keep them in
host memory meanwhile. Any hashable callable is one; those below are data, equal when they say the
same.

Whatever a policy says, casts, views and cheap pointwise operations are computed again rather than
saved where other residuals give them (a value with a name is not: it is saved when its name is);
writes and calls of the host are never repeated: what they give is saved.
"""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from vkjit.errors import ArgumentError
from vkjit.ir.avals import Aval
from vkjit.ir.primitive import Kind, Primitive
from vkjit.ops.contract import DotGeneral
from vkjit.ops.naming import Name

DEVICE, HOST = "device", "pinned_host"
"""The memories that there are, under JAX's names."""


@final
@dataclass(frozen=True)
class Offload:
    """Results are kept in memory ``dst`` until they are needed in ``src`` again."""

    src: str = DEVICE
    dst: str = HOST


Decision = bool | Offload
Policy = Callable[..., Decision]


@dataclass(frozen=True)
class _Given(ABC):
    """A policy as data."""

    @final
    def __call__(self, prim: Primitive, *avals: Aval, **params: object) -> Decision:
        """Whether results of ``prim`` may be saved.

        Args:
            prim: the operation.
            avals: of its operands.
            params: its static parameters.
        """
        return self._decide(prim, avals, params)

    @abstractmethod
    def _decide(
        self, prim: Primitive, avals: tuple[Aval, ...], params: dict[str, object]
    ) -> Decision: ...

    @abstractmethod
    def __str__(self) -> str: ...


def _is_plain_dot(prim: Primitive) -> bool:
    return isinstance(prim, DotGeneral) and not prim.lhs_batch


@final
@dataclass(frozen=True)
class Everything(_Given):
    """All results may be saved."""

    def _decide(
        self, prim: Primitive, avals: tuple[Aval, ...], params: dict[str, object]
    ) -> Decision:
        return True

    def __str__(self) -> str:
        return "everything_saveable"


@final
@dataclass(frozen=True)
class Nothing(_Given):
    """No result may be saved, only arguments."""

    def _decide(
        self, prim: Primitive, avals: tuple[Aval, ...], params: dict[str, object]
    ) -> Decision:
        return False

    def __str__(self) -> str:
        return "nothing_saveable"


@final
@dataclass(frozen=True)
class Dots(_Given):
    """Results of products may be saved."""

    def _decide(
        self, prim: Primitive, avals: tuple[Aval, ...], params: dict[str, object]
    ) -> Decision:
        return prim.traits.kind is Kind.CONTRACT

    def __str__(self) -> str:
        return "dots_saveable"


@final
@dataclass(frozen=True)
class DotsWithNoBatchDims(_Given):
    """Results of products without batch axes may be saved."""

    def _decide(
        self, prim: Primitive, avals: tuple[Aval, ...], params: dict[str, object]
    ) -> Decision:
        return _is_plain_dot(prim)

    def __str__(self) -> str:
        return "dots_with_no_batch_dims_saveable"


@final
@dataclass(frozen=True)
class OnlyNames(_Given):
    """Values with one of these names may be saved."""

    names: frozenset[str]

    def _decide(
        self, prim: Primitive, avals: tuple[Aval, ...], params: dict[str, object]
    ) -> Decision:
        return isinstance(prim, Name) and prim.label in self.names

    def __str__(self) -> str:
        return f"save_only_these_names({_listed(self.names)})"


@final
@dataclass(frozen=True)
class OtherNames(_Given):
    """Values with any name but these may be saved."""

    names: frozenset[str]

    def _decide(
        self, prim: Primitive, avals: tuple[Aval, ...], params: dict[str, object]
    ) -> Decision:
        return isinstance(prim, Name) and prim.label not in self.names

    def __str__(self) -> str:
        return f"save_any_names_but_these({_listed(self.names)})"


@final
@dataclass(frozen=True)
class AnythingButNames(_Given):
    """All results may be saved, except values with one of these names."""

    names: frozenset[str]

    def _decide(
        self, prim: Primitive, avals: tuple[Aval, ...], params: dict[str, object]
    ) -> Decision:
        return not (isinstance(prim, Name) and prim.label in self.names)

    def __str__(self) -> str:
        return f"save_anything_except_these_names({_listed(self.names)})"


@final
@dataclass(frozen=True)
class Either(_Given):
    """Results that one of two policies saves; offloaded where the first that saves them says so."""

    first: Policy
    second: Policy

    def _decide(
        self, prim: Primitive, avals: tuple[Aval, ...], params: dict[str, object]
    ) -> Decision:
        return self.first(prim, *avals, **params) or self.second(prim, *avals, **params)

    def __str__(self) -> str:
        return f"save_from_both_policies({self.first}, {self.second})"


@final
@dataclass(frozen=True)
class NamesAndOffload(_Given):
    """Values with names may be saved, or kept in host memory."""

    saved: frozenset[str]
    offloaded: frozenset[str]
    where: Offload

    def _decide(
        self, prim: Primitive, avals: tuple[Aval, ...], params: dict[str, object]
    ) -> Decision:
        if isinstance(prim, Name) and prim.label in self.offloaded:
            return self.where
        return isinstance(prim, Name) and prim.label in self.saved

    def __str__(self) -> str:
        return (
            f"save_and_offload_only_these_names(names_which_can_be_saved={sorted(self.saved)}, "
            f"names_which_can_be_offloaded={sorted(self.offloaded)}, "
            f"offload_src={self.where.src!r}, offload_dst={self.where.dst!r})"
        )


@final
@dataclass(frozen=True)
class OffloadDots(_Given):
    """Results of products without batch axes are kept in host memory."""

    where: Offload

    def _decide(
        self, prim: Primitive, avals: tuple[Aval, ...], params: dict[str, object]
    ) -> Decision:
        return self.where if _is_plain_dot(prim) else False

    def __str__(self) -> str:
        return f"offload_dot_with_no_batch_dims({self.where.src!r}, {self.where.dst!r})"


everything_saveable = Everything()
nothing_saveable = Nothing()
dots_saveable = checkpoint_dots = Dots()
dots_with_no_batch_dims_saveable = checkpoint_dots_with_no_batch_dims = DotsWithNoBatchDims()


def save_only_these_names(*names_which_can_be_saved: str) -> OnlyNames:
    """Saves named values, only with these names."""
    return OnlyNames(_names(names_which_can_be_saved))


def save_any_names_but_these(*names_not_to_save: str) -> OtherNames:
    """Saves named values, except those with these names."""
    return OtherNames(_names(names_not_to_save))


def save_anything_except_these_names(*names_not_to_save: str) -> AnythingButNames:
    """Saves any values, named or not, except those with these names."""
    return AnythingButNames(_names(names_not_to_save))


def save_from_both_policies(policy_1: Policy, policy_2: Policy) -> Either:
    """Saves what either of two policies saves."""
    return Either(policy_1, policy_2)


def save_and_offload_only_these_names(
    *,
    names_which_can_be_saved: Sequence[str],
    names_which_can_be_offloaded: Sequence[str],
    offload_src: str,
    offload_dst: str,
) -> NamesAndOffload:
    """Saves values with some names on the device, and those with others in host memory.

    Raises:
        ArgumentError: a name is in both lists, or the memories are not ``"device"`` and
            ``"pinned_host"``.
    """
    saved, offloaded = _names(names_which_can_be_saved), _names(names_which_can_be_offloaded)
    if saved & offloaded:
        raise ArgumentError(
            f"save_and_offload_only_these_names: {sorted(saved & offloaded)} are in both lists; "
            "expected each name in one"
        )
    return NamesAndOffload(saved, offloaded, _between(offload_src, offload_dst))


def offload_dot_with_no_batch_dims(offload_src: str, offload_dst: str) -> OffloadDots:
    """Keeps results of products without batch axes in host memory.

    Raises:
        ArgumentError: the memories are not ``"device"`` and ``"pinned_host"``.
    """
    return OffloadDots(_between(offload_src, offload_dst))


def _listed(names: frozenset[str]) -> str:
    return ", ".join(map(repr, sorted(names)))


def _names(given: Sequence[str]) -> frozenset[str]:
    wrong = [n for n in given if not isinstance(n, str)]  # pyright: ignore[reportUnnecessaryIsInstance]  callers are users
    if wrong or isinstance(given, str):
        raise ArgumentError(
            f"checkpoint policy: names {given!r}; expected strings, those of checkpoint_name"
        )
    return frozenset(given)


def _between(src: str, dst: str) -> Offload:
    if (src, dst) != (DEVICE, HOST):
        raise ArgumentError(
            f"checkpoint policy: offload from {src!r} to {dst!r}; expected from {DEVICE!r} to "
            f"{HOST!r}"
        )
    return Offload(src, dst)


_NAMED: Mapping[str, Any] = {
    f.__name__: f
    for f in (
        save_only_these_names,
        save_any_names_but_these,
        save_anything_except_these_names,
        save_from_both_policies,
        save_and_offload_only_these_names,
        offload_dot_with_no_batch_dims,
    )
} | {
    str(p): p
    for p in (
        everything_saveable,
        nothing_saveable,
        dots_saveable,
        dots_with_no_batch_dims_saveable,
    )
}


def parse(text: str) -> Policy:
    """The policy that prints as ``text``.

    Raises:
        ArgumentError: no policy of this module does.
    """
    try:
        return _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(
            f"checkpoint policy: {text!r}; expected the text of one of {', '.join(_NAMED)}"
        ) from error


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return _NAMED[node.id]
    if isinstance(node, ast.Call):
        keywords = {k.arg or "": _value(k.value) for k in node.keywords}
        return _value(node.func)(*map(_value, node.args), **keywords)
    return ast.literal_eval(node)
