"""A float32 function in, a mixed-precision one out."""

import functools
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ._autocast_run import Cast
from ._marks import NEEDS_LOSS_SCALE, checked_names, tracing
from ._operations import why_float32
from ._policy import checked_half
from ._tree import FlatCall, is_module
from ._validation import require_function, warn

F = TypeVar("F", bound=Callable[..., Any])
_NOTHING = "no product"  # in the set of what was warned of


def autocast(
    fun: F,
    dtype: DTypeLike | None = None,
    *,
    backward: DTypeLike | None = None,
    recompute: bool = True,
    keep_float32: Collection[str] = (),
    share_casts: bool = False,
) -> F:
    """`fun` with its matrix products and convolutions in half precision.

    | | runs in |
    |---|---|
    | matrix products and convolutions, forward and backward | half precision |
    | all other operations: norms, softmax, activations, losses | float32 |
    | parameters, their gradients, results | float32 |
    | products of `precision` HIGH or HIGHEST, of integers, outer products | float32 |
    | `custom_vjp` functions, kernels, a `while` under `vmap` | as traced |

    The backward pass reads what the forward pass read, bit for bit, with one exception:
    the derivative of a softmax reads the probabilities that the next product read.
    Values do not depend on the machine.

    Weights' gradients are float32 from the product on; those of convolutions and
    `ragged_dot` are half precision at first. What the user cast stays as cast. Call the
    result inside `jax.jit`: outside of it, each call traces anew.
    `diagnostics.precision_report` of the result lists what runs in which dtype.

    Args:
      fun: what `jax.jit` could trace; an argument that is not an array is static.
      dtype: float16 or bfloat16, a dtype or one of `get_policy`'s names.
      backward: dtype of the products of the backward pass; default `dtype`. With
        "bfloat16", of float32's range, a float16 forward pass needs no loss scale.
      recompute: whether the backward pass computes cheap operations again. It changes
        memory, never results. False leaves that to the caller's `jax.checkpoint`.
      keep_float32: names of what stays float32: functions in which a product is traced,
        scopes, modules, and places such as "costs.py:560".
      share_casts: whether what a product reads is cast once, and all later operations
        read the cast array, as in a cast by hand. For a ResNet's stream.

    Returns:
      A function with the arguments, results and result dtypes of `fun`.

    Raises:
      ValueError: `dtype` or `backward` is not float16 or bfloat16.
      TypeError: `fun` is not a function, or a name not a string; at the call, an
        argument is an NNX module.

    Warns:
      UserWarning: once, at the call, if no product became half precision, or a name in
        `keep_float32` matches nothing.

    Examples:
      >>> import jax.numpy as jnp, jmp_scale
      >>> half = jmp_scale.autocast(lambda x, w: x @ w, "float16")
      >>> half(jnp.full((2, 2), 1 / 3), jnp.eye(2)).dtype
      dtype('float32')
    """
    require_function("autocast", fun)
    forward = checked_half("dtype", dtype)
    back = forward if backward is None else checked_half("backward", backward)
    names = checked_names(keep_float32)
    warned: set[str] = set()

    @functools.wraps(fun)
    def in_half_precision(*args: Any, **kwargs: Any) -> Any:
        flat = FlatCall(fun, args, kwargs)
        for module in filter(is_module, flat.leaves):
            raise TypeError(
                f"autocast: expected no NNX modules, got a {type(module).__name__}, "
                "whose writes would be lost: use jmp_scale.nnx.autocast"
            )
        # The setting is for what stays float32.
        setting = getattr(jax.config, "jax_default_matmul_precision")  # noqa: B009
        with tracing(forward), jax.default_matmul_precision(None):
            jaxpr = jax.make_jaxpr(flat)(*flat.arrays)
        shared = functools.cache(lambda make, *facts: make(*facts))
        flags = bool(recompute), bool(share_casts)
        cast = Cast(forward, back, *flags, names, setting, warned, shared)
        results = cast.run(jaxpr, [True] * len(flat.arrays), *flat.arrays)
        _warn_of_nothing(jaxpr, cast)
        return flat.result(results)

    if back == jnp.float16:
        in_half_precision.__dict__[NEEDS_LOSS_SCALE] = True
    return in_half_precision  # pyright: ignore[reportReturnType]


def _warn_of_nothing(jaxpr: Any, cast: Cast) -> None:
    """Warns once of names that match nothing, and where no product became half."""
    names = cast.names
    if missing := sorted(names.names - names.found - cast.warned):
        cast.warned.update(missing)
        there = ", ".join(sorted(names.there)) or "none"
        warn(
            f"autocast: keep_float32 names nothing in which a product is: {missing}; "
            f"there are {there}"
        )
    if not cast.halved and _NOTHING not in cast.warned:
        cast.warned.add(_NOTHING)
        if reasons := why_float32(jaxpr):
            warn(f"autocast: no product became half precision: {reasons}")
