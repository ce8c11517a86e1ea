"""Functions with derivatives of their own, whose products policies of checkpoints see.

A policy of `jax.checkpoint` is asked of each product that it meets where a function is
differentiated. A rule for derivatives runs the function inline, so that its products
are met. Under `JAX_REMAT3` a policy is asked before the rule runs; there an object of
`jax.experimental.hijax` asks it itself.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import ad

from .._jaxpr import JaxprEqn
from .linear import ByPosition
from .marks import CAST


class Shown(NamedTuple):
    """A function of pytrees of arrays, whose products a policy may save."""

    function: Callable[..., Any]  # with a rule for derivatives
    forward: Callable[..., Any]  # without
    # As `function`, of results of products that it need not compute, too.
    from_saved: Callable[..., Any]
    products: Sequence[JaxprEqn]  # by position
    # The half-precision results of all products, by position, of all results.
    saved_of: Callable[[Any], ByPosition]


def in_sight(
    evaluate: Callable[..., Any],
    derivative: Callable[..., Any],
    products: Sequence[JaxprEqn],
    saved_of: Callable[[Any], ByPosition],
    is_transposed: bool,
) -> Callable[..., Any]:
    """Returns a function with its own derivative, whose products policies can see.

    `evaluate` takes results of products that it need not compute, and the arguments,
    `derivative` the results, the arguments and their tangents. `is_transposed`: it
    stands in a rule for derivatives, and JAX does not transpose an object of hijax.
    """

    def forward(*args: Any) -> Any:
        return evaluate({}, *args)

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
    if is_transposed or not getattr(jax.config, "jax_remat3", False):
        return function

    def from_saved(saved: ByPosition, *args: Any) -> Any:
        return attach(evaluate(saved, *args), *args)

    shown = Shown(function, forward, from_saved, products, saved_of)
    return lambda *args: _box()(shown, args)(*args)


@functools.cache
def _box() -> Any:
    # Older versions of JAX lack it.
    hijax: Any = importlib.import_module("jax.experimental.hijax")

    class AutocastProducts(hijax.HiPrim):
        skip_linearization_on_zero_tangents = True
        lin, linearized = hijax.linearize_from_jvp
        vjp_fwd, vjp_bwd_retval = hijax.vjp_from_lin

        def __init__(self, shown: Shown, args: Any) -> None:
            jaxpr, out = jax.make_jaxpr(shown.forward, return_shape=True)(*args)
            self.in_avals = jax.tree.map(jax.typeof, args)
            self.out_aval = jax.tree.unflatten(jax.tree.structure(out), jaxpr.out_avals)
            self.params = {"jaxpr": jaxpr, "shown": shown}
            super().__init__()

        def expand(self, *args: Any) -> Any:
            outs = jaxpr_as_fun(self.params["jaxpr"])(*jax.tree.leaves(args))
            return jax.tree.unflatten(self.out_tree, outs)

        def jvp(self, primals: Any, tangents: Any) -> Any:
            arrays = jax.tree.leaves(primals)
            moves = enumerate(self.in_tree.flatten_up_to(tangents))
            live = {i: t for i, t in moves if type(t) is not ad.Zero}

            def function(some: ByPosition) -> Any:
                values = [some.get(i, x) for i, x in enumerate(arrays)]
                shown = self.params["shown"]
                return shown.function(*jax.tree.unflatten(self.in_tree, values))

            return jax.jvp(function, ({i: arrays[i] for i in live},), (live,))

        def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
            batched = functools.partial(
                jax.vmap,
                axis_name=axis_data.name,
                axis_size=axis_data.size,
                spmd_axis_name=axis_data.spmd_name,
            )
            shown = self.params["shown"]
            shown = shown._replace(
                function=batched(shown.function, dims),
                forward=batched(shown.forward, dims),
                from_saved=batched(shown.from_saved, (0, *dims)),
            )
            outs = AutocastProducts(shown, args)(*args)
            return outs, jax.tree.map(lambda _: 0, outs)

        def remat(self, trace: Any, *args: Any) -> Any:
            shown, outs = self.params["shown"], self(*args)
            saved = {
                k: x
                for k, x in shown.saved_of(outs).items()
                if _is_saved(trace.policy, shown.products[k])
            }
            from_saved = shown.from_saved if saved else lambda _, *args: self(*args)
            if jax.__version_info__ < (0, 12):
                # There the function closes over what is saved.
                return outs, functools.partial(from_saved, saved)
            return outs, saved, from_saved

    return AutocastProducts


def _is_saved(policy: Callable[..., Any] | None, product: JaxprEqn) -> bool:
    if policy is None:
        return False
    avals = [v.aval for v in product.invars]
    case = policy(product.primitive, *avals, **product.params)
    # An array that would be offloaded is not saved.
    return case is True or type(case).__name__ == "SaveableType"
