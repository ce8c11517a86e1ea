"""Islands: what their derivatives read, their softmaxes and their small sums."""

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ... import _jaxpr
from ..._jaxpr import LINEAR, Atom, Jaxpr, JaxprEqn, Var, variables
from ..derivatives import no_tangent, on_gpu

# Rows longer than that, as of a vocabulary, are in no kernel of a GPU as a whole.
_LONGEST_ROW = 16384
# A float32 sum that is less than half of its operand is smaller than that in half
# precision.
_SMALL_SUM = 1 / 2


def reached_by(jaxpr: Jaxpr, inputs: Iterable[Var]) -> set[Var]:
    """Returns the floating-point variables with a tangent, if these inputs have one."""
    found = {*inputs}
    for eqn in jaxpr.eqns:
        stops = _jaxpr.name_of(eqn) == "stop_gradient"
        if not stops and not found.isdisjoint(variables(eqn.invars)):
            found.update(v for v in eqn.outvars if _jaxpr.is_floating(v))
    return found


def read_by_derivative(island: Jaxpr, softmaxes: Collection[Var] = ()) -> list[Atom]:
    """Variables whose values the derivative reads, besides results of `softmaxes`."""
    active = reached_by(island, filter(_jaxpr.is_floating, island.invars))
    exponents = softmaxes_of(island) if softmaxes else {}
    wanted = {*variables(island.outvars)}.difference(softmaxes)
    wanted.update(exponents[v].exponents for v in softmaxes)
    found: list[Atom] = []
    for eqn in reversed(island.eqns):
        inputs = variables(eqn.invars)
        live = [v for v in inputs if v in active]
        if wanted.isdisjoint(eqn.outvars) or _jaxpr.name_of(eqn) == "stop_gradient":
            continue
        wanted.update(inputs)
        if live:
            found += _read(eqn, live)
    return found


def _read(eqn: JaxprEqn, live: Sequence[Var]) -> list[Atom]:
    """Operands whose values the derivative of an equation reads."""
    name = _jaxpr.name_of(eqn)
    if name in LINEAR:
        return [v for v in eqn.invars if not _jaxpr.is_floating(v)]
    if name == "mul":
        left, right = eqn.invars
        return [other for v, other in ((left, right), (right, left)) if v in live]
    if name == "div" and eqn.invars[1] not in live:
        return [eqn.invars[1]]
    return [*eqn.invars]


class Softmax(NamedTuple):
    """A softmax within an island."""

    exponents: Var  # its maxima subtracted
    axes: tuple[int, ...]


def softmaxes_of(island: Jaxpr) -> dict[Var, Softmax]:
    """Finds the softmaxes of an island, by their results."""
    maker = {v: eqn for eqn in island.eqns for v in eqn.outvars}
    quotients = (eqn for eqn in island.eqns if _jaxpr.name_of(eqn) == "div")
    found = {eqn.outvars[0]: _softmax(eqn, maker) for eqn in quotients}
    return {v: softmax for v, softmax in found.items() if softmax}


def _softmax(quotient: JaxprEqn, maker: Mapping[Var, JaxprEqn]) -> Softmax | None:
    """Returns the softmax that a quotient is.

    Proven is that exponentials are divided by their own sum over some axes, and that
    each other axis of the sum is the same axis of the divisor, whatever their lengths.
    """

    def made_by(v: Atom, name: str) -> JaxprEqn | None:
        eqn = maker.get(v) if isinstance(v, Var) else None
        return eqn if eqn is not None and _jaxpr.name_of(eqn) == name else None

    dividend, divisor = quotient.invars
    axes = range(len(_jaxpr.shape(divisor)))
    while broadcast := made_by(divisor, "broadcast_in_dim"):
        axes = [axes[d] for d in broadcast.params["broadcast_dimensions"]]
        divisor = broadcast.invars[0]
    exp, total = made_by(dividend, "exp"), made_by(divisor, "reduce_sum")
    if not (exp and total) or total.invars[0] is not dividend:
        return None
    summed, rank = total.params["axes"], len(_jaxpr.shape(dividend))
    exponents, left = exp.invars[0], sorted({*range(rank)}.difference(summed))
    if [*axes] != left or not isinstance(exponents, Var):
        return None
    return Softmax(exponents, tuple(summed))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def softmax_from(
    exponents: jax.Array, result: jax.Array, axes: tuple[int, ...]
) -> jax.Array:
    """Returns `result`, the softmax of the exponents, with their derivative."""
    return result


@functools.partial(softmax_from.defjvp, symbolic_zeros=True)
def _softmax_rule(
    axes: tuple[int, ...], primals: tuple[jax.Array, ...], tangents: tuple[Any, ...]
) -> tuple[jax.Array, Any]:
    # Derivatives of this one are of the exponents too.
    result, tangent = softmax_from(*primals, axes), tangents[0]
    if isinstance(tangent, SymbolicZero):
        return result, no_tangent(result)

    # XLA:GPU has one kernel for what begins with a reduction of the rows.
    def from_maximum(x: jax.Array) -> jax.Array:
        return x - 0 * jnp.expand_dims(jax.lax.reduce_max(x, axes), axes)

    p = on_gpu(from_maximum, result)
    product = p * tangent
    # Rounded probabilities do not add up to 1. Divided by their sum, a constant added
    # to the cotangent changes nothing, as in the exact derivative.
    mean = jnp.sum(product, axes, keepdims=True) / jnp.sum(p, axes, keepdims=True)
    # A difference here has a wrong gradient on a CPU with jax 0.8.0.
    return result, product + p * -mean


def small_sums(island: Jaxpr) -> list[Var]:
    """Results of reductions that are much smaller than their operand.

    They are saved, except sums of rows that a kernel may hold: a GPU computes a norm or
    softmax in one kernel, which a saved sum would split.
    """
    found = []
    for eqn in (eqn for eqn in island.eqns if "axes" in eqn.params):
        (result,), shape = eqn.outvars, _jaxpr.shape(eqn.invars[0])
        is_row = (*eqn.params["axes"],) == (len(shape) - 1,)
        fits = is_row and shape[-1] <= _LONGEST_ROW
        is_small = _jaxpr.size(result) < _SMALL_SUM * _jaxpr.size(eqn.invars[0])
        if is_small and not fits and _jaxpr.is_float32(result):
            found.append(result)
    return found


def needed_for(
    island: Jaxpr, atoms: Iterable[Atom], saved: Collection[Var]
) -> set[Var]:
    """Returns the variables from which values are computed, given saved ones."""
    known = {*small_sums(island)}.union(saved)
    found = {*variables(atoms)} - known
    for eqn in reversed(island.eqns):
        if not found.isdisjoint(eqn.outvars):
            found.update({*variables(eqn.invars)} - known)
    return found
