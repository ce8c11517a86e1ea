"""Counts which operations run in which dtype, and the work of matrix products."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from jax.extend.core import JaxprEqn

from ..._autocast.dot_general import ALGORITHMS
from ..._autocast.products import matrix_sizes
from ..._jaxpr import PRODUCTS, dtype_name, shape, size
from .facts import Equation

_FLOATING = ("float", "bfloat", "complex")
_NARROW = ("float16", "bfloat16", "float8", "float4")
# Algorithms that compute in half precision, whatever the dtype of the operands.
_DTYPES = {preset: dtype for dtype, preset in ALGORITHMS.items()}


class Operation(NamedTuple):
    """How often a program runs an operation in a dtype, forward and backward.

    Attributes:
      primitive: JAX's name of the operation.
      dtype: dtype of its operands, joined by " x " if they differ.
      executions: how often it runs. In a scan each iteration counts, in a while loop
        one iteration, in a cond each branch.
      flops: floating-point operations of matrix products and convolutions, else 0.
      share: share of the program's `flops`, from 0 to 1.
    """

    primitive: str
    dtype: str
    executions: int
    flops: int
    share: float


def flops(eqn: JaxprEqn) -> int:
    """Counts multiplications and additions of a matrix product or convolution."""
    name = eqn.primitive.name
    if name not in PRODUCTS or not dtype_name(eqn.outvars[0]).startswith(_FLOATING):
        return 0
    left, right, result = eqn.invars[0], eqn.invars[1], eqn.outvars[0]
    if sizes := matrix_sizes(eqn):
        return 2 * size(result) * math.prod(sizes[0].contracted)
    if name == "conv_general_dilated":
        features = shape(right)[eqn.params["dimension_numbers"].rhs_spec[0]]
        # Zeros inside a dilated input are not multiplied.
        zeros = math.prod(eqn.params["lhs_dilation"])
        return 2 * size(result) * (size(right) // max(features, 1)) // zeros
    # A ragged product: each row of the first operand meets one group of the second.
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    others = {*contracted, *batch, *numbers.rhs_group_dimensions}
    free = [n for axis, n in enumerate(shape(right)) if axis not in others]
    return 2 * size(left) * math.prod(free)


def operand_dtypes(eqn: JaxprEqn) -> str:
    """Returns the dtypes of the first two operands, joined by " x " if they differ."""
    algorithm = eqn.params.get("precision")
    if algorithm in _DTYPES:
        return _DTYPES[algorithm]
    operands = eqn.invars[:2] or eqn.outvars
    return " x ".join(dict.fromkeys(map(dtype_name, operands)))


def operations(equations: Iterable[Equation]) -> tuple[Operation, ...]:
    """Sums up equations by primitive and dtype, most matrix work first."""
    runs: Counter[tuple[str, str]] = Counter()
    work: Counter[tuple[str, str]] = Counter()
    for equation in equations:
        row = equation.name, operand_dtypes(equation.eqn)
        runs[row] += equation.times
        work[row] += equation.times * flops(equation.eqn)
    total = max(work.total(), 1)
    table = [Operation(*row, runs[row], work[row], work[row] / total) for row in runs]
    return tuple(sorted(table, key=lambda row: (-row.flops, row.primitive, row.dtype)))


def is_narrow(dtypes: str) -> bool:
    """Whether all dtypes, joined by " x ", have 16 bits or less."""
    return all(dtype.startswith(_NARROW) for dtype in dtypes.split(" x "))
