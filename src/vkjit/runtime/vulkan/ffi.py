"""The raw C interface of Vulkan: declarations, functions by address, structs kept alive.

From the package ``vulkan`` come only its C declarations and integer constants. Its Python wrappers
lose memory that nested structs point to, lack some functions and cost a microsecond each. Importing
this module raises ``OSError`` where no Vulkan loader is installed.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable
from typing import Any, final

from vkjit.errors import DeviceError

try:
    import vulkan as vk  # pyright: ignore[reportMissingTypeStubs]
    from vulkan._vulkan import ffi as _ffi  # pyright: ignore[reportMissingTypeStubs]
    from vulkan._vulkan import lib as _lib  # pyright: ignore[reportMissingTypeStubs]
except OSError as error:
    raise OSError(
        f"no Vulkan loader ({error}); install it (Debian: libvulkan1) or use the cpu"
    ) from error

# cffi objects have no static types.
constants: Any = vk
ffi: Any = _ffi
loader: Any = _lib
Handle = Any
NULL: Any = ffi.NULL

_RESULTS: dict[int, str] = {}
for _name in ("VK_NOT_READY", "VK_TIMEOUT", "VK_INCOMPLETE"):
    _RESULTS[getattr(constants, _name)] = _name
for _name in dir(constants):
    # Several extensions alias one number; the core name is the shortest.
    if _name.startswith("VK_ERROR_"):
        _number: int = getattr(constants, _name)
        if _number not in _RESULTS or len(_name) < len(_RESULTS[_number]):
            _RESULTS[_number] = _name


def result_name(result: int) -> str:
    """``VK_ERROR_...`` of a result code."""
    return _RESULTS.get(result, f"VkResult {result}")


def check(result: int, what: str) -> None:
    """Raises ``DeviceError`` naming ``what`` unless the result is success."""
    if result != 0:
        raise DeviceError(f"vulkan: {what} failed with {result_name(result)}")


@final
class Functions:
    """Vulkan functions as attributes, each fetched by address at its first use."""

    def __init__(self, address_of: Callable[[bytes], Any]) -> None:
        self._address_of = address_of

    def __getattr__(self, name: str) -> Any:
        address = self._address_of(name.encode())
        if address == NULL:
            raise DeviceError(f"vulkan: the driver has no function {name}")
        function = ffi.cast(f"PFN_{name}", address)
        setattr(self, name, function)
        return function

    def typed(self, name: str, signature: str) -> Any:
        """A function that the declarations at hand do not know, as a pointer of ``signature``."""
        address = self._address_of(name.encode())
        if address == NULL:
            raise DeviceError(f"vulkan: the driver has no function {name}")
        return ffi.cast(signature, address)


# cffi does not keep alive what a struct points to: that lasts as long as the struct, here.
_pointees: weakref.WeakKeyDictionary[Any, tuple[Any, ...]] = weakref.WeakKeyDictionary()
_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Za-z])(?=\d)|(?<=\d)(?=[A-Z])")
_SUFFIXES = ("KHR", "EXT", "NV")


def struct(type_: str, **fields: Any) -> Any:
    """A new struct with its ``sType`` set, which keeps alive whatever ``fields`` point to."""
    kind = _own_type(type_)
    if kind is not None:
        fields = {"sType": kind, **fields}
    made = ffi.new(f"{type_} *", fields)
    _pointees[made] = tuple(_owners(fields))
    return made


def keep(holder: Any, *pointees: Any) -> None:
    """Keeps alive what the memory ``holder`` points to, as long as it lives."""
    _pointees[holder] = (*_pointees.get(holder, ()), *pointees)


def array(type_: str, items: list[Any]) -> Any:
    """A new array, which keeps alive whatever ``items`` point to."""
    made = ffi.new(f"{type_}[]", items)
    _pointees[made] = tuple(_owners(items))
    return made


def strings(texts: list[str]) -> Any:
    """A new ``char *[]``."""
    return array("char *", [ffi.new("char[]", text.encode()) for text in texts])


def _owners(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    if isinstance(value, list):
        return [owner for item in value for owner in _owners(item)]  # pyright: ignore[reportUnknownVariableType]
    return [value] if isinstance(value, ffi.CData) else []


@functools.cache
def _own_type(type_: str) -> int | None:
    """The ``sType`` of a struct that has one."""
    members = {name for name, _ in ffi.typeof(type_).fields}
    return structure_type(type_) if "sType" in members else None


def structure_type(type_: str) -> int:
    """``VkBufferCreateInfo`` to the number of ``VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO``."""
    name, suffix = type_.removeprefix("Vk"), ""
    for candidate in _SUFFIXES:
        if name.endswith(candidate):
            name, suffix = name.removesuffix(candidate), f"_{candidate}"
    # The versions of Vulkan are written Vulkan12 and VULKAN_1_2.
    name = re.sub(r"Vulkan(\d)(\d)", r"Vulkan_\1_\2", name)
    words = _WORDS.sub("_", name).upper().replace("__", "_")
    return getattr(constants, f"VK_STRUCTURE_TYPE_{words}{suffix}")


def listed(function: Callable[..., Any], type_: str, *arguments: Any) -> Any:
    """The array that an enumerating function fills, in its two calls."""
    count = ffi.new("uint32_t *")
    function(*arguments, count, NULL)
    if ffi.typeof(type_).kind == "struct" and "sType" in dict(ffi.typeof(type_).fields):
        items = ffi.new(f"{type_}[]", [{"sType": structure_type(type_)}] * count[0])
    else:
        items = ffi.new(f"{type_}[]", count[0])
    function(*arguments, count, items)
    return items[0 : count[0]] if count[0] else []


def text(chars: Any) -> str:
    """A C string."""
    return "" if chars == NULL else ffi.string(chars).decode(errors="replace")
