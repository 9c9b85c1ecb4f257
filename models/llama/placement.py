"""Which layers an adapter sits on: patterns of names, ranges of blocks, parts of a block.

Placement decides which adapters exist and nothing else: gradients pass through every layer, adapted
or not.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection, Iterable, Sequence

from vkjit.errors import ConfigError

ALL_LINEAR = "all-linear"
"""The pattern for every linear layer of the blocks, as PEFT names it."""

_BLOCK = re.compile(r"model\.layers\.(\d+)\.(self_attn|mlp)\.")
_RANGE = re.compile(r"(\d*)(-?)(\d*)")


def matches(pattern: str, module: str) -> bool:
    """True if ``pattern`` chooses ``module``.

    ``all-linear`` chooses every linear layer; ``re:`` and a regular expression those whose whole
    name it matches; a text with ``*``, ``?`` or ``[`` is a glob over the whole name; anything else
    is a name or its last parts, as in PEFT (``q_proj``, ``mlp.up_proj``).
    """
    if pattern == ALL_LINEAR:
        return True
    if pattern.startswith("re:"):
        return re.fullmatch(pattern.removeprefix("re:"), module) is not None
    if any(sign in pattern for sign in "*?["):
        return fnmatch.fnmatchcase(module, pattern)
    return module == pattern or module.endswith("." + pattern)


def first_match(patterns: Iterable[str], module: str) -> str | None:
    """The first of ``patterns`` that chooses ``module``, None where none does."""
    return next((pattern for pattern in patterns if matches(pattern, module)), None)


def block_of_layer(module: str) -> int:
    """Index of the block that the linear layer ``module`` is in."""
    return int(_parts(module)[0])


def part_of_layer(module: str) -> str:
    """``self_attn`` or ``mlp``."""
    return _parts(module)[1]


def _parts(module: str) -> tuple[str, str]:
    found = _BLOCK.match(module)
    if found is None:
        raise ConfigError(f"lora: {module!r} is no linear layer of a block; choose another")
    return found[1], found[2]


def parse_layers(text: str, layers: int) -> frozenset[int]:
    """Indices of blocks from a text such as ``0-7,28-``.

    Args:
        text: Indices and ranges, separated by commas; a range includes both ends, an end left out
            is the first or the last block.
        layers: Number of blocks of the model.

    Raises:
        ConfigError: The text is not of that form, or names a block that the model lacks.
    """
    chosen: set[int] = set()
    for item in text.split(","):
        found = _RANGE.fullmatch(item.strip())
        if found is None or not (found[1] or found[3]) or (found[3] and not found[2]):
            raise ConfigError(
                f"lora: layers = {text!r} has the item {item.strip()!r}, expected an index or a "
                "range such as 0-7 or 28-; correct it"
            )
        first = int(found[1] or 0)
        last = int(found[3] or layers - 1) if found[2] else first
        if not first <= last < layers:
            raise ConfigError(
                f"lora: layers = {text!r} names blocks {first} to {last}, expected a range within "
                f"0 to {layers - 1}; the model has {layers} blocks"
            )
        chosen |= set(range(first, last + 1))
    return frozenset(chosen)


def check_patterns(patterns: Iterable[str], what: str) -> None:
    """Refuses patterns that are no regular expression; ``what`` names the key in messages.

    Raises:
        ConfigError: Names the pattern.
    """
    for pattern in patterns:
        if pattern.startswith("re:"):
            check_expression(pattern, pattern.removeprefix("re:"), what)


def check_expression(pattern: str, expression: str, what: str) -> None:
    """Refuses ``expression`` where it is no regular one; messages show ``pattern``.

    Raises:
        ConfigError: Names the pattern and the key ``what``.
    """
    try:
        re.compile(expression)
    except re.error as error:
        raise ConfigError(
            f"lora: {what} {pattern!r} is no regular expression ({error}); correct it"
        ) from error


def check_used(
    patterns: Iterable[str], used: Collection[str], names: Sequence[str], what: str
) -> None:
    """Refuses patterns that chose nothing.

    Args:
        patterns: All patterns of the key ``what``.
        used: Those that chose a layer.
        names: The layers that there were to choose from.
        what: The key, in messages.

    Raises:
        ConfigError: Names the pattern and the nearest name.
    """
    for pattern in patterns:
        if pattern not in used:
            raise ConfigError(_no_match(pattern, names, what))


def _no_match(pattern: str, modules: Sequence[str], what: str) -> str:
    last = list(dict.fromkeys(name.rpartition(".")[2] for name in modules))
    near = difflib.get_close_matches(pattern, [*last, *modules, ALL_LINEAR], n=1, cutoff=0.3)
    advice = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(last)}"
    return f"lora: {what} {pattern!r} matches no linear layer, expected at least one; {advice}"
