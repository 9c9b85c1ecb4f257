"""The error for reading a traced value: where it came from, who asked, what to do instead."""

from __future__ import annotations

import linecache
import re

from vkjit.errors import TracerError
from vkjit.trace import Tracer, maker, user_source

_CHOOSE = (
    "use vkjit.lax.cond to choose between computations or vkjit.numpy.where to choose between "
    "values, with & | ~ in place of and, or, not"
)
_INSTEAD = {
    "bool": _CHOOSE + "; to repeat by a traced value, vkjit.lax.while_loop",
    "int": "make the argument static (static_argnums), or keep the computation in arrays",
    "float": "keep the computation in arrays; return the value to read it",
    "complex": "keep the computation in arrays; return the value to read it",
    "index": "make the argument static (static_argnums); use vkjit.numpy.take or "
    "vkjit.lax.dynamic_slice to index by a traced value",
    "array": "use vkjit.numpy instead of numpy inside a traced function; return the value to read",
}
_STATEMENTS = (
    ("bool", re.compile(r"\s*(?:if|elif)\b"), "`if`", _CHOOSE),
    (
        "bool",
        re.compile(r"\s*while\b"),
        "`while`",
        "use vkjit.lax.while_loop, or vkjit.lax.fori_loop for a number of turns",
    ),
    (
        "bool",
        re.compile(r"\s*assert\b"),
        "`assert`",
        "use vkjit.debug.check, which tests at run time",
    ),
    ("bool", re.compile(r".*\bif\b.*\belse\b"), "`if ... else`", _CHOOSE),
    (
        "bool",
        re.compile(r".*\b(?:and|or|not)\b"),
        "`and`, `or` or `not`",
        "use & | ~, or vkjit.numpy.logical_and, logical_or and logical_not",
    ),
    (
        "index",
        re.compile(r".*\brange\("),
        "`range`",
        "use vkjit.lax.fori_loop or vkjit.lax.scan, or make the argument static (static_argnums)",
    ),
)
"""What asks for a value, by how the line reads; who asks, in the message; what to do instead."""


def concretization_error(value: Tracer, kind: str) -> TracerError:
    """The error for reading a traced value.

    Args:
        value: the tracer.
        kind: what was asked for: bool, int, float, complex, index or array.
    """
    who, instead = _asked(kind)
    asks = f"; Python's {who} needs one" if who else ""
    return TracerError(
        f"{kind}: a traced value {value.aval} (made at {maker(value)}) has no concrete value while "
        f"the function is traced{asks}; {instead}"
    )


def _asked(kind: str) -> tuple[str, str]:
    """The construct on the user's line that asks, empty where unknown, and what to use instead."""
    source = user_source()
    line = linecache.getline(source.code.co_filename, source.line) if source else ""
    for of, pattern, who, instead in _STATEMENTS:
        if of == kind and pattern.match(line):
            return who, instead
    return "", _INSTEAD[kind]
