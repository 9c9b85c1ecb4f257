"""Buffers and scratch memory: declaration, addressing, loads, stores and atomics.

Buffers are reached in one of two ways, the target's choice:

- DEVICE_ADDRESS: one push constant holds the address of a table with the address of each buffer.
  Narrow elements need their arithmetic capability here, even if they are only copied.
- DESCRIPTOR: buffer ``i`` is the storage buffer at set 0, binding ``i``. Here validation layers see
  every access. All variables are ``Aliased``: a donated output shares memory with its input.

Vectors: device addresses take a vector at any element. A descriptor gives one typed view per width,
which starts at multiples of it. Shared arrays whose vector accesses are all aligned are declared as
arrays of vectors. Elsewhere lanes are accessed one by one; raw words are always accessed whole.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import final

from vkjit.errors import InternalError
from vkjit.lowering.kernel.nodes import AtomicAdd, Load, Store, Value
from vkjit.lowering.kernel.types import (
    F16,
    F32,
    F64,
    I1,
    I32,
    I64,
    Access,
    Buffer,
    Memory,
    ScalarType,
    Scratch,
    Space,
    Type,
    VecType,
    lanes_of,
    scalar_of,
)
from vkjit.lowering.spirv.alignment import Multiples, shared_widths
from vkjit.lowering.spirv.arithmetic import extract, uniform
from vkjit.lowering.spirv.context import STORAGE, Context
from vkjit.lowering.spirv.grammar import (
    AddressingModel,
    Capability,
    Decoration,
    MemoryAccess,
    MemoryModel,
    Op,
    Scope,
    StorageClass,
)
from vkjit.lowering.spirv.quotient import quotient
from vkjit.lowering.target import Addressing

_FLOAT_ATOMICS = {
    F16: (Capability.AtomicFloat16AddEXT, "SPV_EXT_shader_atomic_float16_add"),
    F32: (Capability.AtomicFloat32AddEXT, "SPV_EXT_shader_atomic_float_add"),
    F64: (Capability.AtomicFloat64AddEXT, "SPV_EXT_shader_atomic_float_add"),
}


@final
class Memories:
    """Pointers to the buffers and scratch arrays of one kernel.

    ``coherent`` are the buffers that the kernel both reads and writes across barriers: their
    accesses must be seen by the whole workgroup.
    """

    def __init__(self, ctx: Context, multiples: Multiples, coherent: frozenset[Buffer]) -> None:
        self.coherent = coherent
        self._ctx = ctx
        self._multiples = multiples
        self._addressed = ctx.target.addressing is Addressing.DEVICE_ADDRESS
        self._bases: dict[Memory, int] = {}
        self._views: dict[tuple[Buffer, Type], int] = {}
        self._pushed = 0
        self._widths = shared_widths(ctx.kernel, multiples)

    def declare(self) -> None:
        """Declares all memory; stands at the start of the entry block."""
        module = self._ctx.module
        for scratch in self._ctx.kernel.scratch:
            if scratch.space is Space.LOCAL:
                pointer = self._scratch_pointer(scratch)
                self._bases[scratch] = module.value(Op.Variable, pointer, StorageClass.Function)
        for scratch in self._ctx.kernel.scratch:
            if scratch.space is Space.SHARED:
                pointer = self._scratch_pointer(scratch)
                self._bases[scratch] = module.global_variable(pointer, StorageClass.Workgroup)
        if self._addressed and self._ctx.kernel.buffers:
            self._load_addresses(self._ctx.kernel.buffers)
        for memory, base in self._bases.items():
            module.name(base, memory.name)

    def _scratch_pointer(self, scratch: Scratch) -> int:
        module, width = self._ctx.module, self._widths.get(scratch, 1)
        length = module.uint(scratch.length // width)
        type_ = VecType(scratch.elem, width) if width > 1 else scratch.elem
        array = module.unique(Op.TypeArray, self._ctx.type(type_), length)
        return module.pointer(_storage(scratch, addressed=self._addressed), array)

    @contextmanager
    def function(self, buffers: Sequence[Buffer]) -> Generator[None]:
        """Inside a function of its own ``buffers`` are reached by addresses read there again."""
        outer, self._bases = self._bases, {}
        if self._addressed and buffers:
            self._load_addresses(buffers)
        try:
            yield
        finally:
            self._bases = outer

    def _load_addresses(self, wanted: Sequence[Buffer]) -> None:
        """Reads the addresses of some buffers from the argument table whose address is pushed."""
        module, buffers = self._ctx.module, self._ctx.kernel.buffers
        module.require(Capability.PhysicalStorageBufferAddresses)
        module.addressing = AddressingModel.PhysicalStorageBuffer64
        physical = StorageClass.PhysicalStorageBuffer
        types = tuple(module.pointer(physical, self._block(b, b.elem)) for b in buffers)
        read_only = (Decoration.NonWritable,)
        table = module.block(types, tuple(8 * i for i in range(len(types))), read_only)
        table_pointer = module.pointer(physical, table)
        pushed = module.pointer(StorageClass.PushConstant, module.block((table_pointer,), (0,)))
        if not self._pushed:
            self._pushed = module.global_variable(pushed, StorageClass.PushConstant)
        member = module.pointer(StorageClass.PushConstant, table_pointer)
        chain = module.value(Op.AccessChain, member, self._pushed, module.uint(0))
        address = module.value(Op.Load, table_pointer, chain)
        for i, (buffer, type_) in enumerate(zip(buffers, types, strict=True)):
            if buffer not in wanted:
                continue
            pointer = module.pointer(physical, type_)
            entry = module.value(Op.AccessChain, pointer, address, module.uint(i))
            self._bases[buffer] = module.value(Op.Load, type_, entry, MemoryAccess.Aligned, 8)

    def _block(self, buffer: Buffer, type_: ScalarType | VecType) -> int:
        """The struct around the unsized array of ``type_`` that shows a buffer."""
        ctx, elem = self._ctx, buffer.elem
        if elem.bits in STORAGE:
            ctx.module.require(STORAGE[elem.bits])
        if self._addressed:
            # The rules for 8 and 16 bit types forbid to hold and cast pointers to them, too.
            ctx.need_arithmetic(elem)
        nbytes = scalar_of(type_).bytes * lanes_of(type_)
        array = ctx.module.runtime_array(ctx.type(type_, arithmetic=False), nbytes)
        decorations: list[Decoration] = []
        if buffer.access is Access.READ:
            decorations.append(Decoration.NonWritable)
        if buffer in self.coherent and ctx.module.memory_model is MemoryModel.GLSL450:
            decorations.append(Decoration.Coherent)
        return ctx.module.block((array,), (0,), tuple(decorations))

    def _view(self, buffer: Buffer, type_: ScalarType | VecType) -> int:
        """The storage buffer variable that shows ``buffer`` as elements of ``type_``."""
        found = self._views.get((buffer, type_))
        if found is None:
            module = self._ctx.module
            pointer = module.pointer(StorageClass.StorageBuffer, self._block(buffer, type_))
            found = module.global_variable(pointer, StorageClass.StorageBuffer)
            self._views[buffer, type_] = found
            module.decorate(found, Decoration.DescriptorSet, 0)
            module.decorate(found, Decoration.Binding, self._ctx.kernel.buffers.index(buffer))
            module.decorate(found, Decoration.Aliased)
            words = "" if scalar_of(type_) is buffer.elem else "_words"
            lanes = f"_x{type_.lanes}" if isinstance(type_, VecType) else ""
            module.name(found, f"{buffer.name}{words}{lanes}")
        return found

    # -- pointers ---------------------------------------------------------------------------------

    def pointer(self, memory: Memory, index: int) -> int:
        """A pointer to the element at the index with id ``index``."""
        module = self._ctx.module
        type_ = self._ctx.type(memory.elem, arithmetic=isinstance(memory, Scratch))
        pointer = module.pointer(_storage(memory, addressed=self._addressed), type_)
        if isinstance(memory, Scratch):
            steps: tuple[int, ...] = (index,)
            if memory in self._widths:
                index_type, width = self._ctx.kernel.index_type, self._widths[memory]
                last = uniform(self._ctx, index_type, width - 1)
                lane = module.value(Op.BitwiseAnd, self._ctx.type(index_type), index, last)
                steps = (self._row(index, width), lane)
            return module.value(Op.AccessChain, pointer, self._bases[memory], *steps)
        base = self._bases[memory] if self._addressed else self._view(memory, memory.elem)
        return module.value(Op.AccessChain, pointer, base, module.uint(0), index)

    def _row(self, index: int, lanes: int) -> int:
        """The number of the vector of ``lanes`` that holds the element at ``index``."""
        index_type = self._ctx.kernel.index_type
        shift = uniform(self._ctx, index_type, lanes.bit_length() - 1)
        id_type = self._ctx.type(index_type)
        return self._ctx.module.value(Op.ShiftRightLogical, id_type, index, shift)

    def matrix(self, memory: Memory, index: Value, stride: Value) -> tuple[int, int]:
        """A pointer to a matrix and its stride, in elements or vectors as the memory is made of."""
        width = self._widths.get(memory)
        if width is None:
            return self.pointer(memory, self._ctx.use(index)), self._ctx.use(stride)
        type_ = self._ctx.type(VecType(memory.elem, width))
        pointer = self._ctx.module.pointer(_storage(memory, addressed=self._addressed), type_)
        row, rows = (quotient(self._ctx, self._multiples, v, width) for v in (index, stride))
        return self._ctx.module.value(Op.AccessChain, pointer, self._bases[memory], row), rows

    def alignment(self, memory: Memory, index: Value, nbytes: int) -> int:
        """The known alignment in bytes of an access of ``nbytes`` at ``index``: a power of two.

        Buffers start at multiples of 64 bytes at least, so only the index decides.
        """
        known = self._multiples.of(index) * memory.elem.bytes
        wanted = nbytes & -nbytes  # a vec3 needs the alignment of its largest power of two
        return max(min(known, wanted, 16), memory.elem.bytes)

    def operands(self, memory: Memory, alignment: int) -> tuple[int, ...]:
        """The memory operands of an access."""
        flags = 0
        literals: tuple[int, ...] = ()
        if isinstance(memory, Buffer) and self._addressed:
            flags |= MemoryAccess.Aligned
            literals = (alignment,)
        if self._ctx.module.memory_model is MemoryModel.Vulkan and self._is_shared(memory):
            flags |= MemoryAccess.NonPrivatePointer
        return (flags, *literals) if flags else ()

    def _is_shared(self, memory: Memory) -> bool:
        if isinstance(memory, Scratch):
            return memory.space is Space.SHARED
        return memory in self.coherent

    # -- loads ------------------------------------------------------------------------------------

    def load(self, node: Load) -> int:
        """A scalar, consecutive elements, or a gather; masked lanes read element 0 instead."""
        ctx = self._ctx
        index, mask = node.index, node.mask
        if isinstance(node.type, VecType):
            if isinstance(index.type, VecType) or (mask and isinstance(mask.type, VecType)):
                return self._load_lanes(node, node.type)
            position = self._guarded_index(index, mask)
            loaded = self._load_vector(node, node.type, position)
        else:
            position = self._guarded_index(index, mask)
            loaded = self._load_scalar(node.memory, position)
        if mask is None:
            return loaded
        zero = uniform(ctx, node.type, 0)
        return ctx.module.value(Op.Select, ctx.type(node.type), ctx.use(mask), loaded, zero)

    def _guarded_index(self, index: Value, mask: Value | None) -> int:
        position = self._ctx.use(index)
        if mask is None:
            return position
        return self._choose_index(self._ctx.use(mask), position, index)

    def _choose_index(self, mask: int, position: int, index: Value) -> int:
        elem = index.type.elem if isinstance(index.type, VecType) else index.type
        zero = uniform(self._ctx, elem, 0)
        return self._ctx.module.value(Op.Select, self._ctx.type(elem), mask, position, zero)

    def _load_scalar(self, memory: Memory, position: int) -> int:
        type_ = self._ctx.type(memory.elem, arithmetic=isinstance(memory, Scratch))
        operands = self.operands(memory, memory.elem.bytes)
        pointer = self.pointer(memory, position)
        return self._ctx.module.value(Op.Load, type_, pointer, *operands)

    def _load_vector(self, node: Load, type_: VecType, position: int) -> int:
        """Consecutive elements from ``position``, at once where the addressing allows it."""
        pointer = self._vector_pointer(node.memory, type_, node.index, position)
        if pointer is not None:
            spirv_type = self._ctx.type(type_, arithmetic=False)
            nbytes = type_.elem.bytes * type_.lanes
            alignment = self.alignment(node.memory, node.index, nbytes)
            operands = self.operands(node.memory, alignment)
            return self._ctx.module.value(Op.Load, spirv_type, pointer, *operands)
        index_type = node.index.type
        assert isinstance(index_type, ScalarType)
        self._check_lanes(node.memory, type_)
        lanes = [
            self._load_scalar(node.memory, self._plus(position, index_type, lane))
            for lane in range(type_.lanes)
        ]
        return self._ctx.module.value(Op.CompositeConstruct, self._ctx.type(type_), *lanes)

    def _check_lanes(self, memory: Memory, type_: VecType) -> None:
        if type_.elem is not memory.elem:
            raise InternalError(
                f"spirv: {type_} in {memory.name} of {memory.elem} in kernel "
                f"{self._ctx.kernel.name}: expected an index known to be aligned to raw words"
            )

    def _vector_pointer(
        self, memory: Memory, type_: VecType, index: Value, position: int
    ) -> int | None:
        """A pointer to a whole vector, or None where lanes must be accessed one by one."""
        module = self._ctx.module
        spirv_type = self._ctx.type(type_, arithmetic=False)
        if isinstance(memory, Scratch):
            if memory not in self._widths:
                return None
            row = quotient(self._ctx, self._multiples, index, type_.lanes)
            pointer = module.pointer(StorageClass.Workgroup, spirv_type)
            return module.value(Op.AccessChain, pointer, self._bases[memory], row)
        if self._addressed:
            pointer = module.pointer(StorageClass.PhysicalStorageBuffer, spirv_type)
            return module.value(Op.Bitcast, pointer, self.pointer(memory, position))
        lanes = type_.lanes * type_.elem.bytes // memory.elem.bytes
        is_view = type_.lanes in (2, 4) and self._multiples.of(index) >= lanes
        if not is_view or (memory.length % lanes and type_.elem is memory.elem):
            return None
        row = self._row(position, lanes)
        pointer = module.pointer(StorageClass.StorageBuffer, spirv_type)
        view = self._view(memory, type_)
        return module.value(Op.AccessChain, pointer, view, module.uint(0), row)

    def _load_lanes(self, node: Load, type_: VecType) -> int:
        """A gather, or consecutive elements under a mask per lane."""
        ctx = self._ctx
        values: list[int] = []
        for lane in range(type_.lanes):
            position = self._lane_index(node.index, lane)
            mask = None if node.mask is None else self._lane_mask(node.mask, lane)
            if mask is not None:
                position = self._choose_index(mask, position, node.index)
            value = self._load_scalar(node.memory, position)
            if mask is not None:
                zero = uniform(ctx, type_.elem, 0)
                value = ctx.module.value(Op.Select, ctx.type(type_.elem), mask, value, zero)
            values.append(value)
        return ctx.module.value(Op.CompositeConstruct, ctx.type(type_), *values)

    def _lane_index(self, index: Value, lane: int) -> int:
        position = self._ctx.use(index)
        if isinstance(index.type, VecType):
            return extract(self._ctx, position, index.type.elem, lane)
        assert isinstance(index.type, ScalarType)
        return self._plus(position, index.type, lane)

    def _lane_mask(self, mask: Value, lane: int) -> int:
        is_vector = isinstance(mask.type, VecType)
        condition = self._ctx.use(mask)
        return extract(self._ctx, condition, I1, lane) if is_vector else condition

    def _plus(self, position: int, index_type: ScalarType, amount: int) -> int:
        if amount == 0:
            return position
        ctx = self._ctx
        return ctx.module.value(
            Op.IAdd, ctx.type(index_type), position, uniform(ctx, index_type, amount)
        )

    # -- stores -----------------------------------------------------------------------------------

    def store(self, node: Store) -> None:
        """A scalar, consecutive elements, or a scatter; masked lanes are skipped by a branch."""
        type_, mask = node.value.type, node.mask
        is_scatter = isinstance(node.index.type, VecType)
        if isinstance(type_, VecType) and (
            is_scatter or (mask is not None and isinstance(mask.type, VecType))
        ):
            self._store_lanes(node, type_)
        elif mask is None:
            self._store_whole(node)
        else:
            with where(self._ctx, self._ctx.use(mask)):
                self._store_whole(node)

    def _store_whole(self, node: Store) -> None:
        type_, ctx = node.value.type, self._ctx
        position = ctx.use(node.index)
        if not isinstance(type_, VecType):
            value = ctx.use(node.value, arithmetic=False)
            self._store_scalar(node.memory, position, value)
            return
        pointer = self._vector_pointer(node.memory, type_, node.index, position)
        if pointer is None:
            self._store_lanes(node, type_)
            return
        alignment = self.alignment(node.memory, node.index, type_.elem.bytes * type_.lanes)
        value = ctx.use(node.value, arithmetic=False)
        ctx.module.effect(Op.Store, pointer, value, *self.operands(node.memory, alignment))

    def _store_scalar(self, memory: Memory, position: int, value: int) -> None:
        operands = self.operands(memory, memory.elem.bytes)
        self._ctx.module.effect(Op.Store, self.pointer(memory, position), value, *operands)

    def _store_lanes(self, node: Store, type_: VecType) -> None:
        vector = self._ctx.use(node.value)
        self._check_lanes(node.memory, type_)
        for lane in range(type_.lanes):
            position = self._lane_index(node.index, lane)
            value = extract(self._ctx, vector, type_.elem, lane)
            if node.mask is None or not isinstance(node.mask.type, VecType):
                self._store_scalar(node.memory, position, value)
                continue
            with where(self._ctx, self._lane_mask(node.mask, lane)):
                self._store_scalar(node.memory, position, value)

    def atomic_add(self, node: AtomicAdd) -> None:
        """An addition that no other invocation interrupts; no order with other accesses."""
        ctx, module, elem = self._ctx, self._ctx.module, node.memory.elem
        if elem in _FLOAT_ATOMICS:
            op = Op.AtomicFAddEXT
            module.require(*_FLOAT_ATOMICS[elem])
        elif elem in (I32, I64):
            op = Op.AtomicIAdd
            if elem is I64:
                module.require(Capability.Int64Atomics)
        else:
            raise InternalError(f"spirv: atomic add on {elem}, expected i32, i64 or a float")
        scope = Scope.Workgroup
        if isinstance(node.memory, Buffer):
            # With the Vulkan memory model, Device scope would need a capability of its own.
            is_vulkan = module.memory_model is MemoryModel.Vulkan
            scope = Scope.QueueFamily if is_vulkan else Scope.Device
        pointer = self.pointer(node.memory, ctx.use(node.index))
        relaxed = module.uint(0)
        module.value(op, ctx.type(elem), pointer, module.uint(scope), relaxed, ctx.use(node.value))


@contextmanager
def where(ctx: Context, condition: int) -> Generator[None]:
    """Emits what follows only for invocations whose ``condition`` holds."""
    module = ctx.module
    inside, after = module.new_id(), module.new_id()
    module.effect(Op.SelectionMerge, after, 0)
    module.effect(Op.BranchConditional, condition, inside, after)
    module.effect(Op.Label, inside)
    yield
    module.effect(Op.Branch, after)
    module.effect(Op.Label, after)
    ctx.block = after


def _storage(memory: Memory, *, addressed: bool) -> StorageClass:
    if isinstance(memory, Scratch):
        is_local = memory.space is Space.LOCAL
        return StorageClass.Function if is_local else StorageClass.Workgroup
    return StorageClass.PhysicalStorageBuffer if addressed else StorageClass.StorageBuffer
