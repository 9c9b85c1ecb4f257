"""What an operation is: one frozen class that holds its parameters, traits and all its rules.

Passes ask for traits and call rules; they never match on classes. ``Primitive`` is the general
form with any number of results; ``Op`` is the common one with exactly one.

Rules that compute (``jvp``, ``transpose``, ``batch``) call other operations through their public
functions; the current trace records them. Symbolic zeros are ``None``: a tangent or cotangent of
``None`` is zero and costs nothing.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, ClassVar, TypeAlias, final

import numpy as np

from vkjit.dtypes import DType, is_float
from vkjit.errors import DTypeError, MissingRuleError
from vkjit.ir.avals import Aval
from vkjit.ir.control import Control
from vkjit.ir.program import Atom, Eqn, Literal, Program
from vkjit.lowering.kernel.specs import KernelSpec

Array = np.ndarray[Any, Any]
Value = Any
"""A tracer, an array or a NumPy value: whatever ``vkjit.trace.bind`` accepts."""
Tangent = Value | None
Producer = Callable[[Atom], Eqn | None]
Simpler: TypeAlias = "Atom | tuple[Primitive, tuple[Atom, ...]]"


class Kind(Enum):
    """What fusion may know about an operation; closed."""

    POINTWISE = "pointwise"
    VIEW = "view"
    PLACE = "place"  # operands stored into regions of a new array: pad, concatenate
    REDUCE = "reduce"
    CONTRACT = "contract"
    INDEXED = "indexed"
    FUSED = "fused"
    CONTROL = "control"
    WRITE = "write"


class Remat(Enum):
    """Whether a value may be computed again instead of being kept."""

    CHEAP = "cheap"  # recompute: casts, views, cheap pointwise
    COSTLY = "costly"  # a policy decides
    ONCE = "once"  # never repeated: writes


@final
@dataclass(frozen=True, slots=True)
class Traits:
    """All that passes may ask of a primitive.

    ``linear_in`` are the argument positions in which the primitive is (multi)linear, one at a time.
    ``effect`` marks writes, which no pass may repeat, drop or move across a reader. Where one array
    is an argument of several primitives that ``joins_cotangents``, theirs are joined, not added.
    ``transpose`` of one that ``takes_zeros`` gets None for the cotangents that are zero. Arrays of
    blocks are operands of views, of control and of what ``moves_blocks``.
    """

    kind: Kind
    remat: Remat = Remat.CHEAP
    linear_in: tuple[int, ...] = ()
    effect: bool = False
    differentiable: bool = True
    joins_cotangents: bool = False
    takes_zeros: bool = False
    moves_blocks: bool = False

    @property
    def takes_blocks(self) -> bool:
        """Whether operands may be arrays of blocks, which only move."""
        return self.moves_blocks or self.kind in (Kind.VIEW, Kind.CONTROL)


@final
class Linear:
    """Placeholder for an argument that is transposed; carries its aval."""

    __slots__ = ("aval",)

    def __init__(self, aval: Aval) -> None:
        self.aval = aval


@final
@dataclass(frozen=True, slots=True)
class Parts:
    """The equations that replace one whose arguments are linear in part.

    ``known`` give the results that do not depend on the linear arguments, and new variables that
    ``linear`` read; ``linear`` give the other results. Together they define all its results.
    """

    known: tuple[Eqn, ...]
    linear: tuple[Eqn, ...]


@final
@dataclass(frozen=True, slots=True)
class Pulled:
    """What a primitive made of the cotangents of its arguments.

    ``sums`` are the cotangents so far, with its own added, one for each argument. ``parts`` are
    (argument, primitive, cotangent): what is to be joined later; see ``Traits``.
    """

    sums: tuple[Tangent, ...]
    parts: tuple[tuple[int, Primitive, Value], ...]


@final
@dataclass(frozen=True)
class Sample:
    """Operands that exercise a primitive: it, operand avals and the range values come from.

    ``low`` and ``high`` bound the values of operands (exclusive of singular points); ``smooth``
    says that derivatives exist everywhere in that range.
    """

    prim: Primitive
    avals: tuple[Aval, ...]
    low: float = -2.0
    high: float = 2.0
    smooth: bool = True


class Primitive(ABC):
    """An operation with its static parameters as dataclass fields."""

    traits: ClassVar[Traits]
    name: ClassVar[str] = "primitive"

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    @abstractmethod
    def infer_outs(self, avals: Sequence[Aval]) -> tuple[Aval, ...]:
        """Avals of the results.

        Raises:
            ShapeError, DTypeError, ArgumentError: the operands do not fit; both are named.
        """

    @final
    def applied(self, avals: Sequence[Aval]) -> tuple[Aval, ...]:
        """Avals of the results of an application.

        Raises:
            DTypeError: an operand is an array of blocks, which the primitive does not compute with.
        """
        if any([a.block for a in avals]) and not self.traits.takes_blocks:
            given = ", ".join(map(str, avals))
            raise DTypeError(
                f"{self.name}: operands {given}; blocks hold packed numbers, which nothing "
                "computes with; expected numbers; read them with quant.dequantize(x)"
            )
        return self.infer_outs(avals)

    @abstractmethod
    def evaluate_outs(self, *arrays: Array) -> tuple[Array, ...]:
        """The results in NumPy: the definition of the operation."""

    @abstractmethod
    def jvp_outs(
        self, primals: Sequence[Value], tangents: Sequence[Tangent]
    ) -> tuple[tuple[Value, ...], tuple[Tangent, ...]]:
        """Results and their directional derivatives; at least one tangent is not None."""

    @abstractmethod
    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """Cotangents of the ``Linear`` arguments, None for the others."""

    def transpose_onto(
        self,
        cotangents: Sequence[Tangent],
        args: Sequence[Value | Linear],
        sums: Sequence[Tangent],
    ) -> Pulled | None:
        """Adds to cotangents of the ``Linear`` arguments, or None: what transposes give is added.

        A program that stands for its equations adds in their order, which gives their bits.
        Arguments that are one variable are one ``Linear``, too.

        Args:
            cotangents: of the results; None is zero.
            args: of the equation.
            sums: the cotangents of the arguments so far.
        """
        return None

    @classmethod
    def join_cotangents(cls, of: Aval, parts: Sequence[tuple[Primitive, Value]]) -> Value | None:
        """The cotangent of one argument from those of several results, or None: add transposes.

        Args:
            of: aval of the argument.
            parts: primitives of this class that were applied to it, with their cotangents.
        """
        return None

    @abstractmethod
    def batch_outs(self, args: Sequence[Value], batched: Sequence[bool]) -> tuple[Value, ...]:
        """Results for arguments with a batch axis in front where ``batched``; all results have it.

        At least one argument is batched.
        """

    def batch_some(
        self, args: Sequence[Value], batched: Sequence[bool]
    ) -> tuple[tuple[Value, ...], tuple[bool, ...]]:
        """As ``batch_outs``, and which results have the batch axis: all by default.

        A result without it is the same for every example.
        """
        outs = self.batch_outs(args, batched)
        return outs, (True,) * len(outs)

    def simplify(self, args: Sequence[Atom], producer: Producer) -> Simpler | None:
        """A value or a simpler application that gives the same bits, or None.

        Products may be taken together: their sums have the same terms in the same order.

        Args:
            args: of the equation.
            producer: the equation that made a variable, or None for parameters and literals.
        """
        return None

    def rounded_to(self, dtype: DType) -> Primitive | None:
        """The primitive that gives its result in ``dtype``, with the bits of a cast, or None."""
        return None

    def partial_eval(self, eqn: Eqn, moving: Sequence[bool]) -> Parts | None:
        """``eqn`` in two parts, or None: all of it is linear in its moving arguments.

        Primitives that run programs in which some results do not move give their parts.

        Args:
            eqn: an equation of this primitive.
            moving: which of its arguments depend on tangents; at least one does.
        """
        return None

    def pruned(self, eqn: Eqn, live: Sequence[bool]) -> Eqn:
        """``eqn``, of this primitive, without what only serves results that nobody reads.

        Args:
            eqn: the equation.
            live: which of its results are read; the others may be left out.
        """
        return eqn

    def forwarded(self, eqn: Eqn) -> dict[int, Atom]:
        """Results of ``eqn``, of this primitive, that are arguments as they are, by position."""
        return {}

    def lifted(self, eqn: Eqn) -> tuple[Eqn, ...]:
        """``eqn``, of this primitive, after equations for what it would compute again each turn."""
        return (eqn,)

    def control(self) -> Control:
        """How lowering runs a primitive that has no kernel spec."""
        raise self.missing("control")

    def flops(self, avals: Sequence[Aval], outs: Sequence[Aval]) -> float:
        """Floating-point operations of one application, an element of a function counting as one.

        Views, copies and gathers count nothing; of programs inside, each counts once unless the
        primitive knows better.
        """
        match self.traits.kind:
            case Kind.POINTWISE:
                return float(sum(out.size for out in outs if is_float(out.dtype)))
            case Kind.REDUCE:
                return float(sum(given.size for given in avals if is_float(given.dtype)))
            case _:
                return sum(program_flops(inner) for inner in self.programs())

    def programs(self) -> tuple[Program, ...]:
        """The programs that it runs."""
        return ()

    def with_programs(self, programs: Sequence[Program]) -> Primitive:
        """The same primitive with others, of the same parameters and results, in their place."""
        return self

    def acts(self) -> bool:
        """Whether it does something besides giving results: then it is kept where nobody reads it.

        So do primitives that call the host, and those that run a program in which one acts.
        """
        return any(eqn.prim.acts() for inner in self.programs() for eqn in inner.eqns)

    def parameters(self) -> dict[str, object]:
        """Static parameters by name, in order, as the text form prints them."""
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]

    def missing(self, rule: str, why: str = "") -> MissingRuleError:
        """The error for a rule this primitive does not have."""
        return MissingRuleError(f"{self.name}: has no {rule} rule{why and ': ' + why}")


class Op(Primitive):
    """A primitive with one result; subclasses write the single-result rules."""

    @abstractmethod
    def infer(self, *avals: Aval) -> Aval:
        """Aval of the result."""

    @abstractmethod
    def evaluate(self, *arrays: Array) -> Array:
        """The result in NumPy."""

    @abstractmethod
    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """What the templates need to know."""

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """Result and tangent; nonlinear differentiable operations must give it."""
        raise self.missing("jvp")

    def batch(self, args: Sequence[Value], batched: Sequence[bool]) -> Value:
        """Result with the batch axis in front."""
        raise self.missing("batch")

    @classmethod
    def samples(cls) -> list[Sample]:
        """Operands for the property tests."""
        return []

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """See ``Primitive.transpose``; nothing is linear unless a subclass says so."""
        raise self.missing("transpose", "it is not linear in any argument")

    @final
    def infer_outs(self, avals: Sequence[Aval]) -> tuple[Aval, ...]:
        """See ``infer``."""
        return (self.infer(*avals),)

    @final
    def evaluate_outs(self, *arrays: Array) -> tuple[Array, ...]:
        """See ``evaluate``."""
        return (self.evaluate(*arrays),)

    @final
    def jvp_outs(
        self, primals: Sequence[Value], tangents: Sequence[Tangent]
    ) -> tuple[tuple[Value, ...], tuple[Tangent, ...]]:
        """See ``jvp``."""
        out, tangent = self.jvp(primals, tangents)
        return (out,), (tangent,)

    @final
    def batch_outs(self, args: Sequence[Value], batched: Sequence[bool]) -> tuple[Value, ...]:
        """See ``batch``."""
        return (self.batch(args, batched),)


def program_flops(program: Program) -> float:
    """Floating-point operations of one run of ``program``."""
    return math.fsum(
        eqn.prim.flops([a.aval for a in eqn.args], [v.aval for v in eqn.outs])
        for eqn in program.eqns
    )


def without_neutral(args: Sequence[Atom], value: float, *positions: int) -> Atom | None:
    """The other of two operands where one, at one of ``positions``, is the literal ``value``.

    The sign of zero counts. Nothing where the result would have another aval: a weak operand beside
    a strong literal makes a strong result.
    """
    for position in positions:
        given, kept = args[position], args[1 - position]
        if isinstance(given, Literal) and (given.aval.weak or not kept.aval.weak):
            neutral = np.asarray(value).astype(given.aval.dtype)
            if np.asarray(given.value, given.aval.dtype).tobytes() == neutral.tobytes():
                return kept
    return None
