"""What to do about a stage that failed."""

from __future__ import annotations

from vkjit.doctor.report import StageResult
from vkjit.errors import DeviceError, OutOfMemoryError

_ADDRESSING = (
    "Try VKJIT_VULKAN_ADDRESSING=descriptor: if that passes, buffer addresses are at fault."
)
_VALIDATION = (
    "Try VKJIT_VULKAN_VALIDATION=1 (needs the Khronos validation layers): it names misuse and "
    "missing barriers."
)
_CACHE = "Try VKJIT_CACHE=0: if that passes, delete the cache folder that `vkjit info` names."
_REPORT = (
    "Update the driver; if the fault stays, open an issue of vkjit with the report file. Until "
    "then VKJIT_DEVICE=cpu computes without this device."
)
_QUIRK = (
    "If only this driver is wrong, it becomes a quirk: a named entry in the device's target that "
    "avoids what is broken. The report has what such an entry needs."
)
_LOWER = (
    "Look at the first stage that failed: later ones build on it and often fail for its reason."
)
_OF_STAGE = {
    "transfer": (_ADDRESSING,),
    "order": (_VALIDATION, _ADDRESSING),
    "pointwise": (_QUIRK,),
    "primitives": (_ADDRESSING, _QUIRK),
    "reductions": (_QUIRK,),
    "indexing": (_ADDRESSING,),
    "products": (
        "The name in a mismatch ends with the schedule: if only one kind is wrong, the others "
        "still compute; `vkjit tune` admits none that is wrong.",
        _QUIRK,
    ),
    "memory": ("VKJIT_VULKAN_MEMORY_LIMIT bounds what is taken.",),
}
_LOST = (
    "The device was lost. Watch dogs kill kernels of more than about two seconds (see the kernel "
    "log: `dmesg`); VKJIT_SUBMIT_SECONDS bounds what is submitted at once.",
    _VALIDATION,
)


def for_stage(result: StageResult) -> list[str]:
    """Sentences for people; none for a stage that passed."""
    if not result.failed:
        return []
    first = list(_LOST) if result.device_lost else [*_OF_STAGE.get(result.name, ()), _CACHE]
    lower = [] if result.number <= 3 else [_LOWER]
    return [*lower, *first, _REPORT]


def device_is_gone(fault: BaseException) -> bool:
    """Whether the device can be expected to fail from now on."""
    return isinstance(fault, DeviceError) and not isinstance(fault, OutOfMemoryError)
