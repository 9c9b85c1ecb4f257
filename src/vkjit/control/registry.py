"""Every primitive that runs programs; for tests and documentation, never for passes."""

from __future__ import annotations

from vkjit.control.branch import Cond
from vkjit.control.checkpoint import Checkpoint
from vkjit.control.inline import Inlined
from vkjit.control.loop import While
from vkjit.control.offload import Transfer
from vkjit.control.scan import Scan
from vkjit.ir.primitive import Primitive

CONTROL: tuple[type[Primitive], ...] = (Scan, While, Cond, Inlined, Checkpoint, Transfer)
"""What may occur in a program besides the operations of ``vkjit.ops.registry``."""
