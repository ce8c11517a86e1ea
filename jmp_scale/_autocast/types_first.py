"""Traces a function as a float32 program, whatever its arrays are stored in.

JAX adds up the gradients of an array in the array's own dtype. In half precision the
gradient of a weight that is read many times, as in a loop, loses most of its terms. So
half-precision arguments are traced as float32 arrays: then JAX promotes, adds and
transposes in float32, and a gradient is rounded once, where it leaves `autocast`.
"""

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import JaxprEqn, jaxpr_as_fun

from .. import _jaxpr
from .._jaxpr import Program
from .._policy import is_half
from .._tree import is_inexact, split_arrays
from .._types import Arrays, KeyPath, PyTree
from .held import Held, is_half_array

# Errors that name the argument on which a value depends.
_NOT_CONCRETE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


class Traced(NamedTuple):
    """A function as a program, and how to call it."""

    program: Any
    arrays: list[jax.Array]  # its inputs, as they are stored
    returned: Callable[[Arrays], PyTree]  # what the function returns, of its outputs
    paths: list[KeyPath]  # to the arrays in it


def trace(fun: Callable[..., Any], args: PyTree, kwargs: PyTree) -> Traced:
    """Traces a call, with float32 in place of half-precision arrays.

    A function that names half-precision dtypes itself may raise so, whatever it raises:
    it is traced as it is given. It may also read what it holds as numbers, or in a rule
    for derivatives: then it is traced as the object that it is.
    """
    held = Held(fun, is_half_array)
    if held.arrays:
        with contextlib.suppress(Exception):
            traced = _traced(_Call(held, args, kwargs))
            if not _loses_arrays(traced.program):
                return traced
        held = Held(fun, lambda _: False)
    call = _Call(held, args, kwargs)
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
    wide = None
    if any(map(is_half_array, call.arrays)):
        with contextlib.suppress(Exception):
            wide = call.traced(map(_in_float32, call.arrays))
    try:
        given = call.traced(call.arrays)
    except Exception:
        if wide is None:  # otherwise the function takes float32 arrays alone
            raise
        return wide
    if wide is None or not _is_one(wide, given):
        return given
    types = given.program.out_avals

    def returned(outputs: Arrays) -> PyTree:
        pairs = zip(outputs, types, strict=True)
        return given.returned([_as_stored(x, out.dtype) for x, out in pairs])

    return wide._replace(returned=returned)


def _in_float32(x: jax.Array) -> Any:
    """Returns an array, or the type of a float32 one in place of half precision."""
    aval: Any = jax.typeof(x)
    return aval.update(dtype=np.dtype(np.float32)) if is_half_array(x) else x


def _as_stored(x: jax.Array, dtype: np.dtype) -> jax.Array:
    return x.astype(dtype) if is_half(dtype) else x


_ARRAY = object()  # stands for an array


class _Call:
    """A call as a function from arrays to arrays: other leaves are fixed."""

    def __init__(self, held: Held, args: PyTree, kwargs: PyTree) -> None:
        given, self._with_given = split_arrays((args, kwargs))
        self._leaves, self._args, self._kwargs = [*held.arrays, *given], args, kwargs
        self.arrays = [*map(jnp.asarray, self._leaves)]
        self._held, self.__wrapped__ = held, held.fun
        self.__name__ = self.__qualname__ = getattr(held.fun, "__name__", "fun")
        while isinstance(self.__wrapped__, functools.partial):
            # JAX's errors name it, and its file.
            self.__wrapped__ = self.__wrapped__.func
        self.__signature__ = inspect.signature(self.__call__)

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        count = len(self._held.arrays)
        args, kwargs = self._with_given(arrays[count:])
        result = self._held.call(arrays[:count], args, kwargs)
        pairs, structure = jax.tree_util.tree_flatten_with_path(result)
        found = [(path, x) for path, x in pairs if isinstance(x, jax.Array)]
        leaves = [_ARRAY if isinstance(x, jax.Array) else x for _, x in pairs]
        # Without the arrays, which must not outlive the trace.
        self._form = leaves, structure, [path for path, _ in found]
        return [x for _, x in found]

    def traced(self, arrays: Iterable[Any]) -> Traced:
        """Traces the call of these arrays, or of arrays of these types."""
        program = jax.make_jaxpr(self)(*arrays)
        leaves, structure, paths = self._form

        def returned(outputs: Arrays) -> PyTree:
            left = iter(outputs)
            out = [next(left) if x is _ARRAY else x for x in leaves]
            return jax.tree.unflatten(structure, out)

        return Traced(program, self.arrays, returned, paths)

    def with_names(self, text: str) -> str:
        """Returns a text with the names of arguments as `jax.jit` gives them."""
        names: dict[int, list[str]] = {}  # several, if an array is passed twice
        with contextlib.suppress(TypeError, ValueError):  # it has no signature
            signature = inspect.signature(self._held.fun)
            given = signature.bind(*self._args, **self._kwargs).arguments
            for name, value in given.items():
                for path, leaf in jax.tree_util.tree_leaves_with_path(value):
                    place = name + jax.tree_util.keystr(path)
                    names.setdefault(id(leaf), []).append(place)
        for i, leaf in enumerate(self._leaves):
            left = names.get(id(leaf)) or ["an array of the function"]
            text = text.replace(f"arrays[{i}]", left.pop(0))
        return text


def _is_one(wide: Traced, given: Traced) -> bool:
    """Whether two traces are one program, in float32 and in the dtypes as given.

    They are not if it computes with bits of an array, with its size in bytes, or with
    whatever else it chooses by a dtype.
    """
    facts = (map(_facts, _operations(each.program)) for each in (wide, given))
    pairs = itertools.zip_longest(*facts, fillvalue=(None, []))
    return wide.paths == given.paths and all(
        one == other and all(map(_is_one_number, numbers, others))
        for (one, numbers), (other, others) in pairs
    )


def _operations(program: Program) -> Iterator[JaxprEqn]:
    """Yields all equations that are neither casts nor calls."""
    for eqn in _jaxpr.equations(program):
        if _jaxpr.name_of(eqn) not in _jaxpr.CALLS | {"convert_element_type", "copy"}:
            yield eqn


def _facts(eqn: JaxprEqn) -> tuple[Any, list[Any]]:
    """Returns what an equation has in any dtype, and the numbers that it reads."""
    names = [*map(_jaxpr.dtype_name, eqn.outvars)]
    types = ["float32" if is_half(name) else name for name in names]
    numbers = {i: v.val for i, v in enumerate(eqn.invars) if _jaxpr.is_literal(v)}
    params = {
        name: value
        for name, value in eqn.params.items()
        if (leaves := jax.tree.leaves(value))
        and all(isinstance(x, (int, str)) for x in leaves)
    }
    shapes = [*map(_jaxpr.shape, eqn.outvars)]
    facts = _jaxpr.name_of(eqn), types, shapes, params, [*numbers]
    return facts, [*numbers.values()]


def _is_one_number(wide: Any, given: Any) -> bool:
    """Whether a number is another one, rounded, or they are one limit of two dtypes."""
    x, y = _jaxpr.constant(wide), _jaxpr.constant(given)
    if wide is given or x is None or y is None:
        return True
    dtype = jnp.result_type(given)
    if not jnp.issubdtype(dtype, jnp.floating) or x.shape != y.shape:
        return np.array_equal(x, y)
    with np.errstate(over="ignore"):
        pairs = [(x.astype(dtype).astype(y.dtype), y)]
    for half, limit in itertools.product(("bfloat16", "float16"), ("max", "eps")):
        one, other = (float(getattr(jnp.finfo(d), limit)) for d in ("float32", half))
        pairs.append((x / one, y / other))
    return any(np.allclose(*pair, 2.0**-7, 0, equal_nan=True) for pair in pairs)


def _loses_arrays(program: Any) -> bool:
    """Whether a rule for derivatives reads arrays of the trace, which is over.

    JAX runs such rules later. It then takes those arrays for constants.
    """
    names = map(_jaxpr.name_of, _jaxpr.equations(program))
    if not any(name.startswith("custom_") for name in names):
        return False

    def total(*arrays: jax.Array) -> Any:
        outputs = filter(is_inexact, jaxpr_as_fun(program)(*arrays))
        return sum(jnp.sum(jnp.real(x)) for x in outputs)

    types = program.in_avals
    differentiated = jax.grad(total, range(len(types)), allow_int=True)
    try:
        gradient = jax.make_jaxpr(differentiated)(*types)
    except Exception as error:
        return "closed-over" in str(error) or "racer" in type(error).__name__
    known = {*map(id, _jaxpr.open_jaxpr(program)[1])}
    nested = (p for e in _jaxpr.equations(gradient) for p in _jaxpr.subjaxprs(e))
    found = (c for p in (gradient, *nested) for c in _jaxpr.open_jaxpr(p)[1])
    return any(isinstance(c, Tracer) and id(c) not in known for c in found)
