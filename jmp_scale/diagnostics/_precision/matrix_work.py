"""Counts the floating-point operations of matrix products and convolutions."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from ..._jaxpr import dtype_name, shape, size, words

_PRODUCTS = words("conv_general_dilated dot_general ragged_dot ragged_dot_general")
_FLOATING = ("float", "bfloat", "complex")
_NARROW = ("float16", "bfloat16", "float8", "float4")
_MOVES = words(
    "broadcast_in_dim concatenate convert_element_type copy copy_p device_put "
    "dynamic_slice dynamic_update_slice eq expand_dims gather ge gt is_finite le lt "
    "name ne optimization_barrier pad pcast pvary reshape rev select_n "
    "sharding_constraint slice split squeeze stack stop_gradient tile transpose unstack"
)


class Operation(NamedTuple):
    """How often a program runs an operation in a dtype, forward and backward.

    Attributes:
      primitive: JAX's name of the operation.
      dtype: dtype of its operands, joined by " x " where they differ.
      executions: how often it runs; the body of a scan counts for each iteration, that
        of a while loop once, and of a branch each alternative.
      flops: floating-point operations of matrix products and convolutions; else 0.
      share: of all such operations of the program, from 0 to 1.
    """

    primitive: str
    dtype: str
    executions: int
    flops: int
    share: float


def flops(eqn: Any) -> int:
    """Multiplications and additions of one matrix product or convolution; else 0."""
    name = eqn.primitive.name
    if name not in _PRODUCTS or not dtype_name(eqn.outvars[0]).startswith(_FLOATING):
        return 0
    left, right, result = eqn.invars[0], eqn.invars[1], eqn.outvars[0]
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        length = math.prod(shape(left)[axis] for axis in contracted)
        return 2 * size(result) * length
    if name == "conv_general_dilated":
        features = shape(right)[eqn.params["dimension_numbers"].rhs_spec[0]]
        # The zeros inside a dilated input are not multiplied.
        zeros = math.prod(eqn.params.get("lhs_dilation") or (1,))
        return 2 * size(result) * (size(right) // max(features, 1)) // zeros
    return 2 * size(left) * shape(right)[-1]


def operand_dtypes(eqn: Any) -> tuple[str, ...]:
    """The dtypes that an operation computes with, each once."""
    operands = eqn.invars[:2] if eqn.primitive.name in _PRODUCTS else eqn.invars[:1]
    return tuple(dict.fromkeys(dtype_name(v) for v in operands))


def is_narrow(eqn: Any) -> bool:
    """Whether the operands of an operation all have 16 bits or fewer."""
    return all(dtype.startswith(_NARROW) for dtype in operand_dtypes(eqn))


def is_of_vectors(eqn: Any) -> bool:
    """Whether a product is of two vectors, as in a norm, or has a number in it."""
    if eqn.primitive.name != "dot_general":
        return False
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    reduced = len(contracted) + len(batch)
    ranks = [len(shape(v)) for v in eqn.invars[:2]]
    return ranks == [reduced, reduced] or len(batch) in ranks


def operations(executed: Iterable[tuple[Any, int]]) -> tuple[Operation, ...]:
    """Sums (equation, times) up by primitive and dtype, most matrix work first."""
    counts: dict[tuple[str, str], list[int]] = {}
    for eqn, times in executed:
        dtypes = operand_dtypes(eqn)
        moves = eqn.primitive.name in _MOVES
        if moves or not dtypes or not dtypes[0].startswith(_FLOATING):
            continue
        row = counts.setdefault((eqn.primitive.name, " x ".join(dtypes)), [0, 0])
        row[0] += times
        row[1] += times * flops(eqn)
    total = sum(work for _, work in counts.values())
    table = [
        Operation(primitive, dtype, count, work, work / total if total else 0.0)
        for (primitive, dtype), (count, work) in counts.items()
    ]
    return tuple(sorted(table, key=lambda row: (-row.flops, row.primitive, row.dtype)))


def half_share(executed: Iterable[tuple[Any, int]]) -> float:
    """Share of the matrix work whose operands are half precision; 0 without any."""
    half = total = 0
    for eqn, times in executed:
        work = times * flops(eqn)
        total += work
        half += work if work and is_narrow(eqn) else 0
    return half / total if total else 0.0
