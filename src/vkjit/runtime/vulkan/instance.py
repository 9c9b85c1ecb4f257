"""The Vulkan instance: one per process, with the validation layer on request.

``VKJIT_VULKAN_VALIDATION=1`` turns on the Khronos layer with synchronisation validation; what it
reports is collected and raised as ``DeviceError`` at the next check.
"""

from __future__ import annotations

import functools
import os
from typing import Any, final

from vkjit.errors import DeviceError
from vkjit.runtime.vulkan.ffi import (
    NULL,
    Functions,
    Handle,
    array,
    check,
    constants,
    ffi,
    listed,
    loader,
    strings,
    struct,
    text,
)
from vkjit.runtime.vulkan.manifests import where_drivers_come_from

_LAYER = "VK_LAYER_KHRONOS_validation"
_ANY_VERSION = 0xFFFFFFFF
_API_1_2 = 1 << 22 | 2 << 12
_API_1_3 = 1 << 22 | 3 << 12
_MESSAGES = (
    constants.VK_DEBUG_UTILS_MESSAGE_SEVERITY_WARNING_BIT_EXT
    | constants.VK_DEBUG_UTILS_MESSAGE_SEVERITY_ERROR_BIT_EXT
)


def validation_wanted() -> bool:
    """Whether the environment asks for the validation layer."""
    return os.environ.get("VKJIT_VULKAN_VALIDATION", "0") not in ("", "0")


@functools.cache
def instance() -> Instance:
    """The instance of this process, made at the first call and kept, like the loader itself."""
    return Instance(validation=validation_wanted())


@final
class Instance:
    """A ``VkInstance``. ``messages`` are those of the validation layer, oldest first.

    ``received`` counts them all, also those raised since.
    """

    def __init__(self, *, validation: bool) -> None:
        self.validation = validation
        self.messages: list[str] = []
        self.received = 0
        # The version of the specification that the layer knows; without a layer, no limit.
        self.layer_version = _ANY_VERSION
        self._callback: Any = None
        self.handle = self._create()
        # Functions of the instance and the loader's own.
        self.functions = Functions(functools.partial(loader.vkGetInstanceProcAddr, self.handle))
        if validation:
            self._listen()

    def _create(self) -> Handle:
        application = struct(
            "VkApplicationInfo", pEngineName=ffi.new("char[]", b"vkjit"), apiVersion=_API_1_3
        )
        layers: list[str] = []
        extensions: list[str] = []
        following = NULL
        if self.validation:
            self.layer_version = _layer_version()
            # Without it, recent layers ignore what shaders access through descriptors.
            os.environ["VK_LAYER_SYNCVAL_SHADER_ACCESSES_HEURISTIC"] = "true"
            layers = [_LAYER]
            extensions = ["VK_EXT_debug_utils", "VK_EXT_validation_features"]
            enabled = [constants.VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT]
            following = struct(
                "VkValidationFeaturesEXT",
                enabledValidationFeatureCount=1,
                pEnabledValidationFeatures=array("VkValidationFeatureEnableEXT", enabled),
            )
        info = struct(
            "VkInstanceCreateInfo",
            pNext=following,
            pApplicationInfo=application,
            enabledLayerCount=len(layers),
            ppEnabledLayerNames=strings(layers),
            enabledExtensionCount=len(extensions),
            ppEnabledExtensionNames=strings(extensions),
        )
        handle = ffi.new("VkInstance *")
        result = loader.vkCreateInstance(info, NULL, handle)
        if result == constants.VK_ERROR_INCOMPATIBLE_DRIVER:
            raise DeviceError(
                "vulkan: the loader found no driver that works; drivers come from "
                f"{where_drivers_come_from()}; install one (Debian: mesa-vulkan-drivers)"
            )
        check(result, "vkCreateInstance")
        return handle[0]

    def _listen(self) -> None:
        """Has the layer call back with each warning and error."""

        def receive(severity: int, kind: int, data: Any, user: Any) -> int:
            self.received += 1
            self.messages.append(f"{text(data.pMessageIdName)}: {text(data.pMessage)}")
            return 0

        signature = (
            "VkBool32(VkDebugUtilsMessageSeverityFlagBitsEXT, VkDebugUtilsMessageTypeFlagsEXT, "
            "const VkDebugUtilsMessengerCallbackDataEXT *, void *)"
        )
        self._callback = ffi.callback(signature, receive)
        info = struct(
            "VkDebugUtilsMessengerCreateInfoEXT",
            messageSeverity=_MESSAGES,
            messageType=constants.VK_DEBUG_UTILS_MESSAGE_TYPE_VALIDATION_BIT_EXT,
            pfnUserCallback=self._callback,
        )
        messenger = ffi.new("VkDebugUtilsMessengerEXT *")
        create = self.functions.vkCreateDebugUtilsMessengerEXT
        check(create(self.handle, info, NULL, messenger), "vkCreateDebugUtilsMessengerEXT")

    def raise_messages(self, what: str) -> None:
        """Raises what the validation layer reported since the last call, if anything."""
        if self.messages:
            reported, self.messages = self.messages, []
            raise DeviceError(f"vulkan: validation of {what}:\n" + "\n".join(reported))

    def physical_devices(self) -> list[Handle]:
        """All devices in the order of the loader."""
        enumerate_devices = self.functions.vkEnumeratePhysicalDevices
        return list(listed(enumerate_devices, "VkPhysicalDevice", self.handle))

    def refusal(self, physical: Handle) -> str | None:
        """Why a device cannot be used, or None."""
        properties = ffi.new("VkPhysicalDeviceProperties *")
        self.functions.vkGetPhysicalDeviceProperties(physical, properties)
        version: int = properties.apiVersion
        if version < _API_1_2:
            return f"Vulkan {version >> 22}.{version >> 12 & 0x3FF}, expected 1.2 or later"
        return None


def _layer_version() -> int:
    """The version of the specification that the validation layer knows."""
    known = listed(loader.vkEnumerateInstanceLayerProperties, "VkLayerProperties")
    for layer in known:
        if text(layer.layerName) == _LAYER:
            version: int = layer.specVersion
            return version
    raise DeviceError(
        f"vulkan: VKJIT_VULKAN_VALIDATION is set but {_LAYER} is not installed; install it "
        "(Debian: vulkan-validationlayers) or unset the variable"
    )
