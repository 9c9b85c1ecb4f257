"""What a device can do of VK_NV_cooperative_matrix2.

The declarations at hand do not know the extension: its structs are laid out by hand, sType and
pNext in the first two words of 64 bits, 32-bit members after them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from vkjit.lowering.kernel.types import MatScope, ScalarType
from vkjit.lowering.target import TensorShape
from vkjit.runtime.vulkan.ffi import NULL, Functions, Handle, ffi, struct

EXTENSION = "VK_NV_cooperative_matrix2"
_FEATURES = 1000593000  # VkPhysicalDeviceCooperativeMatrix2FeaturesNV
_DIMENSIONS = 1000593001  # VkCooperativeMatrixFlexibleDimensionsPropertiesNV
_LIMITS = 1000593002  # VkPhysicalDeviceCooperativeMatrix2PropertiesNV
_HEAD = 2  # words of sType and pNext
_DIMENSIONS_WORDS = 7
_ENUMERATE = "vkGetPhysicalDeviceCooperativeMatrixFlexibleDimensionsPropertiesNV"
_SCOPES = {2: MatScope.WORKGROUP, 3: MatScope.SUBGROUP}

FEATURES = {
    "cooperativeMatrixWorkgroupScope": "tensor_workgroup",
    "cooperativeMatrixFlexibleDimensions": "tensor_dimensions",
    "cooperativeMatrixReductions": "tensor_reductions",
    "cooperativeMatrixConversions": "tensor_conversions",
    "cooperativeMatrixPerElementOperations": "tensor_maps",
    "cooperativeMatrixTensorAddressing": "tensor_addressing",
    "cooperativeMatrixBlockLoads": "tensor_blocks",
}
"""Members of the features struct, in order, and what ``Target.features`` calls them."""


def features(functions: Functions, physical: Handle) -> tuple[frozenset[str], Any]:
    """The features that the device has, and the struct that enables exactly those."""
    memory, members = _struct(_FEATURES, len(FEATURES))
    query = struct("VkPhysicalDeviceFeatures2", pNext=memory)
    functions.vkGetPhysicalDeviceFeatures2(physical, query)
    return frozenset(name for i, name in enumerate(FEATURES) if members[i]), memory


def largest_dimension(functions: Functions, physical: Handle) -> int:
    """Most rows or columns of a matrix of flexible dimensions."""
    memory, members = _struct(_LIMITS, 3)
    query = struct("VkPhysicalDeviceProperties2", pNext=memory)
    functions.vkGetPhysicalDeviceProperties2(physical, query)
    return int(members[1])


def shapes(
    functions: Functions,
    physical: Handle,
    component: Callable[[int], ScalarType | None],
    enabled: Collection[str],
) -> tuple[TensorShape, ...]:
    """The granularities of matrices whose features are ``enabled``.

    ``component`` gives the type of a ``VkComponentTypeKHR``, or None where it is of no use.
    """
    if "cooperativeMatrixFlexibleDimensions" not in enabled:
        return ()
    found: list[TensorShape] = []
    for m, n, k, *types, saturating, scope, invocations in _dimensions(functions, physical):
        a, b, c, result = map(component, types)
        held = _SCOPES.get(scope)
        if a is None or b is None or c is None or c is not result or saturating or held is None:
            continue
        if held is MatScope.WORKGROUP and "cooperativeMatrixWorkgroupScope" not in enabled:
            continue
        size = invocations if held is MatScope.WORKGROUP else 0
        found.append(TensorShape(a, b, c, m, n, k, held, size))
    return tuple(found)


def _struct(kind: int, members: int) -> tuple[Any, Any]:
    """A zeroed struct of 32-bit members, and the members."""
    memory = ffi.new("uint64_t[]", _HEAD + -(-members // 2))
    memory[0] = kind
    return memory, ffi.cast("uint32_t *", memory + _HEAD)


def _dimensions(functions: Functions, physical: Handle) -> list[list[int]]:
    """The ten members of each entry."""
    signature = "VkResult (*)(VkPhysicalDevice, uint32_t *, void *)"
    enumerate_ = functions.typed(_ENUMERATE, signature)
    count = ffi.new("uint32_t *")
    enumerate_(physical, count, NULL)
    memory = ffi.new("uint64_t[]", _DIMENSIONS_WORDS * count[0])
    for entry in range(count[0]):
        memory[entry * _DIMENSIONS_WORDS] = _DIMENSIONS
    enumerate_(physical, count, memory)
    starts = [memory + (entry * _DIMENSIONS_WORDS + _HEAD) for entry in range(count[0])]
    return [[int(n) for n in ffi.cast("uint32_t *", start)[0:10]] for start in starts]
