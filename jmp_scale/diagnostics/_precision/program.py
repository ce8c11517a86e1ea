"""Traces a loss and its backward pass on the types of the arguments, with checks."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from .._backward import Loss, is_array, split_arrays
from .matrix_work import Line
from .source import begin_user_code, place_of_caller

_REPORTS = itertools.count()


class Tracer:
    """Traces a loss, or a transformation of it.

    Attributes:
      loss_dtype: dtype of the loss that was traced last, by name.
      parameters: positions of the first differentiated argument's arrays, in a trace.
      gradients: dtypes of the gradients of the program that was traced last, by name.
    """

    def __init__(self, loss: Loss):
        self.loss_dtype = ""
        self.gradients: Any = None
        self._loss = loss
        self._arrays, self._rejoin = split_arrays(loss.args)
        self.parameters = _positions(loss)

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
def noting_lost_constants() -> Iterator[tuple[set[Line], set[Line]]]:
    """Notes the lines at which a number becomes infinite, or 0, in its dtype.

    The trace shows only what is left of it, which may be the user's own infinity. It is
    NumPy that casts, and that can say so; without this it would warn.
    """
    lines: dict[str, set[Line]] = {"overflow": set(), "underflow": set()}

    def note(kind: str, flag: int) -> None:
        lines[kind].add(place_of_caller()[:2])

    # For what JAX finds in its cache of traces NumPy casts nothing. With metadata of
    # their own these traces are new, and no compiled program shares them.
    fresh = set_xla_metadata(precision_report=str(next(_REPORTS)))
    with fresh, np.errstate(over="call", under="call", call=note):
        yield lines["overflow"], lines["underflow"]


def _positions(loss: Loss) -> range:
    numbers = jax.tree.leaves(loss.argnums)
    first = numbers[0] if isinstance(numbers[0], int) else 0  # a filter of NNX's
    counts = [sum(map(is_array, jax.tree.leaves(arg))) for arg in loss.args]
    start = sum(counts[:first])
    return range(start, start + counts[first])


def _dtype(leaf: Any) -> str:
    return str(leaf.dtype) if is_array(leaf) else ""
