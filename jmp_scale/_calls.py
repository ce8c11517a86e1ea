"""A function as the user calls it: checked, and as one of its arrays alone."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

_ARRAY = object()  # in the place of an array


def require_function(name: str, fun: Any) -> None:
    """Raises a TypeError if `fun` is not a function of what a step differentiates."""
    if is_module(fun):
        raise TypeError(
            f"{name}: expected a function, got a {type(fun).__name__}; wrap the "
            "function that calls the model: lambda model, x: loss(model(x))"
        )
    if not callable(fun):
        raise TypeError(
            f"{name}: expected a function, got {fun!r}; write "
            f'{name}(loss_fn, "float16")(params, batch). It is not a context manager'
        )


class FlatCall:
    """A call as a function of its arrays alone, which returns arrays alone."""

    def __init__(self, fun: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._fun = fun
        self.leaves, self._tree = jax.tree.flatten((args, kwargs), is_leaf=is_module)
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


def is_module(x: Any) -> bool:
    bases = [c.__name__ for c in type(x).__mro__ if c.__module__.startswith("flax.nnx")]
    return not {"Module", "Object", "Pytree"}.isdisjoint(bases)
