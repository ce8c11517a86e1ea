"""Traces a loss and its backward pass on the types of the arguments."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from .._backward import Loss, is_array, split_arrays
from .matrix_work import Line
from .source import place_of_caller

_REPORTS = itertools.count()


def trace(fun: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Any]:
    """The jaxpr of `fun(*args)`, and the shapes and dtypes of the arrays it returns."""
    arrays, rejoin = split_arrays(args)

    def on_arrays(*arrays: Any) -> Any:
        out = fun(*rejoin(arrays))
        return jax.tree.map(lambda leaf: leaf if is_array(leaf) else None, out)

    return jax.make_jaxpr(on_arrays, return_shape=True)(*arrays)


def positions(loss: Loss) -> range:
    """Those of the first differentiated argument's arrays, in a trace."""
    numbers = jax.tree.leaves(loss.argnums)
    first = numbers[0] if isinstance(numbers[0], int) else 0  # a filter of NNX's
    counts = [sum(map(is_array, jax.tree.leaves(arg))) for arg in loss.args]
    start = sum(counts[:first])
    return range(start, start + counts[first])


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
