"""A float32 function in, a mixed-precision one out."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import jax
from jax.typing import DTypeLike

from ._autocast_run import Cast
from ._marks import checked_names, tracing
from ._policy import checked_half

F = TypeVar("F", bound=Callable[..., Any])
_ARRAY = object()  # in the place of an array


def autocast(
    fun: F,
    dtype: DTypeLike,
    *,
    backward: DTypeLike | None = None,
    recompute: bool = True,
    keep_float32: Collection[str] = (),
    share_casts: bool = False,
) -> F:
    """`fun` with its matrix products and convolutions in half precision.

    ```
    forward:   product(x, w) = half(x) half(w), in float32 again
    backward:  of x in half precision; of w half(x) half(c), with a float32 result
    the rest:  as traced; what is cheap, between two products, is computed once more in
               the backward pass, from half-precision copies of what it reads
    ```

    So norms, softmax, activations, losses, parameters and their gradients are float32.
    Weights' gradients of convolutions and `ragged_dot` are half precision at first, and
    on a TPU so is what a product and later operations read. Casts of the user stay, and
    float32 stay sums (one operand is a vector), products with `precision` HIGH or
    HIGHEST, and those in a `custom_vjp` function, a kernel or a `while` under `vmap`.
    `diagnostics.precision_report` of the result lists what runs in which dtype.

    Args:
      fun: what `jax.jit` could trace; an argument that is not an array is static.
      dtype: float16 or bfloat16, a name or a dtype.
      backward: dtype of the products of the backward pass; default `dtype`. With
        "bfloat16", of float32's range, a float16 forward pass needs no loss scale.
      recompute: whether the backward pass computes cheap operations again, so that
        hardly any float32 is kept. False leaves that to the caller's `jax.checkpoint`.
      keep_float32: names of jitted functions, of others' code, that stay as they are.

    Returns:
      A function with the arguments, results and result dtypes of `fun`.

    Raises:
      ValueError: `dtype` or `backward` is not float16 or bfloat16.
      TypeError: an argument is an NNX module, at the call.

    Examples:
      >>> import jax.numpy as jnp, jmp_scale
      >>> half = jmp_scale.autocast(lambda x, w: x @ w, "float16")
      >>> half(jnp.full((2, 2), 1 / 3), jnp.eye(2)).dtype
      dtype('float32')
    """
    forward = checked_half("dtype", dtype)
    back = forward if backward is None else checked_half("backward", backward)
    names = checked_names(keep_float32)
    unread: set[str] = set()

    @functools.wraps(fun)
    def in_half_precision(*args: Any, **kwargs: Any) -> Any:
        flat = _Flat(fun, args, kwargs)
        for module in filter(_is_module, flat.leaves):
            raise TypeError(
                f"autocast: expected no NNX modules, got a {type(module).__name__}, "
                "whose writes would be lost: use jmp_scale.nnx.autocast"
            )
        with tracing(forward):
            jaxpr = jax.make_jaxpr(flat)(*flat.arrays)
        shared = functools.cache(lambda make, *facts: make(*facts))
        flags = bool(recompute), bool(share_casts)
        cast = Cast(forward, back, *flags, names, unread, shared)
        weights = [True] * len(flat.arrays)
        return flat.result(cast.run(jaxpr, weights, *flat.arrays))

    return in_half_precision  # pyright: ignore[reportReturnType]


class _Flat:
    """A call as a function of its arrays alone, which returns arrays alone."""

    def __init__(self, fun: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._fun = fun
        self.leaves, self._tree = jax.tree.flatten((args, kwargs), is_leaf=_is_module)
        self.arrays = [x for x in self.leaves if isinstance(x, jax.Array)]
        self.__name__ = self.__qualname__ = getattr(fun, "__name__", "fun")

    def __call__(self, *arrays: Any) -> list[Any]:
        left = iter(arrays)
        leaves = [next(left) if isinstance(x, jax.Array) else x for x in self.leaves]
        args, kwargs = jax.tree.unflatten(self._tree, leaves)
        results, self._out_tree = jax.tree.flatten(self._fun(*args, **kwargs))
        self._out = [_ARRAY if isinstance(x, jax.Array) else x for x in results]
        return [x for x in results if isinstance(x, jax.Array)]

    def result(self, arrays: Sequence[Any]) -> Any:
        """What the function returned, with these arrays in it."""
        left = iter(arrays)
        out = [next(left) if x is _ARRAY else x for x in self._out]
        return jax.tree.unflatten(self._out_tree, out)


def _is_module(x: Any) -> bool:
    bases = [c.__name__ for c in type(x).__mro__ if c.__module__.startswith("flax.nnx")]
    return not {"Module", "Object", "Pytree"}.isdisjoint(bases)
