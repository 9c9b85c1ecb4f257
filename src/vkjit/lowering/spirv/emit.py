"""Kernels to SPIR-V: one case per node, structured control flow, one entry point.

The emitter decides nothing about numerics: what the target cannot do was rewritten by ``legalize``.
Float arithmetic is decorated ``NoContraction``, and the module asks for those IEEE modes that the
target lists among its features.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import assert_never, final

from vkjit.errors import InternalError
from vkjit.lowering.kernel import walk
from vkjit.lowering.kernel.nodes import (
    AtomicAdd,
    Barrier,
    BarrierScope,
    Binary,
    Bitcast,
    Compare,
    Const,
    Convert,
    Extract,
    Fma,
    For,
    If,
    Index,
    Insert,
    Kernel,
    Load,
    MatConvert,
    MatFill,
    MatLoad,
    MatMap,
    MatMulAdd,
    MatStore,
    Node,
    Reduce,
    Region,
    Select,
    Shuffle,
    Splat,
    Store,
    SubgroupReduce,
    SubgroupShuffle,
    TensorLoad,
    TensorStore,
    Unary,
    Value,
)
from vkjit.lowering.kernel.types import F16, F32, F64, I1, I32, Buffer, IndexKind, MatType
from vkjit.lowering.spirv import arithmetic, matrix
from vkjit.lowering.spirv.alignment import Multiples
from vkjit.lowering.spirv.context import Context
from vkjit.lowering.spirv.grammar import (
    BuiltIn,
    Capability,
    Decoration,
    ExecutionMode,
    LoopControl,
    MemoryModel,
    MemorySemantics,
    Op,
    Scope,
    StorageClass,
)
from vkjit.lowering.spirv.maps import emit_map
from vkjit.lowering.spirv.memory import Memories
from vkjit.lowering.spirv.tensor import Tensors
from vkjit.lowering.target import Target

_BUILT_INS = {
    IndexKind.WORKGROUP: BuiltIn.WorkgroupId,
    IndexKind.LOCAL: BuiltIn.LocalInvocationId,
    IndexKind.LANE: BuiltIn.SubgroupLocalInvocationId,
    IndexKind.SUBGROUP: BuiltIn.SubgroupId,
}
_PER_AXIS = (IndexKind.WORKGROUP, IndexKind.LOCAL)
_BARRIER_SCOPES = {
    BarrierScope.WORKGROUP: Scope.Workgroup,
    BarrierScope.SUBGROUP: Scope.Subgroup,
}
FLOAT_MODES = {
    "signed_zero_inf_nan_preserve": (
        Capability.SignedZeroInfNanPreserve,
        ExecutionMode.SignedZeroInfNanPreserve,
    ),
    "denorm_preserve": (Capability.DenormPreserve, ExecutionMode.DenormPreserve),
    "rounding_mode_rte": (Capability.RoundingModeRTE, ExecutionMode.RoundingModeRTE),
}
"""Features ``<name>_<f16|f32|f64>`` of a target, and what they ask for in a module."""


def emit(kernel: Kernel, target: Target) -> array[int]:
    """The kernel as a SPIR-V 1.5 module with the entry point ``main``.

    Raises:
        InternalError: the kernel has an operation without instruction: it was not legalized.
    """
    return _Emitter(kernel, target).words()


@final
class _Emitter:
    def __init__(self, kernel: Kernel, target: Target) -> None:
        self.kernel = kernel
        self.ctx = Context(kernel, target)
        self.multiples = Multiples()
        self.memories = Memories(self.ctx, self.multiples, _coherent_buffers(kernel))
        self.tensors = Tensors(self.ctx, self.memories)
        self._inputs: dict[IndexKind, int] = {}

    def words(self) -> array[int]:
        module = self.ctx.module
        module.require(Capability.Shader)
        if any(isinstance(v.type, MatType) for v in _values(self.kernel)):
            # SPV_KHR_cooperative_matrix demands this memory model.
            module.require(Capability.VulkanMemoryModel)
            module.memory_model = MemoryModel.Vulkan
        module.name(module.entry, self.kernel.name)
        module.source(self.kernel.origin)
        module.modes.append((ExecutionMode.LocalSize, self.kernel.workgroup))
        void = module.unique(Op.TypeVoid)
        signature = module.unique(Op.TypeFunction, void)
        module.body.extend((5 << 16 | Op.Function, void, module.entry, 0, signature))
        self.label(module.new_id())
        self.memories.declare()
        self.tensors.declare()
        self.region(self.kernel.body)
        module.effect(Op.Return)
        module.effect(Op.FunctionEnd)
        self.ctx.settle_narrow_types()
        self._float_modes()
        return module.words()

    def _float_modes(self) -> None:
        used = self.ctx.declared_types
        for type_ in (F16, F32, F64):
            for name, (capability, mode) in FLOAT_MODES.items():
                if type_ in used and f"{name}_{type_}" in self.ctx.target.features:
                    self.ctx.module.require(capability)
                    self.ctx.module.modes.append((mode, (type_.bits,)))

    # -- control flow -----------------------------------------------------------------------------

    def label(self, id_: int) -> None:
        self.ctx.module.effect(Op.Label, id_)
        self.ctx.module.line()
        self.ctx.block = id_

    def region(self, region: Region) -> None:
        for node in region.nodes:
            self.node(node)

    def loop(self, node: For) -> None:
        """Header with the phis and the test, body, continue block, merge block."""
        ctx, module = self.ctx, self.ctx.module
        self.multiples.enter_loop(node)
        head, body, again, done = (module.new_id() for _ in range(4))
        following = [module.new_id() for _ in (node.index, *node.carried)]
        before = ctx.block
        starts = [ctx.use(v) for v in (node.lower, *node.inits)]
        upper, step = ctx.use(node.upper), ctx.use(node.step)
        module.effect(Op.Branch, head)
        self.label(head)
        patches: list[int] = []
        for argument, start, later in zip(
            (node.index, *node.carried), starts, following, strict=True
        ):
            phi = module.value(Op.Phi, ctx.type(argument.type), start, before, later, again)
            patches.append(len(module.body) - 2)
            ctx.bind(argument, phi)
            module.name(phi, argument.hint)
        counter = ctx.use(node.index)
        test = Op.SGreaterThan if _counts_down(node) else Op.SLessThan
        more = module.value(test, ctx.type(I1), counter, upper)
        module.effect(Op.LoopMerge, done, again, _loop_control(node))
        module.effect(Op.BranchConditional, more, body, done)
        self.label(body)
        self.region(node.body)
        # The next carried values are known now; the phis above were waiting for them.
        for patch, value in zip(patches[1:], node.body.yields, strict=True):
            module.body[patch] = ctx.use(value)
        module.effect(Op.Branch, again)
        self.label(again)
        module.body[patches[0]] = module.value(Op.IAdd, ctx.type(node.index.type), counter, step)
        module.effect(Op.Branch, head)
        self.label(done)
        for result, argument in zip(node.results, node.carried, strict=True):
            ctx.bind(result, ctx.use(argument))

    def branch(self, node: If) -> None:
        """Two arms and a merge block with a phi per result."""
        ctx, module = self.ctx, self.ctx.module
        then, otherwise, done = (module.new_id() for _ in range(3))
        condition = ctx.use(node.cond)
        module.effect(Op.SelectionMerge, done, 0)
        module.effect(Op.BranchConditional, condition, then, otherwise)
        arms: list[tuple[list[int], int]] = []
        for start, region in ((then, node.then), (otherwise, node.otherwise)):
            self.label(start)
            self.region(region)
            arms.append(([ctx.use(v) for v in region.yields], ctx.block))
            module.effect(Op.Branch, done)
        self.label(done)
        (yes, from_then), (no, from_otherwise) = arms
        for result, a, b in zip(node.results, yes, no, strict=True):
            phi = module.value(Op.Phi, ctx.type(result.type), a, from_then, b, from_otherwise)
            ctx.bind(result, phi)

    def barrier(self, node: Barrier) -> None:
        """Waits, and makes shared memory and coherent buffers visible."""
        module = self.ctx.module
        semantics = MemorySemantics.AcquireRelease | MemorySemantics.WorkgroupMemory
        if self.memories.coherent:
            semantics |= MemorySemantics.UniformMemory
        if module.memory_model is MemoryModel.Vulkan:
            semantics |= MemorySemantics.MakeAvailable | MemorySemantics.MakeVisible
        scope = module.uint(_BARRIER_SCOPES[node.scope])
        module.effect(Op.ControlBarrier, scope, scope, module.uint(semantics))

    # -- indices ----------------------------------------------------------------------------------

    def index(self, node: Index) -> int:
        """A component of an input variable, in the kernel's index type."""
        ctx, module = self.ctx, self.ctx.module
        uint = ctx.type(I32)
        type_ = module.unique(Op.TypeVector, uint, 3) if node.kind in _PER_AXIS else uint
        variable = self._inputs.get(node.kind)
        if variable is None:
            variable = self._inputs[node.kind] = self._declare_input(node.kind, type_)
        value = module.value(Op.Load, type_, variable)
        if node.kind in _PER_AXIS:
            value = module.value(Op.CompositeExtract, uint, value, node.axis)
        if node.type is I32:
            return value
        return module.value(Op.UConvert, ctx.type(node.type), value)

    def _declare_input(self, kind: IndexKind, type_: int) -> int:
        module = self.ctx.module
        if kind not in _PER_AXIS:
            module.require(Capability.GroupNonUniform)
        pointer = module.pointer(StorageClass.Input, type_)
        variable = module.global_variable(pointer, StorageClass.Input)
        module.decorate(variable, Decoration.BuiltIn, _BUILT_INS[kind])
        module.name(variable, kind.value)
        return variable

    # -- nodes ------------------------------------------------------------------------------------

    def node(self, node: Node) -> None:  # noqa: C901, PLR0912  one case per member of the union
        ctx = self.ctx
        match node:
            case Const():
                return  # declared at its first use
            case Index():
                result = self.index(node)
            case Unary():
                result = arithmetic.emit_unary(ctx, node)
            case Binary():
                result = arithmetic.emit_binary(ctx, node)
            case Compare():
                result = arithmetic.emit_compare(ctx, node)
            case Select():
                result = arithmetic.emit_select(ctx, node)
            case Fma():
                result = arithmetic.emit_fma(ctx, node)
            case Convert():
                result = arithmetic.emit_convert(ctx, node)
            case Bitcast():
                result = arithmetic.emit_bitcast(ctx, node)
            case Splat():
                result = arithmetic.emit_splat(ctx, node)
            case Extract():
                result = arithmetic.emit_extract(ctx, node)
            case Insert():
                result = arithmetic.emit_insert(ctx, node)
            case Shuffle():
                result = arithmetic.emit_shuffle(ctx, node)
            case Reduce():
                result = arithmetic.emit_reduce(ctx, node)
            case SubgroupReduce():
                result = arithmetic.emit_subgroup_reduce(ctx, node)
            case SubgroupShuffle():
                result = arithmetic.emit_subgroup_shuffle(ctx, node)
            case Load():
                result = self.memories.load(node)
            case MatFill() | MatLoad() | MatMulAdd() | MatConvert() | TensorLoad() | MatMap():
                result = self.matrix(node)
            case Store() | AtomicAdd() | MatStore() | TensorStore() | Barrier() | For() | If():
                self.statement(node)
                return
            case _:
                assert_never(node)
        ctx.bind(node, result)

    def matrix(self, node: MatFill | MatLoad | MatMulAdd | MatConvert | TensorLoad | MatMap) -> int:
        match node:
            case MatFill():
                return matrix.emit_fill(self.ctx, node)
            case MatLoad():
                return matrix.emit_load(self.ctx, self.memories, node)
            case MatMulAdd():
                return matrix.emit_mul_add(self.ctx, node)
            case MatConvert():
                return matrix.emit_convert(self.ctx, node)
            case TensorLoad():
                return self.tensors.load(node)
            case MatMap():
                return emit_map(self.ctx, self.memories, node, self.region)
            case _:
                assert_never(node)

    def statement(
        self, node: Store | AtomicAdd | MatStore | TensorStore | Barrier | For | If
    ) -> None:
        match node:
            case Store():
                self.memories.store(node)
            case AtomicAdd():
                self.memories.atomic_add(node)
            case MatStore():
                matrix.emit_store(self.ctx, self.memories, node)
            case TensorStore():
                self.tensors.store(node)
            case Barrier():
                self.barrier(node)
            case For():
                self.loop(node)
            case If():
                self.branch(node)
            case _:
                assert_never(node)


def _loop_control(node: For) -> int:
    """Loops over tensor loads are written out as far as it helps: more takes seconds to compile."""
    written_out = any(isinstance(inner, TensorLoad) for inner in node.body.nodes)
    return LoopControl.DontUnroll if written_out else 0


def _counts_down(node: For) -> bool:
    """Whether the step is negative; a step that is no constant is positive by contract."""
    if not isinstance(node.step, Const):
        return False
    if not isinstance(node.step.value, int) or node.step.value == 0:
        raise InternalError(f"spirv: loop with step {node.step.value}")
    return node.step.value < 0


def _values(kernel: Kernel) -> Iterator[Value]:
    for node in walk.all_nodes(kernel.body):
        yield from walk.results(node)


def _coherent_buffers(kernel: Kernel) -> frozenset[Buffer]:
    """Buffers read and written by a kernel with barriers: invocations may exchange data there."""
    read: set[Buffer] = set()
    written: set[Buffer] = set()
    has_barrier = False
    for node in walk.all_nodes(kernel.body):
        memory = walk.memory_of(node)
        has_barrier = has_barrier or isinstance(node, Barrier)
        if isinstance(memory, Buffer):
            (read if isinstance(node, Load | MatLoad | TensorLoad) else written).add(memory)
    return frozenset(read & written) if has_barrier else frozenset()
