"""An optimizer's update in the form in which XLA:CPU moves the fewest bytes.

XLA:CPU writes an array to memory and reads it once more where TPU and GPU compilers
make one kernel: gradients before their norm is taken, a quotient that two moments use,
a state that is selected afterwards. The update is evaluated equation by equation, and
three of these are computed in another way: the selects of the state, sums over large
arrays, and what clips large arrays by a norm. The last two are right up to float32's
rounding, and all else is computed as the optimizer writes it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from . import _mesh
from ._reductions import LONGEST_ROW, sums_in_one_pass


def evaluate_selecting(
    applied: jax.Array, jaxpr: Any, consts: list[Any], inputs: list[Any], old: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Evaluates an update, and selects each leaf of its state where it is computed.

    Two kernels read a leaf of the old state if it is selected after the update: the one
    that writes the new leaf, and the one that computes the updates. XLA:CPU runs them
    in either order, and so copies every donated leaf first. Here what follows reads
    the selected leaf: the new one on a finite step, and on a skipped step an old one,
    of which nothing is kept. TPU and GPU compilers make one kernel of it in any case.

    Args:
      applied: bool[], whether the step is applied.
      jaxpr: the update; its last outputs are the new state.
      consts: its constants.
      inputs: its arguments.
      old: the leaves of the old state, in the order of the new ones.

    Returns:
      (updates, leaves of the selected state).
    """
    # A result of the jaxpr may be an argument or a literal, which no equation defines.
    count = len(jaxpr.outvars) - len(old)
    made_by = {var: equation for equation in jaxpr.eqns for var in equation.outvars}
    old_of = {
        var: leaf
        for var, leaf in zip(jaxpr.outvars[count:], old, strict=True)
        # Scalars cost nothing if they are selected afterwards, as all else is.
        if _is_var(var) and var in made_by and leaf.ndim
    }
    values = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True)
    )
    for equation in jaxpr.eqns:
        if _is_large_sum(equation):
            results = [_sum(jaxpr, equation, values)]
        elif factors := _factors_unless(equation, made_by):
            results = [_product_unless(equation, factors, values)]
        else:
            results = _evaluate(jaxpr, equation, values)
        for var, value in zip(equation.outvars, results, strict=True):
            values[var] = (
                jnp.where(applied, value, old_of[var]) if var in old_of else value
            )

    leaves = [_value(var, values) for var in jaxpr.outvars]
    state = []
    for var, new, leaf in zip(jaxpr.outvars[count:], leaves[count:], old, strict=True):
        # A select of a selected leaf would be one more operation in every kernel.
        # `old_of` has one old leaf for each variable. Where an optimizer returns one
        # value as two leaves, the other is selected here, from its own old leaf
        # (test_two_leaves_of_one_new_value_keep_an_old_value_each).
        is_selected = new is leaf or (_is_var(var) and old_of.get(var) is leaf)
        state.append(new if is_selected else jnp.where(applied, new, leaf))
    return leaves[:count], state


def _is_large(var: Any) -> bool:
    return var.aval.dtype == np.float32 and var.aval.size >= LONGEST_ROW


def _is_large_sum(equation: Any) -> bool:
    """Whether it sums all entries of an array, or the products of two vectors."""
    name, arrays = equation.primitive.name, equation.invars
    if name not in ("reduce_sum", "dot_general"):
        return False
    total = equation.outvars[0].aval
    # Two matrices may have their axes paired in either order.
    is_of_all = name == "reduce_sum" or arrays[0].aval.ndim == 1
    is_one_number = total.ndim == 0 and total.dtype == np.float32
    return is_of_all and is_one_number and all(map(_is_large, arrays))


def _sum(jaxpr: Any, equation: Any, values: dict[Any, Any]) -> jax.Array:
    """A sum over all entries, in a loop that computes these entries too.

    XLA:CPU gives a plain sum to another library's kernel. What that kernel reads must
    be in memory: unscaled gradients are written for it, since more than their norm is
    computed from them (test_a_norm_needs_a_sum_in_one_pass).
    """

    def whole(*arrays: jax.Array) -> jax.Array:
        return sums_in_one_pass([functools.reduce(jnp.multiply, arrays)], lanes=4)[0]

    def sharded(*arrays: jax.Array) -> jax.Array:
        operands = dict(zip(equation.invars, arrays, strict=True))
        return _evaluate(jaxpr, equation, operands)[0]

    return _mesh.if_whole(whole, sharded, *[values[v] for v in equation.invars])


def _factors_unless(equation: Any, made_by: dict[Any, Any]) -> list[Any]:
    """The products and quotients of `select_n(keep, x / d * c, x)`, last one first.

    That is how Optax clips, with scalars `keep`, `d` and `c`. Empty for all else.
    """
    if equation.primitive.name != "select_n" or len(equation.invars) != 3:
        return []
    keep, var, x = equation.invars
    if keep.aval.ndim or not _is_large(x):
        return []
    factors = []
    while var is not x:
        made = made_by.get(var) if _is_var(var) else None
        if made is None or made.primitive.name not in ("mul", "div"):
            return []
        if made.invars[1].aval.ndim:
            return []
        factors.append(made)
        var = made.invars[0]
    return factors


def _product_unless(
    equation: Any, factors: list[Any], values: dict[Any, Any]
) -> jax.Array:
    """`x` times 1 where it is kept, else times `1 / d * c`.

    XLA:CPU writes a quotient to memory if two kernels use it, and both read `x` beside
    it. A product with a scalar each of them computes again
    (test_clipping_needs_products_with_scalars).
    """
    keep, _, x = (_value(var, values) for var in equation.invars)
    factor = jnp.ones_like(x, shape=())
    for made in reversed(factors):
        y = _value(made.invars[1], values)
        factor = factor / y if made.primitive.name == "div" else factor * y
    return x * jnp.where(keep, jnp.ones_like(factor), factor)


def _evaluate(jaxpr: Any, equation: Any, values: dict[Any, Any]) -> list[Any]:
    """The results of one equation, computed as a jaxpr of its own."""
    invars = [v for v in equation.invars if _is_var(v)]
    # Not `primitive.bind` with the equation's parameters: what has a jaxpr among them
    # (custom_jvp_call, of jax.nn.relu) binds functions in its place.
    alone = jaxpr.replace(
        constvars=[], invars=invars, outvars=equation.outvars, eqns=[equation]
    )
    return core.jaxpr_as_fun(core.ClosedJaxpr(alone, []))(*[values[v] for v in invars])


def _value(var: Any, values: dict[Any, Any]) -> Any:
    return values[var] if _is_var(var) else jnp.asarray(var.val)


def _is_var(var: Any) -> bool:
    return not isinstance(var, core.Literal)
