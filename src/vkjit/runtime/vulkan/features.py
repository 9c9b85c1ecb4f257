"""What a physical device can do: queried, never guessed from names, and told as a ``Target``.

Features in ``Target.features``, where ``T`` is f16, f32 or f64:

- ``signed_zero_inf_nan_preserve_T``, ``denorm_preserve_T``, ``rounding_mode_rte_T``: float controls
- ``atomic_add_T`` and ``atomic_add_shared_T``, ``atomic_add_i64``: additions beyond i32
- ``subgroup_shuffle``, ``subgroup_vote``: beyond ``Target.subgroup_ops``, which means arithmetic
- ``bfloat16_matrix``: cooperative matrices of bf16
- ``tensor_workgroup``, ``tensor_dimensions``, ``tensor_reductions``, ``tensor_conversions``,
  ``tensor_maps``, ``tensor_addressing``, ``tensor_blocks``: VK_NV_cooperative_matrix2
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, final

from vkjit.errors import ConfigError
from vkjit.lowering.kernel.types import (
    BF16,
    F16,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    ScalarType,
)
from vkjit.lowering.legalize import INEXACT_DIVISION
from vkjit.lowering.target import Addressing, CoopShape, Quirk, Target, TargetKind, TensorShape
from vkjit.runtime.vulkan import tensors
from vkjit.runtime.vulkan.ffi import (
    NULL,
    Handle,
    constants,
    ffi,
    keep,
    listed,
    struct,
    text,
)
from vkjit.runtime.vulkan.instance import Instance

_COMPUTE = 0x20  # VK_SHADER_STAGE_COMPUTE_BIT
_API_1_3 = 1 << 22 | 3 << 12
_BFLOAT16_FEATURES = 1000141000  # VkPhysicalDeviceShaderBfloat16FeaturesKHR
_BFLOAT16_COMPONENT = 1000141000  # VK_COMPONENT_TYPE_BFLOAT16_KHR
# VkComponentTypeKHR. Unsigned integers are left out: matrices of ours are signed.
_COMPONENTS = {0: F16, 1: F32, 2: F64, 3: I8, 4: I16, 5: I32, 6: I64, _BFLOAT16_COMPONENT: BF16}

# Features to enable where the device has them, by struct.
_WANTED = {
    "VkPhysicalDeviceVulkan11Features": ("storageBuffer16BitAccess",),
    "VkPhysicalDeviceVulkan12Features": (
        "storageBuffer8BitAccess",
        "shaderFloat16",
        "shaderInt8",
        "shaderBufferInt64Atomics",
        "shaderSharedInt64Atomics",
        "shaderSubgroupExtendedTypes",
        "bufferDeviceAddress",
        "timelineSemaphore",
        "vulkanMemoryModel",
        # With the memory model on, atomics of device scope need this, in modules of either model.
        "vulkanMemoryModelDeviceScope",
        "scalarBlockLayout",
    ),
    "VkPhysicalDeviceVulkan13Features": (
        "subgroupSizeControl",
        "computeFullSubgroups",
        "maintenance4",
    ),
    "VkPhysicalDeviceShaderAtomicFloatFeaturesEXT": (
        "shaderBufferFloat32AtomicAdd",
        "shaderBufferFloat64AtomicAdd",
        "shaderSharedFloat32AtomicAdd",
        "shaderSharedFloat64AtomicAdd",
    ),
    "VkPhysicalDeviceCooperativeMatrixFeaturesKHR": ("cooperativeMatrix",),
    # To switch bounds checks of the driver off: kernels check their own.
    "VkPhysicalDevicePipelineRobustnessFeaturesEXT": ("pipelineRobustness",),
}
_CORE_WANTED = ("shaderFloat64", "shaderInt64", "shaderInt16")
_EXTENSION_OF = {
    "VkPhysicalDeviceShaderAtomicFloatFeaturesEXT": "VK_EXT_shader_atomic_float",
    "VkPhysicalDeviceCooperativeMatrixFeaturesKHR": "VK_KHR_cooperative_matrix",
    "VkPhysicalDevicePipelineRobustnessFeaturesEXT": "VK_EXT_pipeline_robustness",
}
# The specification that first has an extension. Older validation layers take its structs and
# modules for faults, so under such a layer the extension stays off.
_SINCE = {
    "VK_KHR_cooperative_matrix": 1 << 22 | 3 << 12 | 255,
    tensors.EXTENSION: 1 << 22 | 4 << 12 | 304,
    "VK_KHR_shader_bfloat16": 1 << 22 | 4 << 12 | 311,
}
_BFLOAT16_EXTENSION = "VK_KHR_shader_bfloat16"
BUDGET_EXTENSION = "VK_EXT_memory_budget"


@final
@dataclass(frozen=True)
class Capabilities:
    """A physical device as the rest of the runtime sees it.

    ``chain`` is the ``VkPhysicalDeviceFeatures2`` that enables ``enabled``; ``refused`` says of
    wanted features why they stay off; ``uuid`` identifies device and driver together.
    ``max_bindings`` counts the storage buffers of one kernel with descriptors. Sizes are in bytes.
    """

    physical: Handle
    name: str
    kind: int
    driver: str
    uuid: str
    family: int
    chain: Any
    enabled: frozenset[str]
    refused: tuple[tuple[str, str], ...]
    extensions: tuple[str, ...]
    storage_alignment: int
    max_storage_range: int
    max_bindings: int
    max_allocation: int
    max_buffer: int
    default_subgroup: int
    target: Target

    @property
    def is_software(self) -> bool:
        """Whether kernels run on the CPU."""
        return self.kind == constants.VK_PHYSICAL_DEVICE_TYPE_CPU


def query(instance: Instance, physical: Handle) -> Capabilities:
    """Everything about a device that the runtime and the compiler need to know."""
    found = _Query(instance, physical)
    core = found.properties.properties
    alignment = core.limits.minStorageBufferOffsetAlignment
    return Capabilities(
        physical=physical,
        name=text(core.deviceName),
        kind=core.deviceType,
        driver=f"{text(found.v12.driverName)} {text(found.v12.driverInfo)}".strip(),
        uuid=bytes(ffi.buffer(core.pipelineCacheUUID)).hex(),
        family=_compute_family(instance, physical),
        chain=found.chain,
        enabled=found.enabled,
        refused=found.refused(),
        extensions=found.extensions,
        storage_alignment=alignment,
        max_storage_range=core.limits.maxStorageBufferRange,
        max_bindings=found.max_bindings(),
        max_allocation=found.v11.maxMemoryAllocationSize,
        max_buffer=found.max_buffer(),
        default_subgroup=found.v11.subgroupSize,
        target=found.target(),
    )


def _compute_family(instance: Instance, physical: Handle) -> int:
    """The first queue family that computes; on GPUs of today it also draws and copies."""
    families = listed(
        instance.functions.vkGetPhysicalDeviceQueueFamilyProperties,
        "VkQueueFamilyProperties",
        physical,
    )
    for index, family in enumerate(families):
        if family.queueFlags & constants.VK_QUEUE_COMPUTE_BIT:
            return index
    return 0


@final
class _Query:
    """The answers of one device, and the target they amount to."""

    def __init__(self, instance: Instance, physical: Handle) -> None:
        self._instance = instance
        self._physical = physical
        functions = instance.functions
        listing = functions.vkEnumerateDeviceExtensionProperties
        known = listed(listing, "VkExtensionProperties", physical, NULL)
        names = {text(e.extensionName) for e in known}
        self._known = {n for n in names if _SINCE.get(n, 0) <= instance.layer_version}
        self._too_new = names - self._known
        self.v11 = struct("VkPhysicalDeviceVulkan11Properties")
        self.v12 = struct("VkPhysicalDeviceVulkan12Properties", pNext=self.v11)
        self.v13: Any = None
        basic = ffi.new("VkPhysicalDeviceProperties *")
        functions.vkGetPhysicalDeviceProperties(physical, basic)
        self._is_1_3 = basic.apiVersion >= _API_1_3
        last = self.v12
        if self._is_1_3:
            last = self.v13 = struct("VkPhysicalDeviceVulkan13Properties", pNext=self.v12)
        self.properties = struct("VkPhysicalDeviceProperties2", pNext=last)
        functions.vkGetPhysicalDeviceProperties2(physical, self.properties)
        self.enabled, self.chain = self._features()
        optional = [e for t, e in _EXTENSION_OF.items() if t in self._types()]
        if self._has_bfloat16():
            optional.append(_BFLOAT16_EXTENSION)
        if self.enabled & tensors.FEATURES.keys():
            optional.append(tensors.EXTENSION)
        optional.append(BUDGET_EXTENSION)
        self.extensions = tuple(e for e in optional if e in self._known)

    def _types(self) -> list[str]:
        """The feature structs that this device knows."""
        return [
            type_
            for type_ in _WANTED
            if _EXTENSION_OF.get(type_, "") in {"", *self._known}
            and (self._is_1_3 or type_ != "VkPhysicalDeviceVulkan13Features")
        ]

    def _features(self) -> tuple[frozenset[str], Any]:
        """The wanted features that the device has, and the chain that enables exactly those."""
        following, asked = NULL, dict[str, Any]()
        for type_ in self._types():
            following = asked[type_] = struct(type_, pNext=following)
        answer = struct("VkPhysicalDeviceFeatures2", pNext=following)
        self._instance.functions.vkGetPhysicalDeviceFeatures2(self._physical, answer)
        enabled: set[str] = set()
        following = self._bfloat16_chain()
        if following != NULL:
            enabled.add("bfloat16Matrix")
        if tensors.EXTENSION in self._known and "VK_KHR_cooperative_matrix" in self._known:
            have, memory = tensors.features(self._instance.functions, self._physical)
            enabled |= have
            memory[1] = int(ffi.cast("uintptr_t", following))
            keep(memory, following)
            following = memory
        for type_, features in asked.items():
            present = [name for name in _WANTED[type_] if getattr(features, name)]
            enabled.update(present)
            following = struct(type_, pNext=following, **dict.fromkeys(present, 1))
        core = [name for name in _CORE_WANTED if getattr(answer.features, name)]
        enabled.update(core)
        chain = struct(
            "VkPhysicalDeviceFeatures2", pNext=following, features=dict.fromkeys(core, 1)
        )
        return frozenset(enabled), chain

    def refused(self) -> tuple[tuple[str, str], ...]:
        """Wanted features that stay off, and why."""
        reasons: list[tuple[str, str]] = []
        for type_, features in {"": _CORE_WANTED, **_WANTED}.items():
            missing = [name for name in features if name not in self.enabled]
            extension = _EXTENSION_OF.get(type_, "")
            reason = "the device does not have it"
            if extension and extension not in self._known:
                reason = f"no {extension}"
                if extension in self._too_new:
                    reason = f"the validation layer is older than {extension}"
            elif type_.endswith("Vulkan13Features") and not self._is_1_3:
                reason = "Vulkan 1.2"
            reasons.extend((name, reason) for name in missing)
        if "bfloat16Matrix" not in self.enabled:
            known = _BFLOAT16_EXTENSION in self._known
            reason = "the device does not have it" if known else f"no {_BFLOAT16_EXTENSION}"
            reasons.append(("bfloat16Matrix", reason))
        if tensors.EXTENSION in self._known:
            reasons += [
                (name, "the device does not have it")
                for name in tensors.FEATURES
                if name not in self.enabled
            ]
        else:
            reasons.append(("cooperativeMatrix2", f"no {tensors.EXTENSION}"))
        return tuple(reasons)

    def _has_bfloat16(self) -> bool:
        return _BFLOAT16_EXTENSION in self._known

    def _bfloat16_chain(self) -> Any:
        """The struct that enables bfloat16 types and matrices, or NULL.

        The declarations at hand do not know it: sType, pNext and three 32-bit flags (type, dot
        product, cooperative matrix), laid out by hand.
        """
        if not self._has_bfloat16():
            return NULL
        memory = ffi.new("uint64_t[]", 4)
        memory[0] = _BFLOAT16_FEATURES
        flags = ffi.cast("uint32_t *", memory + 2)
        query_chain = struct("VkPhysicalDeviceFeatures2", pNext=memory)
        self._instance.functions.vkGetPhysicalDeviceFeatures2(self._physical, query_chain)
        if not (flags[0] and flags[2]):
            return NULL
        flags[1] = 0
        return memory

    def max_bindings(self) -> int:
        """Most storage buffers of one kernel, with descriptors."""
        limits = self.properties.properties.limits
        return min(
            limits.maxPerStageDescriptorStorageBuffers,
            limits.maxDescriptorSetStorageBuffers,
            limits.maxPerStageResources,
        )

    def cores(self) -> int:
        """Processors that run workgroups, where the driver says how many there are; else 0."""
        query = self._instance.functions.vkGetPhysicalDeviceProperties2
        if "VK_NV_shader_sm_builtins" in self._known:
            kind = "VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_SM_BUILTINS_PROPERTIES_NV"
            nvidia = ffi.new("VkPhysicalDeviceShaderSMBuiltinsPropertiesNV *")
            nvidia.sType = getattr(constants, kind)
            query(self._physical, struct("VkPhysicalDeviceProperties2", pNext=nvidia))
            return nvidia.shaderSMCount
        if "VK_AMD_shader_core_properties" in self._known:
            amd = struct("VkPhysicalDeviceShaderCorePropertiesAMD")
            query(self._physical, struct("VkPhysicalDeviceProperties2", pNext=amd))
            units = amd.shaderArraysPerEngineCount * amd.computeUnitsPerShaderArray
            return amd.shaderEngineCount * units
        return 0

    def max_buffer(self) -> int:
        """Most bytes of one buffer."""
        return self.v13.maxBufferSize if self.v13 else self.v11.maxMemoryAllocationSize

    # -- the target -------------------------------------------------------------------------------

    def target(self) -> Target:
        """The device as the compiler sees it."""
        limits = self.properties.properties.limits
        addressing = self._addressing()
        name = text(self.properties.properties.deviceName)
        version = self.properties.properties.driverVersion
        arithmetic = self._arithmetic()
        return Target(
            name=f"vulkan {name} {version:#x} {addressing.value}",
            kind=TargetKind.GPU,
            index_type=I32,
            storage=self._storage(addressing, arithmetic),
            arithmetic=arithmetic,
            cores=self.cores(),
            max_grid=tuple(limits.maxComputeWorkGroupCount),
            max_workgroup=tuple(limits.maxComputeWorkGroupSize),
            max_invocations=limits.maxComputeWorkGroupInvocations,
            shared_bytes=limits.maxComputeSharedMemorySize,
            subgroup_sizes=self._subgroup_sizes(),
            subgroup_ops=self._subgroup_has("ARITHMETIC"),
            addressing=addressing,
            max_bindings=self.max_bindings() if addressing is Addressing.DESCRIPTOR else 0,
            max_buffer_bytes=min(self.v11.maxMemoryAllocationSize, self.max_buffer()),
            alignment=self._alignment(addressing),
            coop_shapes=self._coop_shapes(),
            tensor_shapes=self._tensor_shapes(),
            tensor_dimension=self._tensor_dimension(),
            features=self._feature_names(),
            quirks=self._quirks(),
        )

    def _alignment(self, addressing: Addressing) -> int:
        """Where arrays may start: vector accesses need 16 bytes, descriptors may need more."""
        if addressing is Addressing.DEVICE_ADDRESS:
            return 16
        return max(16, self.properties.properties.limits.minStorageBufferOffsetAlignment)

    def _quirks(self) -> tuple[Quirk, ...]:
        """Vulkan lets drivers be 2.5 ULP off in division; those that run on the CPU are exact."""
        if self.properties.properties.deviceType == constants.VK_PHYSICAL_DEVICE_TYPE_CPU:
            return ()
        return (
            Quirk(
                INEXACT_DIVISION,
                link="https://docs.vulkan.org/spec/latest/appendices/spirvenv.html",
                removal="a driver promises correctly rounded OpFDiv and Sqrt, and a query says so",
                probe="`vkjit doctor --only pointwise` with the correction taken out; whether Fma "
                "rounds once, which makes the correction short, is asked when the device is opened",
            ),
        )

    def _addressing(self) -> Addressing:
        able = "bufferDeviceAddress" in self.enabled
        asked = os.environ.get("VKJIT_VULKAN_ADDRESSING")
        if not asked:
            return Addressing.DEVICE_ADDRESS if able else Addressing.DESCRIPTOR
        values = [a.value for a in Addressing]
        if asked not in values:
            raise ConfigError(
                f"VKJIT_VULKAN_ADDRESSING: got {asked!r}, expected one of {', '.join(values)}"
            )
        if asked == Addressing.DEVICE_ADDRESS.value and not able:
            raise ConfigError(
                "VKJIT_VULKAN_ADDRESSING: the device has no buffer addresses; unset the variable"
            )
        return Addressing(asked)

    def _arithmetic(self) -> frozenset[ScalarType]:
        by_feature = {
            "shaderFloat16": F16,
            "shaderInt8": I8,
            "shaderInt16": I16,
            "shaderInt64": I64,
            "shaderFloat64": F64,
        }
        return frozenset({F32, I32, *(t for f, t in by_feature.items() if f in self.enabled)})

    def _storage(
        self, addressing: Addressing, arithmetic: frozenset[ScalarType]
    ) -> frozenset[ScalarType]:
        found = {F32, I32} | (arithmetic & {I64, F64})
        if "storageBuffer8BitAccess" in self.enabled:
            found.add(I8)
        if "storageBuffer16BitAccess" in self.enabled:
            found |= {I16, F16, BF16}
        if addressing is Addressing.DEVICE_ADDRESS:
            # Pointers to narrow types count as uses of them beyond loads and stores.
            needs = {I8: I8, I16: I16, F16: F16, BF16: I16}
            found = {t for t in found if needs.get(t, F32) in arithmetic}
        return frozenset(found)

    def _subgroup_has(self, operation: str) -> bool:
        bit = getattr(constants, f"VK_SUBGROUP_FEATURE_{operation}_BIT")
        in_compute = self.v11.subgroupSupportedStages & _COMPUTE
        return bool(in_compute and self.v11.subgroupSupportedOperations & bit)

    def _subgroup_sizes(self) -> tuple[int, ...]:
        """The sizes that a kernel may require, the default one first."""
        default: int = self.v11.subgroupSize
        if "subgroupSizeControl" not in self.enabled or self.v13 is None:
            return (default,)
        if not self.v13.requiredSubgroupSizeStages & _COMPUTE:
            return (default,)
        low, high = self.v13.minSubgroupSize, self.v13.maxSubgroupSize
        powers = [1 << n for n in range(8) if low <= 1 << n <= high and 1 << n != default]
        return (default, *powers)

    def _coop_shapes(self) -> tuple[CoopShape, ...]:
        if not {"cooperativeMatrix", "vulkanMemoryModel"} <= self.enabled:
            return ()
        functions = self._instance.functions
        shapes: list[CoopShape] = []
        for entry in listed(
            functions.vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR,
            "VkCooperativeMatrixPropertiesKHR",
            self._physical,
        ):
            a, b, c = map(self._component, (entry.AType, entry.BType, entry.CType))
            is_plain = entry.CType == entry.ResultType and not entry.saturatingAccumulation
            is_subgroup = entry.scope == constants.VK_SCOPE_SUBGROUP_KHR
            if a is None or b is None or c is None or not is_plain or not is_subgroup:
                continue
            shapes.append(CoopShape(a, b, c, entry.MSize, entry.NSize, entry.KSize))
        return tuple(shapes)

    def _component(self, kind: int) -> ScalarType | None:
        """The element type of matrices of a ``VkComponentTypeKHR``, if they can be used."""
        elem = _COMPONENTS.get(kind)
        return None if elem is BF16 and "bfloat16Matrix" not in self.enabled else elem

    def _tensor_shapes(self) -> tuple[TensorShape, ...]:
        if not {"cooperativeMatrix", "vulkanMemoryModel"} <= self.enabled:
            return ()
        functions = self._instance.functions
        return tensors.shapes(functions, self._physical, self._component, self.enabled)

    def _tensor_dimension(self) -> int:
        if not self.enabled & tensors.FEATURES.keys():
            return 0
        return tensors.largest_dimension(self._instance.functions, self._physical)

    def _feature_names(self) -> frozenset[str]:
        names = set(self._float_controls())
        by_feature = {
            "shaderBufferFloat32AtomicAdd": "atomic_add_f32",
            "shaderBufferFloat64AtomicAdd": "atomic_add_f64",
            "shaderSharedFloat32AtomicAdd": "atomic_add_shared_f32",
            "shaderSharedFloat64AtomicAdd": "atomic_add_shared_f64",
            "shaderBufferInt64Atomics": "atomic_add_i64",
            "bfloat16Matrix": "bfloat16_matrix",
            **tensors.FEATURES,
        }
        names.update(n for f, n in by_feature.items() if f in self.enabled)
        names.update(f"subgroup_{o.lower()}" for o in ("SHUFFLE", "VOTE") if self._subgroup_has(o))
        return frozenset(names)

    def _float_controls(self) -> list[str]:
        """The modes that can be set for each width apart from the others."""
        v12, everywhere = self.v12, constants.VK_SHADER_FLOAT_CONTROLS_INDEPENDENCE_ALL
        sources = {
            "signed_zero_inf_nan_preserve": ("shaderSignedZeroInfNanPreserve", everywhere),
            "denorm_preserve": ("shaderDenormPreserve", v12.denormBehaviorIndependence),
            "rounding_mode_rte": ("shaderRoundingModeRTE", v12.roundingModeIndependence),
        }
        names: list[str] = []
        for name, (member, independence) in sources.items():
            has = {bits: bool(getattr(v12, f"{member}Float{bits}")) for bits in (16, 32, 64)}
            if independence != everywhere and not all(has.values()):
                # Widths that must agree cannot: only the one that stands alone may be set.
                only_32 = constants.VK_SHADER_FLOAT_CONTROLS_INDEPENDENCE_32_BIT_ONLY
                has = {32: has[32] and independence == only_32}
            names += [f"{name}_f{bits}" for bits, present in has.items() if present]
        return names
