"""Traces a function as a float32 program, whatever its arrays are stored in.

JAX adds up the gradients of an array in the array's own dtype. In half precision the
gradient of a weight that is read many times, as in a loop, loses most of its terms. So
half-precision arguments are traced as float32 arrays: then JAX promotes, adds and
transposes in float32, and a gradient is rounded once, where it leaves `autocast`.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from types import CellType, FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.tree_util import Partial

from .._jaxpr import Program
from .._policy import holds_half, is_half
from .._tree import is_array, is_module
from .._types import Arrays, PyTree

# Errors that name the argument on which a value depends.
_NOT_CONCRETE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


class Traced(NamedTuple):
    """A function as a program, and how to call it."""

    program: Program
    arrays: list[jax.Array]  # its inputs, as they are stored
    returned: Callable[[Arrays], PyTree]  # what the function returns, of its outputs


def trace(fun: Callable[..., Any], args: PyTree, kwargs: PyTree) -> Traced:
    """Traces a call, with float32 in place of half-precision arrays.

    A function that names half-precision dtypes itself may raise so, whatever it raises:
    it is traced as it is given.
    """
    call = _Call(fun, args, kwargs)
    try:
        return _traced(call)
    except _NOT_CONCRETE as error:
        error.args = (call.with_names(str(error)),)
        raise


def in_float32(program: Program, arrays: Arrays) -> list[jax.Array]:
    """Evaluates a program with float32 in place of half-precision arrays."""

    def widened(x: jax.Array, aval: Any) -> jax.Array:
        return x if x.dtype == aval.dtype else x.astype(aval.dtype)

    return jaxpr_as_fun(program)(*map(widened, arrays, program.in_avals))


def _traced(call: "_Call") -> Traced:
    if not any(map(holds_half, call.arrays)):
        program = jax.make_jaxpr(call)(*call.arrays)
        return Traced(program, call.arrays, call.returned)
    program = None
    with contextlib.suppress(Exception):
        program = jax.make_jaxpr(call)(*map(_in_float32, call.arrays))
    if program is None:
        program = jax.make_jaxpr(call)(*call.arrays)
        return Traced(program, call.arrays, call.returned)
    types: Sequence[Any] = program.out_avals
    with contextlib.suppress(Exception):  # it takes no half-precision arrays
        types = jax.eval_shape(call, *call.arrays)

    def returned(outputs: Arrays) -> PyTree:
        pairs = zip(outputs, types, strict=True)
        return call.returned([_as_stored(x, out.dtype) for x, out in pairs])

    return Traced(program, call.arrays, returned)


def _in_float32(x: jax.Array) -> Any:
    """Returns an array, or the type of a float32 one in place of half precision."""
    aval: Any = jax.typeof(x)
    return aval.update(dtype=np.dtype(np.float32)) if is_half(x.dtype) else x


def _as_stored(x: jax.Array, dtype: np.dtype) -> jax.Array:
    return x.astype(dtype) if is_half(dtype) else x


_ARRAY = object()  # stands for an array


class _Call:
    """A call as a function from arrays to arrays: other leaves are fixed."""

    def __init__(self, fun: Callable[..., Any], args: PyTree, kwargs: PyTree) -> None:
        own, self._with_own = _split(_as_tree(fun), _is_weight)
        given, self._with_given = _split((args, kwargs), is_array)
        self._count = len(own)
        self.arrays = [*map(jnp.asarray, [*own, *given])]
        self.__name__ = self.__qualname__ = getattr(fun, "__name__", "fun")
        self._fun = self.__wrapped__ = fun
        while isinstance(self.__wrapped__, functools.partial):
            self.__wrapped__ = (
                self.__wrapped__.func
            )  # JAX's errors name it, and its file
        self.__signature__ = inspect.signature(self.__call__)
        self._leaves, self._args, self._kwargs = [*own, *given], args, kwargs

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        fun = self._with_own(arrays[: self._count])
        args, kwargs = self._with_given(arrays[self._count :])
        results, self._out_tree = jax.tree.flatten(fun(*args, **kwargs))
        self._out = [_ARRAY if isinstance(x, jax.Array) else x for x in results]
        return [x for x in results if isinstance(x, jax.Array)]

    def with_names(self, text: str) -> str:
        """Returns a text with the names of arguments as `jax.jit` gives them."""
        names: dict[int, list[str]] = {}  # several, if an array is passed twice
        with contextlib.suppress(TypeError, ValueError):  # it has no signature
            signature = inspect.signature(self._fun)
            given = signature.bind(*self._args, **self._kwargs).arguments
            for name, value in given.items():
                for path, leaf in jax.tree_util.tree_leaves_with_path(value):
                    place = name + jax.tree_util.keystr(path)
                    names.setdefault(id(leaf), []).append(place)
        for i, leaf in enumerate(self._leaves):
            left = names.get(id(leaf)) or ["an array of the function"]
            text = text.replace(f"arrays[{i}]", left.pop(0))
        return text

    def returned(self, outputs: Arrays) -> PyTree:
        """Returns the result of the call, with these arrays in it."""
        left = iter(outputs)
        out = [next(left) if x is _ARRAY else x for x in self._out]
        return jax.tree.unflatten(self._out_tree, out)


def _split(
    tree: PyTree, is_taken: Callable[[Any], bool]
) -> tuple[list[Any], Callable[[Arrays], PyTree]]:
    """Returns the leaves that are taken, and a function that puts others there."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_module)

    def rejoined(taken: Arrays) -> PyTree:
        left = iter(taken)
        new = [next(left) if is_taken(leaf) else leaf for leaf in leaves]
        return jax.tree.unflatten(structure, new)

    return [leaf for leaf in leaves if is_taken(leaf)], rejoined


def _is_weight(leaf: Any) -> bool:
    """Whether a leaf of a function is a half-precision array."""
    return isinstance(leaf, jax.Array) and holds_half(leaf)


def _as_tree(fun: Any, around: tuple[Any, ...] = ()) -> PyTree:
    """Returns a function as a pytree of the arrays that it holds, if there are any.

    It may be a partial, a bound method, or a closure, also one of such functions.
    """
    if any(fun is each for each in around):  # it calls itself
        return fun
    opened = functools.partial(_as_tree, around=(*around, fun))
    if isinstance(fun, functools.partial) and not isinstance(fun, Partial):
        return Partial(_run, opened(fun.func), *fun.args, **fun.keywords)
    if inspect.ismethod(fun):
        return Partial(_run, opened(fun.__func__), fun.__self__)
    cells = fun.__closure__ or () if inspect.isfunction(fun) else ()
    held = {i: opened(_contents(cell)) for i, cell in enumerate(cells)}
    held = {i: each for i, each in held.items() if _holds_weights(each)}
    return Partial(_run_with, fun, held) if held else fun


def _contents(cell: CellType) -> Any:
    with contextlib.suppress(ValueError):  # it is empty
        return cell.cell_contents
    return None


def _holds_weights(tree: PyTree) -> bool:
    with contextlib.suppress(Exception):  # JAX cannot sort the keys of any dict
        return any(map(_is_weight, jax.tree.leaves(tree, is_leaf=is_module)))
    return False


def _run(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return fun(*args, **kwargs)


def _run_with(
    fun: FunctionType, held: dict[int, Any], *args: Any, **kwargs: Any
) -> Any:
    """Runs a function with other arrays in its closure."""
    cells = enumerate(fun.__closure__ or ())
    closure = tuple(CellType(held[i]) if i in held else cell for i, cell in cells)
    names = fun.__name__, fun.__defaults__
    changed = FunctionType(fun.__code__, fun.__globals__, *names, closure)
    changed.__kwdefaults__ = fun.__kwdefaults__
    return changed(*args, **kwargs)
