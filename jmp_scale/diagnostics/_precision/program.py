"""Traces a loss and its backward pass on the types of the arguments, with checks."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._tree import is_inexact
from .source import begin_user_code, place_of_caller

Line = tuple[str | None, int | None]


class Tracer:
    """Traces a loss, or a transformation of it.

    Attributes:
      loss_dtype: dtype of the loss that was traced last, by name.
      gradients: dtypes of the gradients of the program that was traced last, by name.
    """

    def __init__(self, fun: Callable[..., Any], args: tuple[Any, ...], has_aux: bool):
        """Takes a loss and its arguments; leaves that are not arrays are static."""
        self.loss_dtype = ""
        self.gradients: Any = None
        self._fun, self._has_aux = fun, has_aux
        self._leaves, self._treedef = jax.tree.flatten(args)
        self._places = [i for i, leaf in enumerate(self._leaves) if _is_array(leaf)]

    def __call__(self, transform: Callable[[Callable[..., Any]], Any]) -> Any:
        """The jaxpr of the transformed loss, whose first output is the loss."""
        transformed = transform(self._checked_fun)

        def on_arrays(*arrays: Any) -> list[Any]:
            # Other leaves (a model's functions, strings) stay as they are, as under a
            # filtered jit.
            leaves = list(self._leaves)
            for place, array in zip(self._places, arrays, strict=True):
                leaves[place] = array
            out = transformed(*jax.tree.unflatten(self._treedef, leaves))
            if isinstance(out, tuple) and len(out) == 2:
                self.gradients = jax.tree.map(_dtype, out[1])
            return [leaf for leaf in jax.tree.leaves(out) if _is_array(leaf)]

        return jax.make_jaxpr(on_arrays)(*(self._leaves[i] for i in self._places))

    def _checked_fun(self, *args: Any, **kwargs: Any) -> Any:
        out = begin_user_code(self._fun, *args, **kwargs)
        self.loss_dtype = _checked_loss(out, self._has_aux)
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


def check_arguments(
    fun: Any, args: tuple[Any, ...], argnums: Any, transform: Any
) -> None:
    """Raises what `precision_report` documents for its arguments."""
    for name, value in (("fun", fun), ("transform", transform)):
        if not callable(value):
            raise TypeError(
                f"precision_report: expected {name} to be a function, got "
                f"{_describe(value)}; pass the function itself, not its result"
            )
    numbers = argnums if isinstance(argnums, (tuple, list)) else (argnums,)
    if not numbers:
        raise ValueError(
            "precision_report: expected a position in argnums, got none; "
            "name the arguments to differentiate"
        )
    for number in numbers:
        if isinstance(number, int):
            _check_differentiable(number, args, transform is jax.value_and_grad)


def _check_differentiable(number: int, args: tuple[Any, ...], strict: bool) -> None:
    if not -len(args) <= number < len(args):
        raise ValueError(
            f"precision_report: expected argnums of {len(args)} arguments, got "
            f"{number}; give the arguments of fun after it: "
            "precision_report(fun, params, batch)"
        )
    pairs = jax.tree_util.tree_flatten_with_path(args[number])[0]
    other = [(path, leaf) for path, leaf in pairs if not is_inexact(leaf)]
    if len(other) < len(pairs) and not (strict and other):
        return
    got = "no arrays"
    if other:
        path, leaf = other[0]
        got = f"{_describe(leaf)} at args[{number}]{jax.tree_util.keystr(path)}"
    raise TypeError(
        "precision_report: expected floating-point arrays in the differentiated "
        f"argument {number}, got {got}; choose others with argnums, or a transform "
        "that selects them"
    )


def _checked_loss(out: Any, has_aux: bool) -> str:
    """The dtype of the loss that a function returned."""
    if has_aux:
        if not (isinstance(out, (tuple, list)) and len(out) == 2):
            raise TypeError(
                "precision_report: expected fun to return (loss, aux) with has_aux, "
                f"got {_describe(out)}; return a pair or leave has_aux out"
            )
        out = out[0]
    elif isinstance(out, (tuple, list)):
        raise TypeError(
            "precision_report: expected fun to return a scalar loss, got "
            f"{_describe(out)}; pass has_aux=True if it returns (loss, aux)"
        )
    dtype = _dtype(jnp.asarray(out)) if isinstance(out, float) else _dtype(out)
    if not dtype.startswith(("float", "bfloat")) or np.shape(out) != ():
        raise TypeError(
            "precision_report: expected fun to return a real scalar loss, got "
            f"{_describe(out)}; take its mean or sum"
        )
    return dtype


def _is_array(leaf: Any) -> bool:
    kinds = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
    # NumPy's strings, objects and dates are not arrays for JAX.
    return isinstance(leaf, kinds) and getattr(leaf.dtype, "kind", "") not in "OSUMm"


def _dtype(leaf: Any) -> str:
    return str(leaf.dtype) if _is_array(leaf) else ""


def _describe(out: Any) -> str:
    if _is_array(out):
        return f"{out.dtype}[{','.join(map(str, out.shape))}]"
    if isinstance(out, (tuple, list)):
        return f"a {type(out).__name__} of {len(out)}"
    return type(out).__name__
