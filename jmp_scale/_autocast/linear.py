"""Derivatives of our own: linear functions that save what they read, and no more.

A rule for derivatives is transposed. What it computes from residuals alone would be
saved for the backward pass, unless that computes it itself. `jax.checkpoint` would do
that, but JAX does not transpose it under `JAX_REMAT3`, and
`jax.custom_derivatives.linear_call` has no rule for `vmap`. So this is a primitive.
"""

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir, partial_eval

from .. import _jaxpr
from .._jaxpr import Jaxpr
from .._types import Arrays

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
T = TypeVar("T")
ByPosition = dict[int, jax.Array]

linear_p = Primitive("autocast_linear")
linear_p.multiple_results = True

# Returns `value`, differentiates as its first argument.
with_value = jax.custom_jvp(lambda _, value: value)
with_value.defjvp(lambda both, t: (with_value(*both), t[0]), symbolic_zeros=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def noting(note: Callable[[], None], x: jax.Array) -> jax.Array:
    """Returns `x`, and calls `note` when it is differentiated."""
    return x


@noting.defjvp
def _noted(note: Callable[[], None], primals: Any, tangents: Any) -> Any:
    note()
    return noting(note, *primals), *tangents


no_tangent = SymbolicZero.from_primal_value


def live_of(tangents: Sequence[Any]) -> ByPosition:
    """Returns the tangents of differentiated inputs, by position."""
    found = enumerate(tangents)
    return {i: t for i, t in found if not isinstance(t, SymbolicZero)}


class Traces:
    """What was made of equal facts, for JAX to trace once; it equals no other one."""

    def __init__(self) -> None:
        self.known: dict[Hashable, Any] = {}

    def made(self, make: Callable[..., T], *facts: Hashable) -> T:
        """Returns `make(*facts)`, or the earlier result for equal facts."""
        try:
            is_known = (make, facts) in self.known
        except TypeError:  # objects of hijax have parameters of any kind
            return make(*facts)
        if not is_known:
            self.known[make, facts] = make(*facts)
        return self.known[make, facts]


def linear(
    fun: Callable[[A, B], C], residuals: A, tangents: B, traces: Traces | None = None
) -> C:
    """Returns `fun(residuals, tangents)`, whose transpose saves the residuals alone.

    Args:
      fun: a function of two pytrees of arrays, linear in the second one. It may close
        over traced arrays, which are residuals too.
      residuals: arrays for the backward pass; those that `fun` reads are saved.
      tangents: the arrays in which it is linear.
      traces: earlier traces of `fun`, which is not retraced for equal types.
    """
    traces = Traces() if traces is None else traces
    arrays, tree = jax.tree.flatten((residuals, tangents))
    key, consts = (tree, *map(jax.typeof, arrays)), []
    trace = traces.known.get(key)
    if trace is None:
        count = len(jax.tree.leaves(tangents))

        def flat(*arrays: jax.Array) -> C:
            return fun(*jax.tree.unflatten(tree, arrays))

        traced, out = jax.make_jaxpr(flat, return_shape=True)(*arrays)
        jaxpr, consts = _jaxpr.open_jaxpr(traced)
        jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
        # Residuals that are not read are not saved.
        jaxpr, is_read = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        params = _params(jaxpr, sum(is_read[len(is_read) - count :]))
        trace = params, is_read, jax.tree.structure(out)
        if not consts:  # they belong to this call
            traces.known[key] = trace
    params, is_read, result_tree = trace
    outs = linear_p.bind(*itertools.compress([*consts, *arrays], is_read), **params)
    return jax.tree.unflatten(result_tree, outs)


def _params(jaxpr: Jaxpr, tangents: int) -> dict[str, Any]:
    """Returns the parameters of an equation, which is linear in its last inputs."""
    # Its transposes, by their results, are shared by equations with this jaxpr.
    closed = ClosedJaxpr(jaxpr, [])
    return {"jaxpr": closed, "tangents": tangents, "transposes": Traces()}


def _run(*operands: jax.Array, jaxpr: ClosedJaxpr, **_: Any) -> list[jax.Array]:
    return jaxpr_as_fun(jaxpr)(*operands)


def _split(operands: Sequence[Any], tangents: int) -> tuple[list[Any], list[Any]]:
    """Returns the residuals, and the operands in which the function is linear."""
    first = len(operands) - tangents
    return [*operands[:first]], [*operands[first:]]


def _jvp(
    primals: Sequence[Any], moves: Sequence[Any], *, tangents: int, **params: Any
) -> tuple[list[jax.Array], list[jax.Array]]:
    outs = linear_p.bind(*primals, tangents=tangents, **params)
    live = {i: t for i, t in enumerate(moves) if type(t) is not ad.Zero}
    residuals, _ = _split(primals, tangents)
    if all(i >= len(residuals) for i in live):
        own = map(ad.instantiate_zeros, moves[len(residuals) :])
        return outs, linear_p.bind(*residuals, *own, tangents=tangents, **params)

    def moved(primals: Arrays, live: ByPosition) -> list[jax.Array]:
        def run(some: ByPosition) -> list[jax.Array]:
            return _run(*(some.get(i, x) for i, x in enumerate(primals)), **params)

        return jax.jvp(run, ({i: primals[i] for i in live},), (live,))[1]

    return outs, linear(moved, [*primals], live)


def _transposed(
    cotangents: Sequence[Any],
    *operands: Any,
    jaxpr: ClosedJaxpr,
    tangents: int,
    transposes: Traces,
) -> list[jax.Array | None]:
    residuals, unknown = _split(operands, tangents)
    live = {i: c for i, c in enumerate(cotangents) if type(c) is not ad.Zero}

    def transposed(residuals: Arrays, cotangents: ByPosition) -> list[jax.Array]:
        def run(*tangents: jax.Array) -> ByPosition:
            outs = _run(*residuals, *tangents, jaxpr=jaxpr)
            return {i: outs[i] for i in cotangents}

        # The operands have the types of cotangents: on Explicit mesh axes an array
        # that is `reduced` has a cotangent that is `unreduced`.
        _, types = _split(jaxpr.in_avals, tangents)
        zeros = [ad.instantiate_zeros(ad.Zero(aval)) for aval in types]
        return [*jax.vjp(run, *zeros)[1](cotangents)]

    made = transposes.known.setdefault(tuple(live), Traces())
    found = linear(transposed, residuals, live, made)
    own = [isinstance(x, ad.UndefinedPrimal) for x in unknown]
    wanted = [x if is_own else None for x, is_own in zip(found, own, strict=True)]
    return [*[None] * len(residuals), *wanted]


def _batched(
    axis: Any, operands: Arrays, axes: Sequence[Any], *, tangents: int, **params: Any
) -> tuple[list[jax.Array], list[int | None]]:
    if all(each is None for each in axes):
        outs = linear_p.bind(*operands, tangents=tangents, **params)
        return outs, [None] * len(outs)

    def run(residuals: Arrays, tangents: Arrays) -> list[jax.Array]:
        return _run(*residuals, *tangents, **params)

    batched = jax.vmap(
        run,
        in_axes=_split(axes, tangents),
        axis_name=axis.name,
        axis_size=axis.size,
        spmd_axis_name=axis.spmd_name,
    )
    outs = linear(batched, *_split(operands, tangents))
    return outs, [0] * len(outs)


def _without_unused(
    is_used: list[bool], *rest: Any
) -> tuple[list[bool], JaxprEqn | None]:
    """Returns the operands that used results need, and the equation of these alone."""
    eqn: JaxprEqn = rest[-1]  # from jax 0.12 on behind another argument
    if not any(is_used):
        return [False] * len(eqn.invars), None
    jaxpr, is_read = partial_eval.dce_jaxpr(_jaxpr.bare(eqn.params["jaxpr"]), is_used)
    if all(is_used) and all(is_read):
        return is_read, eqn
    _, own = _split(is_read, eqn.params["tangents"])
    smaller = eqn.replace(
        invars=[*itertools.compress(eqn.invars, is_read)],
        outvars=[*itertools.compress(eqn.outvars, is_used)],
        params=_params(jaxpr, sum(own)),
    )
    return is_read, smaller


linear_p.def_impl(_run)
# JAX asks for it where a program holds objects of `jax.experimental.hijax`.
setattr(linear_p, "to_lojax", _run)  # noqa: B010
linear_p.def_abstract_eval(lambda *_, jaxpr, **__: jaxpr.out_avals)
mlir.register_lowering(linear_p, mlir.lower_fun(_run, multiple_results=True))
ad.primitive_jvps[linear_p] = _jvp
ad.primitive_transposes[linear_p] = _transposed
batching.fancy_primitive_batchers[linear_p] = _batched
partial_eval.dce_rules[linear_p] = _without_unused
