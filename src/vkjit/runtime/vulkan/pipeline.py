"""Compute pipelines: one per module and subgroup size, compiled in parallel, cached on disk."""

from __future__ import annotations

import os
import threading
import time
from array import array as words_array
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, final

from vkjit.errors import DeviceError, InternalError, MissingRuleError
from vkjit.lowering.kernel.nodes import Kernel
from vkjit.lowering.kernel.types import Space
from vkjit.lowering.kernel.walk import all_nodes
from vkjit.lowering.target import Addressing
from vkjit.runtime.vulkan.driver_cache import DriverCache
from vkjit.runtime.vulkan.features import Capabilities
from vkjit.runtime.vulkan.ffi import (
    NULL,
    Handle,
    array,
    constants,
    ffi,
    result_name,
    struct,
)
from vkjit.runtime.vulkan.logical import LogicalDevice
from vkjit.runtime.vulkan.modules import Modules

COMPUTE: int = constants.VK_SHADER_STAGE_COMPUTE_BIT
# VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT, of Vulkan 1.3.
_FULL_SUBGROUPS = 2
_DISPATCH_BASE = 0x10  # VK_PIPELINE_CREATE_DISPATCH_BASE_BIT, of Vulkan 1.1
_SLOW_SECONDS = 0.02  # compiling that took longer makes the cache file worth writing
_SAVED_AT_ONCE = 1.0  # seconds: not to be lost should the process be killed

Key = tuple[bytes, int, bool]


@final
@dataclass(frozen=True, slots=True)
class Pipeline:
    """A compiled kernel. ``sets`` is the layout of its descriptor set, or NULL."""

    handle: Handle
    layout: Handle
    sets: Handle


@final
class Pipelines:
    """All pipelines of a device, by their words."""

    def __init__(self, device: LogicalDevice, capabilities: Capabilities) -> None:
        self._device = device
        self._capabilities = capabilities
        self._made: dict[Key, Pipeline] = {}
        self._ahead: dict[Key, Future[Pipeline]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._layouts: dict[int, tuple[Handle, Handle]] = {}
        self._lock = threading.RLock()  # of the layouts, which threads that compile share
        target = capabilities.target
        self._addressed = target.addressing is Addressing.DEVICE_ADDRESS
        self._modules = Modules(target, strict=device.instance.validation)
        self._cache = DriverCache(device, capabilities)
        self._worth_saving = False

    def get(self, kernels: Sequence[Kernel], sliced: Collection[int] = ()) -> list[Pipeline]:
        """The pipelines of ``kernels``, in order; new ones are compiled at the same time.

        Those at the positions ``sliced`` can be dispatched in slices of their grid.

        Raises:
            InternalError: a kernel exceeds a limit of the device, or its module is not valid.
            DeviceError: the driver refused a module; the message names the kernel.
        """
        keys: dict[int, Key] = {}
        begun: dict[Key, Future[Pipeline]] = {}
        started = time.perf_counter()
        pool = ThreadPoolExecutor(os.cpu_count() or 1)
        try:
            for kernel, positions in _longest_first(kernels):
                words = self._words(kernel)
                for position in positions:
                    is_sliced = position in sliced
                    key = keys[position] = _key(kernel, words, is_sliced=is_sliced)
                    if key not in self._made and key not in begun:
                        # The driver gives up Python's lock: it compiles while this emits.
                        begun[key] = self._ahead.pop(key, None) or pool.submit(
                            self._create, kernel, words, is_sliced=is_sliced
                        )
        finally:
            pool.shutdown()
            made = {k: f.result() for k, f in begun.items() if f.exception() is None}
            self._made.update(made)
        for future in begun.values():
            future.result()
        self._note(time.perf_counter() - started if begun else 0.0)
        return [self._made[keys[position]] for position in range(len(kernels))]

    def begin(self, kernels: Sequence[Kernel]) -> list[Future[Pipeline]]:
        """Emits ``kernels``, begins to compile those that are new, and returns what goes on.

        ``get`` waits for them and says what failed.

        Raises:
            InternalError: a kernel exceeds a limit of the device, or its module is not valid.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(os.cpu_count() or 1)
        found: list[Future[Pipeline]] = []
        for kernel in kernels:
            words = self._words(kernel)
            key = _key(kernel, words, is_sliced=False)
            if key in self._made:
                continue
            if key not in self._ahead:
                task = self._pool.submit(self._create, kernel, words, is_sliced=False)
                self._ahead[key] = task
                self._worth_saving = True
            found.append(self._ahead[key])
        return found

    def _words(self, kernel: Kernel) -> words_array[int]:
        check_limits(kernel, self._capabilities)
        return self._modules.of(kernel)

    def _note(self, spent: float) -> None:
        """Saves the driver's cache now or later, after so many seconds of compiling."""
        self._worth_saving |= spent > _SLOW_SECONDS
        if spent > _SAVED_AT_ONCE:
            self.save()

    def _create(self, kernel: Kernel, words: words_array[int], *, is_sliced: bool) -> Pipeline:
        layout, sets = self._layout(len(kernel.buffers))
        device = self._device
        code = ffi.from_buffer("uint32_t[]", words)
        info = struct("VkShaderModuleCreateInfo", codeSize=len(words) * 4, pCode=code)
        module = device.create("ShaderModule", info)
        try:
            info = struct(
                "VkComputePipelineCreateInfo",
                pNext=self._unchecked(),
                flags=_DISPATCH_BASE if is_sliced else 0,
                stage=self._stage(kernel, module),
                layout=layout,
            )
            handle = ffi.new("VkPipeline *")
            create = device.functions.vkCreateComputePipelines
            result = create(device.handle, self._cache.handle, 1, info, NULL, handle)
        finally:
            device.destroy("ShaderModule", module)
        if result != 0:
            raise DeviceError(
                f"vulkan: the driver refused kernel {kernel.name} with {result_name(result)}"
            )
        device.count("Pipeline", 1)
        return Pipeline(handle[0], layout, sets)

    def _stage(self, kernel: Kernel, module: Handle) -> dict[str, Any]:
        following, flags = NULL, 0
        if kernel.subgroup and "subgroupSizeControl" in self._capabilities.enabled:
            sizes = self._capabilities.target.subgroup_sizes
            if len(sizes) > 1:
                following = struct(
                    "VkPipelineShaderStageRequiredSubgroupSizeCreateInfo",
                    requiredSubgroupSize=kernel.subgroup,
                )
            if kernel.workgroup[0] % kernel.subgroup == 0:
                flags = _FULL_SUBGROUPS if "computeFullSubgroups" in self._enabled else 0
        return {
            "sType": constants.VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO,
            "pNext": following,
            "flags": flags,
            "stage": COMPUTE,
            "module": module,
            "pName": ffi.new("char[]", b"main"),
        }

    def _unchecked(self) -> Any:
        """No bounds checks by the driver: kernels of this compiler stay inside their arrays."""
        if "pipelineRobustness" not in self._enabled:
            return NULL
        off: int = constants.VK_PIPELINE_ROBUSTNESS_BUFFER_BEHAVIOR_DISABLED_EXT
        images: int = constants.VK_PIPELINE_ROBUSTNESS_IMAGE_BEHAVIOR_DISABLED_EXT
        return struct(
            "VkPipelineRobustnessCreateInfoEXT",
            storageBuffers=off,
            uniformBuffers=off,
            vertexInputs=off,
            images=images,
        )

    @property
    def _enabled(self) -> frozenset[str]:
        return self._capabilities.enabled

    def _layout(self, buffers: int) -> tuple[Handle, Handle]:
        """Pipeline layout and set layout: one pushed address, or a binding per buffer."""
        count = 0 if self._addressed else buffers
        with self._lock:
            found = self._layouts.get(count)
            if found is None:
                found = self._layouts[count] = self._make_layout(count)
            return found

    def _make_layout(self, count: int) -> tuple[Handle, Handle]:
        device = self._device
        if self._addressed:
            pushed = struct("VkPushConstantRange", stageFlags=COMPUTE, size=8)
            info = struct(
                "VkPipelineLayoutCreateInfo", pushConstantRangeCount=1, pPushConstantRanges=pushed
            )
            return device.create("PipelineLayout", info), NULL
        kind = constants.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER
        bindings = [
            {"binding": i, "descriptorType": kind, "descriptorCount": 1, "stageFlags": COMPUTE}
            for i in range(count)
        ]
        info = struct(
            "VkDescriptorSetLayoutCreateInfo",
            bindingCount=count,
            pBindings=array("VkDescriptorSetLayoutBinding", bindings),
        )
        sets = device.create("DescriptorSetLayout", info)
        info = struct(
            "VkPipelineLayoutCreateInfo",
            setLayoutCount=1,
            pSetLayouts=array("VkDescriptorSetLayout", [sets]),
        )
        return device.create("PipelineLayout", info), sets

    def save(self) -> None:
        """Writes the driver's cache to disk if compiling took a while since the last time."""
        if self._worth_saving:
            self._worth_saving = False
            self._cache.save()

    def disown(self) -> None:
        """In a forked process: nothing is left to save."""
        self._worth_saving = False

    def close(self) -> None:
        """Saves the cache and destroys everything; nothing may be running."""
        if self._pool is not None:
            self._pool.shutdown()
        ahead = {k: f.result() for k, f in self._ahead.items() if f.exception() is None}
        self._made.update(ahead)
        self._ahead.clear()
        self.save()
        for pipeline in self._made.values():
            self._device.destroy("Pipeline", pipeline.handle)
        for layout, sets in self._layouts.values():
            self._device.destroy("PipelineLayout", layout)
            if sets != NULL:
                self._device.destroy("DescriptorSetLayout", sets)
        self._made.clear()
        self._layouts.clear()
        self._cache.close()


def _key(kernel: Kernel, words: words_array[int], *, is_sliced: bool) -> Key:
    return words.tobytes(), kernel.subgroup or 0, is_sliced


def _longest_first(kernels: Sequence[Kernel]) -> list[tuple[Kernel, list[int]]]:
    """Distinct kernels and where they stand; none that takes long is begun last."""
    positions: dict[Kernel, list[int]] = {}
    for position, kernel in enumerate(kernels):
        positions.setdefault(kernel, []).append(position)
    length = {kernel: sum(1 for _ in all_nodes(kernel.body)) for kernel in positions}
    order = sorted(positions, key=length.__getitem__, reverse=True)
    return [(kernel, positions[kernel]) for kernel in order]


def check_limits(kernel: Kernel, capabilities: Capabilities) -> None:
    """Refuses a kernel that the device cannot run.

    Raises:
        InternalError: the schedule ignored a limit of the target.
        MissingRuleError: with descriptors, the kernel has more arrays than can be bound.
    """
    target = capabilities.target
    described = target.addressing is Addressing.DESCRIPTOR
    if described and len(kernel.buffers) > capabilities.max_bindings:
        raise MissingRuleError(
            f"vulkan: kernel {kernel.name} has {len(kernel.buffers)} arrays, {target.name} binds "
            f"at most {capabilities.max_bindings}; use device addresses (unset "
            "VKJIT_VULKAN_ADDRESSING) or the cpu"
        )
    x, y, z = kernel.workgroup
    shared = sum(s.length * s.elem.bytes for s in kernel.scratch if s.space is Space.SHARED)
    faults: list[str] = []
    if any(n > limit for n, limit in zip(kernel.grid, target.max_grid, strict=True)):
        faults.append(f"grid {kernel.grid} over {target.max_grid}")
    if any(n > limit for n, limit in zip(kernel.workgroup, target.max_workgroup, strict=True)):
        faults.append(f"workgroup {kernel.workgroup} over {target.max_workgroup}")
    if x * y * z > target.max_invocations:
        faults.append(f"{x * y * z} invocations over {target.max_invocations}")
    if shared > target.shared_bytes:
        faults.append(f"{shared} bytes of shared memory over {target.shared_bytes}")
    if kernel.subgroup and kernel.subgroup not in target.subgroup_sizes:
        faults.append(f"subgroup {kernel.subgroup} not in {target.subgroup_sizes}")
    if faults:
        raise InternalError(f"vulkan: kernel {kernel.name}: {', '.join(faults)}")
