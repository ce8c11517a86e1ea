"""`precision_report`: finds the lines of a program that half precision harms."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from ..._jaxpr import ClosedProgram
from ..._policy import is_half
from ..._state import find_half_storage
from ..._tree import is_array, split_arrays
from ..._types import Function, PyTree
from .._backward import Loss
from .._findings import LEVELS, Finding, are_notes, summary_of
from .._source import Place, begin_user_code, place_of_caller, place_of_function
from .._tables import printed, table
from .facts import Equation, flops, is_narrow, operand_dtypes
from .rules import BACKWARD, LARGEST, found_at, full_matmuls
from .walk import Walk

_REPORTS = itertools.count()


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


@printed
class PrecisionReport(NamedTuple):
    """The result of `precision_report`, in Python values.

    Attributes:
      findings: one for each line and rule, in the order of the program, forward first.
        A finding within a library names its line too.
      operations: what runs in which dtype, most matrix work first.
      half_share: share of the FLOPs of matrix products and convolutions, forward and
        backward, whose operands are half precision, from 0 to 1; 0 if there are none.
      not_looked_into: (primitive, "file:line") of opaque operations, which are not
        analyzed, such as Pallas kernels and callbacks.
    """

    findings: tuple[Finding, ...]
    operations: tuple[Operation, ...]
    half_share: float
    not_looked_into: tuple[tuple[str, str], ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there is nothing above a note."""
        return are_notes(self.findings)

    def summary(self) -> str:
        """Returns the findings, and the matrix work by dtype."""
        details = [f"Not looked into: {' at '.join(x)}." for x in self.not_looked_into]
        rows = [("operation", "operands", "runs", "share")]
        for row in filter(lambda row: row.flops, self.operations):
            numbers = str(row.executions), f"{100 * row.share:.1f} %"
            rows.append((row.primitive, row.dtype, *numbers))
        if rows[1:]:
            share = f"{100 * self.half_share:.1f} %"
            details.append(f"{share} of the matrix work is half precision:")
            details += table(rows, names=2)
        else:
            details.append("No matrix products or convolutions.")
        return summary_of("No line loses precision.", self.findings, *details)


def precision_report(
    fun: Function,
    *args: PyTree,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    transform: Function | None = None,
    opt_state: PyTree = None,
) -> PrecisionReport:
    """Finds the lines of a loss and its backward pass that half precision harms.

    Use it before you train in half precision, or when a run in half precision is worse
    than in float32. Nothing runs: the loss and its gradient are traced, and their
    operations are analyzed. A finding names the innermost line of your own code. The
    rules are in `docs/precision.md`.

    Args:
      fun: the whole loss as you train it, without the loss scale.
      *args: the arguments of `fun`; `jax.ShapeDtypeStruct`s may stand for arrays.
        Arguments that are not arrays are static.
      argnums: positions of the differentiated arguments, as in JAX.
      has_aux: whether `fun` returns `(loss, aux)`.
      transform: differentiates `fun`. None, the default, means `jax.value_and_grad`;
        `flax.nnx.value_and_grad` if an NNX module is among the arguments; and, for an
        Equinox module or if a leaf has no derivative (an integer, a key, a function),
        `jax.value_and_grad` of the inexact arrays alone.
      opt_state: the optimizer's state. If it (or `args`) contains a state of
        `with_half_storage`, half-precision parameters are not an error.

    Raises:
      TypeError: `fun` is not callable or does not return a scalar loss, or
        `(loss, aux)` with `has_aux`.
      ValueError: as `transform`, whose errors tell what cannot be differentiated.
    """
    checked = Loss("precision_report", fun, args, argnums, has_aux, transform)
    numbers = {"argnums": argnums} if argnums != 0 else {}  # Equinox has no `argnums`
    caller = place_of_caller()

    def checked_fun(*args: PyTree, **kwargs: PyTree) -> PyTree:
        out = begin_user_code(fun, *args, **kwargs)
        checked.of(out)
        return out

    with _noting_lost_constants() as (infinite, zero):
        program, output = _trace(checked_fun, args)
        gradient = checked.transform(checked_fun, has_aux=has_aux, **numbers)
        differentiated, pair = _trace(gradient, args)
    gradients = pair[1] if isinstance(pair, tuple) and len(pair) == 2 else None
    forward = Walk(program, caller, zero)
    backward = Walk(differentiated, caller, zero, differentiated=True)
    operations = _operations(backward.operations)
    keeps_digits = find_half_storage((args, opt_state))
    place = place_of_function(fun, caller)
    found = [
        *(() if keeps_digits else _in_half("half-parameters", gradients, place)),
        *_overflowing_constants(forward, infinite),
        *forward.found,
        *_in_half("half-loss", output[0] if has_aux else output, place),
        *backward.found,
        # autocast left products in float32 on purpose, so the user need not cast them.
        *(() if forward.autocasts else full_matmuls(backward.operations)),
    ]
    findings = tuple(_one_per_line(found))
    share = sum(row.share for row in operations if is_narrow(row.dtype))
    return PrecisionReport(findings, operations, share, tuple(forward.unread))


def _trace(fun: Function, args: tuple[PyTree, ...]) -> tuple[ClosedProgram, PyTree]:
    """Returns the jaxpr of `fun(*args)`, and shapes and dtypes of its array results."""
    arrays, rejoin = split_arrays(args)

    def on_arrays(*arrays: jax.Array) -> PyTree:
        out = fun(*rejoin(arrays))
        return jax.tree.map(lambda leaf: leaf if is_array(leaf) else None, out)

    return jax.make_jaxpr(on_arrays, return_shape=True)(*arrays)


@contextlib.contextmanager
def _noting_lost_constants() -> Iterator[tuple[list[Place], list[Place]]]:
    """Records the lines at which NumPy casts a constant to infinity, or to 0."""
    lines: dict[str, list[Place]] = {"overflow": [], "underflow": []}

    def note(kind: str, flag: int) -> None:
        lines[kind].append(place_of_caller())

    # NumPy would not cast anything for a trace in JAX's cache. With metadata of their
    # own these traces are new, and no compiled program shares them.
    fresh = set_xla_metadata(precision_report=str(next(_REPORTS)))
    with fresh, np.errstate(over="call", under="call", call=note):
        yield lines["overflow"], lines["underflow"]


def _in_half(rule: str, tree: PyTree, place: Place) -> Iterator[Finding]:
    """Finds half-precision arrays: parameters by their gradients, or a loss."""
    pairs = jax.tree.leaves_with_path(tree)
    halves = [(path, str(x.dtype)) for path, x in pairs if is_half(str(x.dtype))]
    if halves:
        path, dtype = jax.tree_util.keystr(halves[0][0]), halves[0][1]
        count = f"{len(halves)} arrays" if halves[1:] else "an array"
        named = {"count": count, "first": f", {path}" if path else ""}
        yield found_at(rule, place, dtype=dtype, **named)


def _overflowing_constants(forward: Walk, places: list[Place]) -> Iterator[Finding]:
    """Finds constants that were already infinite when they entered the trace."""
    # The trace says where such a constant is used, if at all, not where it is created.
    for dtype in sorted(forward.infinite):
        names = {"what": "A constant", "held": "infinite", "dtype": dtype}
        for place in places:
            yield found_at("half-constant", place, cure=LARGEST.format(dtype), **names)


def _operations(equations: Iterable[Equation]) -> tuple[Operation, ...]:
    """Sums up equations by primitive and dtype, most matrix work first."""
    runs: Counter[tuple[str, str]] = Counter()
    work: Counter[tuple[str, str]] = Counter()
    for equation in equations:
        row = equation.name, operand_dtypes(equation.eqn)
        runs[row] += equation.times
        work[row] += equation.times * flops(equation.eqn)
    total = max(work.total(), 1)
    rows = [Operation(*row, runs[row], work[row], work[row] / total) for row in runs]
    return tuple(sorted(rows, key=lambda row: (-row.flops, row.primitive, row.dtype)))


def _one_per_line(found: Iterable[Finding]) -> Iterator[Finding]:
    """Yields the worst finding of each line and rule, in the order of the first."""
    groups: dict[object, list[Finding]] = {}
    for f in found:
        line = f.where.removesuffix(BACKWARD)
        groups.setdefault((line, f.rule), []).append(f)
    for group in groups.values():
        worst = min(group, key=lambda f: LEVELS.index(f.level))
        # A line that errs in both passes is wrong forward.
        yield worst._replace(where=min((f.where for f in group), key=len))
