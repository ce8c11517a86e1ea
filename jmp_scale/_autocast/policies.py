"""Products that policies of `jax.checkpoint` see, also under `JAX_REMAT3`.

There a policy is asked before a function's rule for derivatives runs, so what is in the
function is out of its sight. An object of `jax.experimental.hijax` asks it itself.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import ad

from .._jaxpr import JaxprEqn

Given = dict[int, jax.Array]  # half-precision results of products, by position


class Shown(NamedTuple):
    """A function of pytrees of arrays, whose products a policy may save."""

    run: Callable[..., Any]  # with a rule for derivatives, which runs `forward`
    forward: Callable[..., Any]
    rerun: Callable[..., Any]  # as `run`, of `Given` too, which it does not compute
    given_by: Callable[[Any], Given]  # all of them, of the results
    products: Sequence[JaxprEqn]  # by position

    def vmap(self, axes: Any, **options: Any) -> "Shown":
        run, forward = (
            jax.vmap(fun, axes, **options) for fun in (self.run, self.forward)
        )
        rerun = jax.vmap(self.rerun, (0, *axes), **options)
        return self._replace(run=run, forward=forward, rerun=rerun)


def in_sight(shown: Shown) -> Callable[..., Any]:
    """Its function, with products in sight of policies."""
    if not getattr(jax.config, "jax_remat3", False):
        return shown.run

    def call(*args: Any) -> Any:
        return _box()(shown, args)(*args)

    return call


@functools.cache
def _box() -> Any:
    # Older versions of JAX lack it.
    hijax: Any = importlib.import_module("jax.experimental.hijax")

    class AutocastUnit(hijax.HiPrim):
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

            def run(some: Given) -> Any:
                values = [some.get(i, x) for i, x in enumerate(arrays)]
                shown = self.params["shown"]
                return shown.run(*jax.tree.unflatten(self.in_tree, values))

            return jax.jvp(run, ({i: arrays[i] for i in live},), (live,))

        def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
            batched = self.params["shown"].vmap(
                dims,
                axis_name=axis_data.name,
                axis_size=axis_data.size,
                spmd_axis_name=axis_data.spmd_name,
            )
            outs = AutocastUnit(batched, args)(*args)
            return outs, jax.tree.map(lambda _: 0, outs)

        def remat(self, trace: Any, *args: Any) -> Any:
            shown, outs = self.params["shown"], self(*args)
            given = {
                k: x
                for k, x in shown.given_by(outs).items()
                if _is_saved(trace.policy, shown.products[k])
            }
            return outs, given, shown.rerun if given else lambda _, *args: self(*args)

    return AutocastUnit


def _is_saved(policy: Callable[..., Any] | None, product: JaxprEqn) -> bool:
    if policy is None:
        return False
    avals = [v.aval for v in product.invars]
    case = policy(product.primitive, *avals, **product.params)
    # An array that would be offloaded is recomputed.
    return case is True or type(case).__name__ == "SaveableType"
