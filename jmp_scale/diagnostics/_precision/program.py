"""Traces a loss and its backward pass on the types of the arguments, with checks."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from .._backward import Loss, is_array, split_arrays
from .source import begin_user_code, place_of_caller

Line = tuple[str | None, int | None]


class Tracer:
    """Traces a loss, or a transformation of it.

    Attributes:
      loss_dtype: dtype of the loss that was traced last, by name.
      gradients: dtypes of the gradients of the program that was traced last, by name.
    """

    def __init__(self, loss: Loss):
        """Takes a loss and its arguments; leaves that are not arrays are static."""
        self.loss_dtype = ""
        self.gradients: Any = None
        self._loss = loss
        self._arrays, self._rejoin = split_arrays(loss.args)

    def __call__(self, transform: Callable[[Callable[..., Any]], Any]) -> Any:
        """The jaxpr of the transformed loss, whose first output is the loss."""
        transformed = transform(self._checked_fun)

        def on_arrays(*arrays: Any) -> list[Any]:
            out = transformed(*self._rejoin(arrays))
            if isinstance(out, tuple) and len(out) == 2:
                self.gradients = jax.tree.map(_dtype, out[1])
            return [leaf for leaf in jax.tree.leaves(out) if is_array(leaf)]

        return jax.make_jaxpr(on_arrays)(*self._arrays)

    def _checked_fun(self, *args: Any, **kwargs: Any) -> Any:
        out = begin_user_code(self._loss.fun, *args, **kwargs)
        self.loss_dtype = self._loss.dtype_of(out)
        return out


@contextlib.contextmanager
def noting_overflowing_casts(lines: set[Line]) -> Iterator[None]:
    """Notes the lines at which JAX casts a number that its dtype cannot hold.

    The trace shows such a number only as an infinity, which may be the user's own. It
    is NumPy that casts, and that can say so; without this it would warn.
    """

    def note(kind: str, flag: int) -> None:
        lines.add(place_of_caller()[:2])

    with np.errstate(over="call", call=note):
        yield


def _dtype(leaf: Any) -> str:
    return str(leaf.dtype) if is_array(leaf) else ""
