"""Functions with derivatives of their own, which save what they read, and no more."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero

from .._jaxpr import OwnPrimitive
from .._types import Function

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
T = TypeVar("T")
ByPosition = dict[int, jax.Array]
# Name of the functions with a rule of their own that `autocast` makes: in a traced
# program the report knows by it that autocast was there.
CAST = "autocast_products"

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


class Replacement(OwnPrimitive):
    """An equation that `autocast` puts into a program; JAX sees what `fun` binds.

    It is planned like the primitive of JAX of the same name, if there is one.
    """

    def __init__(self, name: str, fun: Callable[..., jax.Array]) -> None:
        super().__init__(name)
        self._fun = fun

    def bind(self, *operands: jax.Array, **params: Any) -> jax.Array:
        return self._fun(*operands, **params)


no_tangent = SymbolicZero.from_primal_value


def on_gpu(fun: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Returns `fun(x)` on GPUs, `x` elsewhere."""
    return lax.platform_dependent(x, cuda=fun, rocm=fun, default=lambda x: x)


def live_of(tangents: Sequence[Any], first: int = 0) -> ByPosition:
    """Returns the tangents of differentiated inputs, by position from the first on."""
    found = enumerate(tangents, first)
    return {i: t for i, t in found if not isinstance(t, SymbolicZero)}


def linear(fun: Callable[[A, B], C], residuals: A, tangents: B) -> C:
    """Returns `fun(residuals, tangents)`, whose transpose saves the residuals alone.

    What a rule for derivatives computes from residuals would be saved for the backward
    pass, unless that computes it itself, as of a checkpoint. `fun` is linear in the
    tangents, and may close over traced arrays, which are residuals too.
    """
    if getattr(jax.config, "jax_remat3", False):  # its checkpoints have no transpose
        return fun(residuals, tangents)
    return jax.checkpoint(fun, prevent_cse=False)(residuals, tangents)


def with_derivative(forward: Function, derivative: Function) -> Function:
    """Returns `forward` with this derivative, whose products policies can see.

    A policy of `jax.checkpoint` is asked of each product within a function that is
    differentiated. The rule runs the function inline, so that it is asked of these.
    `derivative` takes the results, the arguments and their tangents.
    """

    def unchanged(results: Any, *args: Any) -> Any:
        return results

    unchanged.__name__ = forward.__name__ = CAST
    # Two functions with one derivative. The rule of the first runs `forward` inline,
    # the second attaches to these results the derivatives that are left. Its inputs
    # are not stopped: JAX drops the rule of a function of known values, and with it
    # second derivatives in a scan.
    function, attach = jax.custom_jvp(forward), jax.custom_jvp(unchanged)

    def attached(results: Any, args: Any, tangents: Any) -> tuple[Any, Any]:
        results = attach(results, *args)
        return results, derivative(results, args, tangents)

    def rule(args: Any, tangents: Any) -> tuple[Any, Any]:
        return attached(forward(*args), args, tangents)

    def rule_of_attach(args: Any, tangents: Any) -> tuple[Any, Any]:
        return attached(args[0], args[1:], tangents[1:])

    function.defjvp(rule, symbolic_zeros=True)
    attach.defjvp(rule_of_attach, symbolic_zeros=True)
    return function


class Traces:
    """A cache: functions by the facts that they are made from, so that JAX traces once.

    Caches are compared by identity.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def made(self, make: Callable[..., T], *facts: Hashable) -> T:
        """Returns `make(*facts)`, or the earlier result for equal facts."""
        try:
            known = self._known.get((make, facts))
        except TypeError:  # objects of hijax have parameters of any kind
            return make(*facts)
        if known is None:
            known = self._known[make, facts] = make(*facts)
        return known
