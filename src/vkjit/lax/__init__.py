"""Operations close to the primitives, with explicit shapes and axes, as ``jax.lax`` has them.

Operands of one call have one dtype; Python scalars adapt. The elementwise functions that
``vkjit.numpy`` has as well are the same ones, so they broadcast and promote.
"""

from __future__ import annotations

from vkjit.lax._branches import cond, fori_loop, switch, while_loop
from vkjit.lax._collectives import (
    all_gather,
    axis_index,
    axis_size,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
)
from vkjit.lax._control import associative_scan, map, scan
from vkjit.lax._dynamic import (
    dynamic_index_in_dim,
    dynamic_slice,
    dynamic_slice_in_dim,
    dynamic_update_index_in_dim,
    dynamic_update_slice,
    dynamic_update_slice_in_dim,
)
from vkjit.lax._pointwise import (
    Precision,
    bitcast_convert_type,
    clamp,
    clz,
    convert_element_type,
    div,
    erf,
    erf_inv,
    erfc,
    logistic,
    population_count,
    reciprocal,
    rem,
    round,
    rsqrt,
    select,
    select_n,
    shift_left,
    shift_right_arithmetic,
    shift_right_logical,
    stop_gradient,
)
from vkjit.lax._reduce import (
    argmax,
    argmin,
    batch_matmul,
    broadcasted_iota,
    cummax,
    cummin,
    cumprod,
    cumsum,
    dot,
    dot_general,
    empty,
    full,
    full_like,
    iota,
    reduce_and,
    reduce_max,
    reduce_min,
    reduce_or,
    reduce_prod,
    reduce_sum,
)
from vkjit.lax._shape import (
    broadcast,
    broadcast_in_dim,
    broadcast_shapes,
    broadcast_to_rank,
    collapse,
    concatenate,
    expand_dims,
    index_in_dim,
    pad,
    reshape,
    rev,
    slice,
    slice_in_dim,
    split,
    squeeze,
    transpose,
)
from vkjit.lax._sort import (
    sort,
    sort_key_val,
    top_k,
)
from vkjit.numpy._elementwise import abs as abs
from vkjit.numpy._elementwise import add as add
from vkjit.numpy._elementwise import integer_power as integer_pow
from vkjit.numpy._elementwise import maximum as max
from vkjit.numpy._elementwise import minimum as min
from vkjit.numpy._elementwise import multiply as mul
from vkjit.numpy._elementwise import negative as neg
from vkjit.numpy._elementwise import nextafter as nextafter
from vkjit.numpy._elementwise import power as pow
from vkjit.numpy._elementwise import sign as sign
from vkjit.numpy._elementwise import square as square
from vkjit.numpy._elementwise import subtract as sub
from vkjit.numpy._logic import bitwise_and as bitwise_and
from vkjit.numpy._logic import bitwise_not as bitwise_not
from vkjit.numpy._logic import bitwise_or as bitwise_or
from vkjit.numpy._logic import bitwise_xor as bitwise_xor
from vkjit.numpy._logic import equal as eq
from vkjit.numpy._logic import greater as gt
from vkjit.numpy._logic import greater_equal as ge
from vkjit.numpy._logic import isfinite as is_finite
from vkjit.numpy._logic import less as lt
from vkjit.numpy._logic import less_equal as le
from vkjit.numpy._logic import not_equal as ne
from vkjit.numpy._math import arccos as acos
from vkjit.numpy._math import arccosh as acosh
from vkjit.numpy._math import arcsin as asin
from vkjit.numpy._math import arcsinh as asinh
from vkjit.numpy._math import arctan as atan
from vkjit.numpy._math import arctan2 as atan2
from vkjit.numpy._math import arctanh as atanh
from vkjit.numpy._math import cbrt as cbrt
from vkjit.numpy._math import ceil as ceil
from vkjit.numpy._math import cos as cos
from vkjit.numpy._math import cosh as cosh
from vkjit.numpy._math import exp as exp
from vkjit.numpy._math import exp2 as exp2
from vkjit.numpy._math import expm1 as expm1
from vkjit.numpy._math import floor as floor
from vkjit.numpy._math import log as log
from vkjit.numpy._math import log1p as log1p
from vkjit.numpy._math import sin as sin
from vkjit.numpy._math import sinh as sinh
from vkjit.numpy._math import sqrt as sqrt
from vkjit.numpy._math import tan as tan
from vkjit.numpy._math import tanh as tanh
from vkjit.numpy._scatter import GatherScatterMode

__all__ = [
    "GatherScatterMode",
    "Precision",
    "abs",
    "acos",
    "acosh",
    "add",
    "all_gather",
    "argmax",
    "argmin",
    "asin",
    "asinh",
    "associative_scan",
    "atan",
    "atan2",
    "atanh",
    "axis_index",
    "axis_size",
    "batch_matmul",
    "bitcast_convert_type",
    "bitwise_and",
    "bitwise_not",
    "bitwise_or",
    "bitwise_xor",
    "broadcast",
    "broadcast_in_dim",
    "broadcast_shapes",
    "broadcast_to_rank",
    "broadcasted_iota",
    "cbrt",
    "ceil",
    "clamp",
    "clz",
    "collapse",
    "concatenate",
    "cond",
    "convert_element_type",
    "cos",
    "cosh",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "div",
    "dot",
    "dot_general",
    "dynamic_index_in_dim",
    "dynamic_slice",
    "dynamic_slice_in_dim",
    "dynamic_update_index_in_dim",
    "dynamic_update_slice",
    "dynamic_update_slice_in_dim",
    "empty",
    "eq",
    "erf",
    "erf_inv",
    "erfc",
    "exp",
    "exp2",
    "expand_dims",
    "expm1",
    "floor",
    "fori_loop",
    "full",
    "full_like",
    "ge",
    "gt",
    "index_in_dim",
    "integer_pow",
    "iota",
    "is_finite",
    "le",
    "log",
    "log1p",
    "logistic",
    "lt",
    "map",
    "max",
    "min",
    "mul",
    "ne",
    "neg",
    "nextafter",
    "pad",
    "pmax",
    "pmean",
    "pmin",
    "population_count",
    "pow",
    "ppermute",
    "psum",
    "psum_scatter",
    "reciprocal",
    "reduce_and",
    "reduce_max",
    "reduce_min",
    "reduce_or",
    "reduce_prod",
    "reduce_sum",
    "rem",
    "reshape",
    "rev",
    "round",
    "rsqrt",
    "scan",
    "select",
    "select_n",
    "shift_left",
    "shift_right_arithmetic",
    "shift_right_logical",
    "sign",
    "sin",
    "sinh",
    "slice",
    "slice_in_dim",
    "sort",
    "sort_key_val",
    "split",
    "sqrt",
    "square",
    "squeeze",
    "stop_gradient",
    "sub",
    "switch",
    "tan",
    "tanh",
    "top_k",
    "transpose",
    "while_loop",
]
