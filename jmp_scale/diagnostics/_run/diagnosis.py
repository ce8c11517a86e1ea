"""`diagnose_nonfinite`: finds the cause of a step that is not finite."""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..._scaling.finite import all_finite
from ..._scaling.loss_scale import LossScale, scale_value
from ..._state import IS_CHECKED
from ..._tree import is_array
from ..._types import Arrays, Function, PyTree
from .._backward import Backward, Loss, concrete_arrays, meets_nonfinite
from .._findings import Finding, Rule, are_notes, finding, summary_of
from .._source import is_own_wrapper
from .._tables import leaf_name, printed, said
from .origins import origin_of

_LOWEST_TRIED = -14  # log2 of S; some overflows persist at S = 1
Cause = Literal["none", "forward", "overflow", "nan"]
_error = functools.partial(Rule, "error")
RULES = {
    "parameters not finite": _error(
        "It is a parameter that is not finite: an update made it so.",
        "No loss scale helps: go back to a checkpoint, and find what in the optimizer "
        "is not finite (docs/optax.md).",
    ),
    "argument not finite": _error(
        "It is not finite itself.", "No loss scale helps: fix the input."
    ),
    "masked row": _error(
        "{what} not finite: {operation}, of the infinities in {nonfinite_argument}.",
        "No loss scale helps. If they are a mask, a whole row is masked: leave it out, "
        "or mask with a large negative number.",
    ),
    "loss not finite": _error(
        "The loss itself is not finite: {operation}.",
        "No loss scale helps: fix this operation, or compute it in float32.",
    ),
    "gradient not finite": _error(
        "The loss is finite, but the gradient of {path} is not at any loss scale: "
        "{operation}.",
        "If it is a derivative of sqrt, log or a division at zero, replace the operand "
        "there: jnp.sqrt(jnp.where(x > 0, x, 1))",
    ),
    "not finite in half precision": _error(
        "{what} not finite in half precision, and is in float32: {operation}.",
        "sensitive_products(loss, ...) finds the products before it that must stay "
        "float32. If numbers leave float16's range, bfloat16 has float32's.",
    ),
    "gradient overflows": _error(
        "The gradients overflow, first in {path}, and are finite at loss scale "
        "2^{finite_at_log2}: {operation}.",
        "A DynamicLossScale falls to that; a constant one must be as low.",
    ),
    "backward pass raises": _error(
        "The backward pass raises an error at this loss scale, and none at "
        "2^{finite_at_log2}: {operation}.",
        "Cap S there: DynamicLossScale(max_loss_scale=2.0**{finite_at_log2}).",
    ),
}


@printed
class Diagnosis(NamedTuple):
    """The result of `diagnose_nonfinite`, in Python values.

    Attributes:
      findings: the cause and its cure; none where loss and gradients are finite.
      cause: "none", "forward" (the loss is not finite, at any S), "overflow" (the
        gradients are finite at a smaller S) or "nan" (at no S).
      path: the first gradient leaf that is not finite, as `jax.tree_util.keystr` names
        it; for "overflow" the first that overflows as S grows. Or None.
      finite_at_log2: for "overflow", log2 of the largest power of two below S whose
        gradients are finite.
      nonfinite_argument: the leaf of the arguments, such as `args[1]['x']`, or the
        constant of `fun` whose NaN or infinity reached the loss or the gradient. Or
        None; also for a mask of -inf that did no harm.
      operation: the operation that produced the NaN or infinity, in the backward pass
        unless the cause is "forward", such as "log gave NaN at /home/me/model.py:41".
        None if it was an argument. Or the error that a backward pass raised.
      in_parameters: whether `nonfinite_argument` is a parameter that holds more than a
        mask of -inf.
    """

    findings: tuple[Finding, ...]
    cause: Cause
    path: str | None = None
    finite_at_log2: int | None = None
    nonfinite_argument: str | None = None
    operation: str | None = None
    in_parameters: bool = False

    @property
    def ok(self) -> bool:
        """Whether loss and gradients are finite."""
        return are_notes(self.findings)

    def summary(self) -> str:
        """Returns the finding, if there is one."""
        return summary_of("Loss and gradients are finite.", self.findings)


@meets_nonfinite
def diagnose_nonfinite(
    fun: Function,
    loss_scale: LossScale | ArrayLike,
    *args: PyTree,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    transform: Function | None = None,
) -> Diagnosis:
    """Finds out why a step is not finite, by rerunning it at smaller loss scales.

    Use it with the parameters and the batch of a step that was skipped. It calls one
    compiled backward pass for each S, down to 2^-14. Then it evaluates the loss, or the
    gradient if the loss is finite, operation by operation on the host, and names the
    first operation whose NaN or infinity reached the result.

    Args:
      fun: the whole loss with its casts to low precision. Its arguments, `argnums`,
        `has_aux` and `transform` are those of `precision_report`.
      loss_scale: the loss scale of the step, or its S as a number.
      *args: parameters and batch of the step that was skipped.

    Raises:
      TypeError: as `precision_report`; also if `loss_scale` is neither a loss scale nor
        a number.
      ValueError: as `precision_report`.
    """
    function = "diagnose_nonfinite"
    s = scale_value(function, loss_scale)
    loss = Loss(function, fun, args, argnums, has_aux, transform)
    arrays, rejoin = concrete_arrays(function, args)
    leaves = jax.tree_util.tree_leaves_with_path(args)
    names = [f"args{jax.tree_util.keystr(p)}" for p, x in leaves if is_array(x)]

    paths: list[str] = []

    # S is an argument of the compiled function, so that it compiles once for all S.
    @jax.jit
    def flags(s: jax.Array, arrays: list[jax.Array]) -> Backward:
        return jax.tree.map(all_finite, loss.run(s, rejoin(arrays)))

    def run(s: float) -> tuple[bool, Any]:
        """Whether the loss is finite, and the first leaf that is not, or an error."""
        try:
            finite = jax.device_get(flags(jnp.float32(s), arrays))
        except RuntimeError as error:  # of a solver, such as lineax.CG
            return True, error
        paths[:] = finite.paths
        pairs = zip(finite.paths, finite.leaves, strict=True)
        return bool(finite.loss), next((path for path, flag in pairs if not flag), None)

    def diagnosis(cause: Cause, program: Function) -> Diagnosis:
        _, given, operation = origin_of(program, arrays, names)
        blamed = dict(zip(names, arrays, strict=True)).get(given or "")
        is_trained = _words(given or "") in _trained(paths, argnums, len(args))
        in_parameters = blamed is not None and is_trained and not _is_mask(blamed)
        # In this context `autocast` leaves its function in float32.
        with IS_CHECKED(True):
            in_float32 = cause != "overflow" and run(s) == (True, None)
        found = Diagnosis((), cause, path, finite_at, given, operation, in_parameters)
        return _with_finding(found, in_float32)

    def leaf(loss: Loss, arrays: Arrays) -> PyTree:
        backward = loss.run(s, rejoin(arrays))
        return backward.leaves[backward.paths.index(path)]

    finite_at = None
    loss_finite, path = run(s)
    if not loss_finite:
        return diagnosis("forward", lambda x: loss.of(fun(*rejoin(x))))
    if path is None:
        return Diagnosis((), "none")
    # Start from the largest power of two below S.
    for log2_scale in range(int(np.ceil(np.log2(s))) - 1, _LOWEST_TRIED - 1, -1):
        _, smaller = run(2.0**log2_scale)
        if smaller is None:
            finite_at = log2_scale
            break
        # A leaf that still overflows at the smallest S overflows first as S grows.
        path, s = smaller, 2.0**log2_scale
    if isinstance(path, RuntimeError):  # at the smallest S that is not finite
        if finite_at is None:
            raise path
        operation = said(path).rstrip(".")
        raised = Diagnosis((), "overflow", None, finite_at, operation=operation)
        return _with_finding(raised, in_float32=False)
    cause = "nan" if finite_at is None else "overflow"
    # Without `autocast` first, which loses the line around jnp.linalg.norm.
    plain = dataclasses.replace(loss, fun=_plain(loss.fun))
    found = diagnosis(cause, functools.partial(leaf, plain))
    return found if found.operation else diagnosis(cause, functools.partial(leaf, loss))


def _with_finding(found: Diagnosis, in_float32: bool) -> Diagnosis:
    """Returns a diagnosis with its finding, of a loss that may be finite in float32."""
    operation, _, where = (found.operation or "an unknown operation").partition(" at ")
    rule = "not finite in half precision" if in_float32 else _rule_of(found)
    if rule in ("parameters not finite", "argument not finite"):
        where = found.nonfinite_argument or ""
    elif where and found.cause != "forward":
        where += " (backward)"
    values = found._asdict()
    values |= {"operation": operation, "path": leaf_name(found.path or "")}
    values["what"] = "The loss is" if found.cause == "forward" else "The gradient is"
    return found._replace(findings=(finding(RULES, rule, where, **values),))


def _rule_of(found: Diagnosis) -> str:
    if found.cause == "overflow":
        raises = found.path is None
        return "backward pass raises" if raises else "gradient overflows"
    if found.in_parameters:
        return "parameters not finite"
    if found.nonfinite_argument:
        return "masked row" if found.operation else "argument not finite"
    return "loss not finite" if found.cause == "forward" else "gradient not finite"


def _trained(
    paths: Sequence[str], argnums: int | Sequence[int], count: int
) -> set[tuple[str, ...]]:
    """Returns the words of differentiated leaves' names, from those of gradients."""
    if isinstance(argnums, int):
        argnums, paths = [argnums], [f"[0]{path}" for path in paths]
    split = map(_words, paths)
    return {("args", str(argnums[int(i)] % count), *rest) for i, *rest in split}


def _words(path: str) -> tuple[str, ...]:
    """Splits a name: NNX writes `['w'].value` for a gradient, `.w.value` for a leaf."""
    return tuple(re.findall(r"\w+", path))


def _is_mask(x: jax.Array) -> bool:
    """Whether an array has finite elements, and is -inf elsewhere."""
    finite = jnp.isfinite(x)
    return bool(finite.any() & (finite | (x == -jnp.inf)).all())


def _plain(fun: Function) -> Function:
    """Returns the function in `autocast` and `jax.jit`."""
    while isinstance(fun, jax.stages.Wrapped) or is_own_wrapper(fun):
        fun = getattr(fun, "__wrapped__")  # noqa: B009
    return fun
