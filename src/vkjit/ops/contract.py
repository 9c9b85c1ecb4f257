"""Products that sum over shared axes: dot_general, with layouts instead of transposed copies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np

from vkjit import dtypes
from vkjit.dtypes import DType
from vkjit.errors import DTypeError, ShapeError
from vkjit.ir.avals import Aval, aval
from vkjit.ir.primitive import (
    Array,
    Kind,
    Linear,
    Op,
    Producer,
    Remat,
    Sample,
    Simpler,
    Tangent,
    Traits,
    Value,
)
from vkjit.ir.program import Atom, Eqn
from vkjit.lowering.kernel.elements import scalar_type
from vkjit.lowering.kernel.specs import ContractSpec, KernelSpec, Precision
from vkjit.ops.cast import Cast, cast
from vkjit.ops.pointwise import total
from vkjit.ops.precision import named_precision
from vkjit.ops.structural import Broadcast, float_of, permute
from vkjit.trace import aval_of, bind

Ints = tuple[int, ...]


@final
@dataclass(frozen=True)
class DotGeneral(Op):
    """Batched product: sums over contracting axes, keeps batch axes, joins the free ones.

    The result's axes are batch, free axes of lhs, free axes of rhs. Sums run in ``accumulate`` and
    round once to ``dtype``. ``precision`` says what may stand for a product of float32 operands.
    Transposed products inherit both.
    """

    lhs_contract: Ints
    rhs_contract: Ints
    lhs_batch: Ints
    rhs_batch: Ints
    accumulate: DType
    dtype: DType
    precision: Precision = Precision.HIGHEST

    traits: ClassVar[Traits] = Traits(Kind.CONTRACT, Remat.COSTLY, linear_in=(0, 1))

    def infer(self, *avals: Aval) -> Aval:
        """Operands share a dtype, and the sizes of paired axes."""
        lhs, rhs = avals
        if lhs.dtype != rhs.dtype or lhs.dtype == dtypes.bool_:
            raise DTypeError(
                f"dot_general: operands {lhs}, {rhs}; expected numbers of one dtype; "
                "cast with .astype(...)"
            )
        if dtypes.is_int(lhs.dtype) and lhs.dtype != self.accumulate:
            raise DTypeError(
                f"dot_general: operands {lhs}, {rhs} summed in {self.accumulate.name}; expected "
                "integers of that dtype; cast with .astype(...)"
            )
        left, right = self.lhs_batch + self.lhs_contract, self.rhs_batch + self.rhs_contract
        if (
            len(self.lhs_batch) != len(self.rhs_batch)
            or len(self.lhs_contract) != len(self.rhs_contract)
            or not _distinct(left, lhs.ndim)
            or not _distinct(right, rhs.ndim)
            or any(lhs.shape[i] != rhs.shape[j] for i, j in zip(left, right, strict=True))
        ):
            raise ShapeError(
                f"dot_general: operands {lhs}, {rhs} with batch axes {self.lhs_batch}, "
                f"{self.rhs_batch} and contracting axes {self.lhs_contract}, "
                f"{self.rhs_contract}; expected pairs of distinct axes of equal sizes"
            )
        shape = (
            *(lhs.shape[i] for i in self.lhs_batch),
            *(lhs.shape[i] for i in self.lhs_free(lhs.ndim)),
            *(rhs.shape[i] for i in self.rhs_free(rhs.ndim)),
        )
        return aval(shape, self.dtype, lhs.weak and rhs.weak)

    def lhs_free(self, rank: int) -> Ints:
        """Axes of lhs that are neither batch nor contracting."""
        return _rest(rank, self.lhs_batch + self.lhs_contract)

    def rhs_free(self, rank: int) -> Ints:
        """Axes of rhs that are neither batch nor contracting."""
        return _rest(rank, self.rhs_batch + self.rhs_contract)

    def flops(self, avals: Sequence[Aval], outs: Sequence[Aval]) -> float:
        """A product and a sum for each term of each element."""
        terms = math.prod(avals[0].shape[i] for i in self.lhs_contract)
        return 2.0 * terms * outs[0].size

    def evaluate(self, *arrays: Array) -> Array:
        """np.matmul in the accumulation dtype."""
        lhs, rhs = arrays
        lhs_free, rhs_free = self.lhs_free(lhs.ndim), self.rhs_free(rhs.ndim)
        batch = tuple(lhs.shape[i] for i in self.lhs_batch)
        rows = tuple(lhs.shape[i] for i in lhs_free)
        columns = tuple(rhs.shape[i] for i in rhs_free)
        summed = math.prod(lhs.shape[i] for i in self.lhs_contract)
        sizes = math.prod(batch), math.prod(rows), math.prod(columns)
        a = lhs.transpose(self.lhs_batch + lhs_free + self.lhs_contract)
        b = rhs.transpose(self.rhs_batch + self.rhs_contract + rhs_free)
        with np.errstate(all="ignore"):
            product = np.matmul(
                a.reshape(sizes[0], sizes[1], summed).astype(self.accumulate),
                b.reshape(sizes[0], summed, sizes[2]).astype(self.accumulate),
            )
            return product.reshape(batch + rows + columns).astype(self.dtype)

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """d(x y) = dx y + x dy."""
        x, y = primals
        dx, dy = tangents
        parts = [
            None if dx is None else bind(self, dx, y),
            None if dy is None else bind(self, x, dy),
        ]
        return bind(self, x, y), total(parts)

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """A product of the cotangent with the other operand, in that operand's own layout."""
        (ct,) = cotangents
        lhs, rhs = args
        if isinstance(lhs, Linear):
            return self._to_lhs(ct, lhs.aval, rhs), None
        assert isinstance(rhs, Linear)
        return None, self._to_rhs(ct, lhs, rhs.aval)

    def _to_lhs(self, ct: Value, of: Aval, rhs: Value) -> Value:
        batch = len(self.lhs_batch)
        free = self.lhs_free(of.ndim)
        rank = aval_of(rhs).ndim
        rhs_free = self.rhs_free(rank)
        rows = tuple(range(batch, batch + len(free)))
        columns = tuple(range(batch + len(free), batch + len(free) + len(rhs_free)))
        # The axes of rhs that are left are its contracting ones in rhs order; name lhs partners.
        left = _rest(rank, self.rhs_batch + rhs_free)
        partners = tuple(self.lhs_contract[self.rhs_contract.index(axis)] for axis in left)
        made = _Half(ct, tuple(range(batch)), columns, rows, free)
        other = _Half(rhs, self.rhs_batch, rhs_free, left, partners)
        return self._product(made, other, self.lhs_batch, of)

    def _to_rhs(self, ct: Value, lhs: Value, of: Aval) -> Value:
        batch = len(self.rhs_batch)
        free = self.rhs_free(of.ndim)
        rank = aval_of(lhs).ndim
        lhs_free = self.lhs_free(rank)
        rows = tuple(range(batch, batch + len(lhs_free)))
        columns = tuple(range(batch + len(lhs_free), batch + len(lhs_free) + len(free)))
        left = _rest(rank, self.lhs_batch + lhs_free)
        partners = tuple(self.rhs_contract[self.lhs_contract.index(axis)] for axis in left)
        made = _Half(ct, tuple(range(batch)), rows, columns, free)
        other = _Half(lhs, self.lhs_batch, lhs_free, left, partners)
        return self._product(other, made, self.rhs_batch, of)

    def _product(self, left: _Half, right: _Half, batch: Ints, of: Aval) -> Value:
        """The product of both halves with its axes in the order of the operand it stands for.

        Of both operand orders, the one that needs no permutation is taken where there is one.
        """
        if not _identity(_order(batch, left, right)) and _identity(_order(batch, right, left)):
            left, right = right, left
        wide = dtypes.promote_types(aval_of(left.value).dtype, aval_of(right.value).dtype)
        prim = DotGeneral(
            left.summed,
            right.summed,
            left.batch,
            right.batch,
            self.accumulate,
            of.dtype,
            self.precision,
        )
        out = bind(prim, cast(left.value, wide), cast(right.value, wide))
        return permute(out, _inverse(_order(batch, left, right)))

    def batch(self, args: Sequence[Value], batched: Sequence[bool]) -> Value:
        """A shared batch axis, or one more free axis of the batched operand."""
        lhs, rhs = args
        in_lhs, in_rhs = batched
        both = in_lhs and in_rhs
        prim = DotGeneral(
            _shift(self.lhs_contract, in_lhs),
            _shift(self.rhs_contract, in_rhs),
            ((0,) if both else ()) + _shift(self.lhs_batch, in_lhs),
            ((0,) if both else ()) + _shift(self.rhs_batch, in_rhs),
            self.accumulate,
            self.dtype,
            self.precision,
        )
        out = bind(prim, lhs, rhs)
        if both:
            return out
        at = len(self.lhs_batch)
        if in_rhs:
            at += len(self.lhs_free(aval_of(lhs).ndim))
        rank = aval_of(out).ndim
        return permute(out, (at, *(i for i in range(rank) if i != at)))

    def simplify(self, args: Sequence[Atom], producer: Producer) -> Simpler | None:
        """Widened operands are taken as they were, and one that batches repeat is taken once."""
        return self._narrow(args, producer) or self._shared(args, producer)

    def _narrow(self, args: Sequence[Atom], producer: Producer) -> Simpler | None:
        """The product of two widened operands is that of the narrow ones: widening is exact."""
        if self.accumulate != dtypes.float32:
            return None
        narrow = [_narrow_half(producer(a)) for a in args]
        first = narrow[0]
        if first is None or any(n is None or n.aval.dtype != first.aval.dtype for n in narrow):
            return None
        return self, tuple([n for n in narrow if n is not None])

    def _shared(self, args: Sequence[Atom], producer: Producer) -> Simpler | None:
        """Batch axes along which one operand is repeated, as free axes of the other.

        One product with many rows reads the shared operand once. Only where the axes of the result
        need no permutation; for that the operands may change places.
        """
        lhs, rhs = args
        pairs = self.lhs_batch, self.lhs_contract, self.rhs_batch, self.rhs_contract
        own = self.lhs_free(lhs.aval.ndim), self.rhs_free(rhs.aval.ndim)
        made = _without_repeats(rhs, producer, pairs[2])
        if made is not None:
            return self._joined((lhs, *pairs[:2], own[0]), (*made, *pairs[2:]))
        made = _without_repeats(lhs, producer, pairs[0])
        if made is not None and not (own[0] and own[1]):
            return self._joined((rhs, *pairs[2:], own[1]), (*made, *pairs[:2]))
        return None

    def _joined(
        self, many: tuple[Atom, Ints, Ints, Ints], shared: tuple[Atom, Ints, Ints, Ints]
    ) -> Simpler | None:
        """The product of (operand, batch, contracting and free axes) and (operand, axes, ...)."""
        x, x_batch, x_contract, x_free = many
        w, axes, w_batch, w_contract = shared
        kept = [(a, axes.index(b)) for a, b in zip(x_batch, w_batch, strict=True) if b in axes]
        batch = tuple([a for a, _ in kept])
        if batch + _rest(x.aval.ndim, batch + x_contract) != x_batch + x_free:
            return None
        contract = tuple([axes.index(b) for b in w_contract])
        prim = replace(
            self,
            lhs_contract=x_contract,
            rhs_contract=contract,
            lhs_batch=batch,
            rhs_batch=tuple([b for _, b in kept]),
        )
        return prim, (x, w)

    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """A contraction."""
        return ContractSpec(
            self.lhs_batch,
            self.rhs_batch,
            self.lhs_contract,
            self.rhs_contract,
            scalar_type(self.accumulate),
            self.precision,
        )

    def parameters(self) -> dict[str, object]:
        """All but a precision that asks for nothing."""
        found = super().parameters()
        if self.precision is Precision.HIGHEST:
            del found["precision"]
        return found

    @classmethod
    def samples(cls) -> list[Sample]:
        """All four layouts, batches, several axes, vectors, empty sums, 16-bit floats, integers."""
        f = dtypes.float32
        cases: list[tuple[Ints, Ints, Ints, Ints, Ints, Ints]] = [
            ((3, 5), (5, 4), (1,), (0,), (), ()),
            ((3, 5), (4, 5), (1,), (1,), (), ()),
            ((5, 3), (5, 4), (0,), (0,), (), ()),
            ((5, 3), (4, 5), (0,), (1,), (), ()),
            ((2, 3, 5), (2, 5, 4), (2,), (1,), (0,), (0,)),
            ((3, 2, 5), (5, 2, 4), (2,), (0,), (1,), (1,)),
            ((2, 3, 4, 5), (4, 5, 6), (2, 3), (0, 1), (), ()),
            ((2, 3, 4, 5), (5, 7, 4), (2, 3), (2, 0), (), ()),
            ((5,), (5,), (0,), (0,), (), ()),
            ((2, 3), (4,), (), (), (), ()),
            ((3, 0), (0, 4), (1,), (0,), (), ()),
            ((17, 31), (31, 33), (1,), (0,), (), ()),
        ]
        made = [
            Sample(cls(lc, rc, lb, rb, f, f), (aval(a, f), aval(b, f)))
            for a, b, lc, rc, lb, rb in cases
        ]
        for of, to in (
            (dtypes.float16, dtypes.float16),
            (dtypes.bfloat16, dtypes.bfloat16),
            (dtypes.bfloat16, dtypes.float32),
            (dtypes.int32, dtypes.int32),
            (dtypes.int8, dtypes.int8),
            (dtypes.uint8, dtypes.uint8),
        ):
            sums = to if dtypes.is_int(to) else dtypes.float32
            span = (0.0, 18.0) if of == dtypes.uint8 else (-9.0, 9.0)
            pair = aval((3, 5), of), aval((5, 4), of)
            made.append(Sample(cls((1,), (0,), (), (), sums, to), pair, *span))
        pair = aval((17, 31), f), aval((31, 33), f)
        low = cls((1,), (0,), (), (), f, f, Precision.F16X3)
        return [*made, Sample(low, pair)]


@final
@dataclass(frozen=True)
class _Half:
    """One operand of a transposed product.

    ``kept`` are its free axes in the order of the product, ``targets`` the axes of the result they
    become.
    """

    value: Value
    batch: Ints
    summed: Ints
    kept: Ints
    targets: Ints


def _order(batch: Ints, left: _Half, right: _Half) -> Ints:
    """For each axis of the product, the axis of the wanted array that it is."""
    return batch + left.targets + right.targets


def _identity(order: Ints) -> bool:
    return order == tuple(range(len(order)))


def _inverse(order: Ints) -> Ints:
    return tuple(order.index(i) for i in range(len(order)))


def _rest(rank: int, taken: Ints) -> Ints:
    return tuple(i for i in range(rank) if i not in taken)


def _distinct(axes: Ints, rank: int) -> bool:
    return len(set(axes)) == len(axes) and all(0 <= a < rank for a in axes)


def _narrow_half(eqn: Eqn | None) -> Atom | None:
    """What a cast from a 16-bit float to float32 was applied to."""
    if eqn is None or not isinstance(eqn.prim, Cast):
        return None
    source = eqn.args[0]
    widened = eqn.outs[0].aval.dtype == dtypes.float32 and dtypes.is_float(source.aval.dtype)
    return source if widened and source.aval.dtype.itemsize == 2 else None


def _without_repeats(x: Atom, producer: Producer, batch: Ints) -> tuple[Atom, Ints] | None:
    """What was repeated along some of the ``batch`` axes only, and the axes that it had."""
    eqn = producer(x)
    if eqn is None or not isinstance(eqn.prim, Broadcast):
        return None
    (source,), axes, shape = eqn.args, eqn.prim.axes, eqn.prim.shape
    new = set(_rest(len(shape), axes))
    whole = source.aval.shape == tuple([shape[a] for a in axes])
    return (source, axes) if new and whole and new <= set(batch) else None


def _shift(axes: Ints, is_batched: bool) -> Ints:  # noqa: FBT001  one flag of `batched`
    return tuple(a + is_batched for a in axes)


def dot_general(  # noqa: PLR0913  lax.dot_general's signature
    lhs: Value,
    rhs: Value,
    contract: tuple[Ints, Ints],
    batch: tuple[Ints, Ints] = ((), ()),
    preferred: DType | None = None,
    precision: object = None,
) -> Value:
    """The product of ``lhs`` and ``rhs``: batch axes, free axes of lhs, free axes of rhs.

    Args:
        lhs: first operand.
        rhs: second operand, of the same dtype.
        contract: axes of lhs and of rhs that are summed, in pairs.
        batch: axes of lhs and of rhs that run together, in pairs.
        preferred: dtype of the result; that of the operands by default. 16-bit floats accumulate
            in float32, others in the wider of operand and result.
        precision: of products of float32; see ``default_matmul_precision``.

    Raises:
        ArgumentError: an unknown precision.
    """
    of = aval_of(lhs).dtype
    out = of if preferred is None else preferred
    sums = dtypes.promote_types(float_of(of), float_of(out))
    if dtypes.is_int(of):  # kernels sum integers of one dtype: they do not know the sign
        lhs, rhs = cast(lhs, sums), cast(rhs, sums)
    exact = named_precision("dot_general", precision)
    if of != dtypes.float32:
        exact = Precision.HIGHEST
    prim = DotGeneral(contract[0], contract[1], batch[0], batch[1], sums, out, exact)
    return bind(prim, lhs, rhs)
