"""Traces a function as a float32 program, whatever its arrays are stored in.

JAX adds up the gradients of an array in the array's own dtype. In half precision that
of a weight which is read many times, as in a loop, loses most of its terms.
"""

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import JaxprEqn, jaxpr_as_fun

from .. import _jaxpr
from .._jaxpr import Program, Var
from .._policy import is_half
from .._tree import is_inexact, split_arrays
from .._types import Arrays, Function, KeyPath, PyTree
from .dot_general import is_algorithm
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
    held: int  # how many of its inputs the function holds, which are the first ones


def trace(fun: Function, args: PyTree, kwargs: PyTree) -> Traced:
    """Traces a call, with float32 in place of half-precision arrays.

    It is traced as it is given if a trace with float32 arrays is another program or
    raises, whatever it raises. Of what the function holds a copy has float32 arrays,
    unless it reads these as numbers, or in a rule for derivatives.
    """
    held = Held(fun)
    call = _Call(fun, args, kwargs)
    copies = [_Call(fun, args, kwargs, held)] if held.arrays else []
    wide = None
    for each in (*copies, call):
        if wide is None and any(map(is_half_array, each.arrays)):
            with contextlib.suppress(Exception):
                found = each.traced(map(_in_float32, each.arrays))
                is_lost = each in copies and _loses_arrays(found.program)
                wide = None if is_lost else found
            held.restore()
    try:
        given = call.traced(call.arrays)
    except Exception as error:
        if wide is not None:  # the function takes float32 arrays alone
            return wide
        if isinstance(error, _NOT_CONCRETE):
            error.args = (call.with_names(str(error)),)
        raise
    if wide is None or not _is_one(wide, given):
        return given
    types = given.program.out_avals

    def returned(outputs: Arrays) -> PyTree:
        pairs = zip(outputs, types, strict=True)
        stored = [x.astype(t.dtype) if is_half(t.dtype) else x for x, t in pairs]
        return given.returned(stored)

    return wide._replace(returned=returned)


def in_float32(program: Any, arrays: Arrays) -> list[jax.Array]:
    """Evaluates a program with float32 in place of half-precision arrays."""
    pairs = zip(arrays, program.in_avals, strict=True)
    return jaxpr_as_fun(program)(
        *(x if x.dtype == aval.dtype else x.astype(aval.dtype) for x, aval in pairs)
    )


def _in_float32(x: jax.Array) -> Any:
    """Returns an array, or the type of a float32 one in place of half precision."""
    aval: Any = jax.typeof(x)
    return aval.update(dtype=np.dtype(np.float32)) if is_half_array(x) else x


_ARRAY = object()  # stands for an array


class _Call:
    """A call as a function from arrays to arrays: other leaves are fixed."""

    def __init__(
        self, fun: Function, args: PyTree, kwargs: PyTree, held: Held | None = None
    ) -> None:
        given, self._with_given = split_arrays((args, kwargs))
        own = held.arrays if held else []
        self._given, self._args, self._kwargs = given, args, kwargs
        self.arrays = [*own, *map(jnp.asarray, given)]
        self._held, self._count, self._fun = held, len(own), fun
        self.__wrapped__ = fun
        self.__name__ = self.__qualname__ = getattr(fun, "__name__", "fun")
        while isinstance(self.__wrapped__, functools.partial):
            # JAX's errors name it, and its file.
            self.__wrapped__ = self.__wrapped__.func
        self.__signature__ = inspect.signature(self.__call__)

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        own, given = arrays[: self._count], arrays[self._count :]
        args, kwargs = self._with_given(given)
        fun = self._held.copied(own) if self._held else self._fun
        result = fun(*args, **kwargs)
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

        return Traced(program, self.arrays, returned, paths, self._count)

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
        for i, leaf in enumerate(self._given):
            left = names.get(id(leaf)) or ["an array of the function"]
            text = text.replace(f"arrays[{i}]", left.pop(0))
        return text


class _Number(NamedTuple):
    """A literal or a constant that an operation reads."""

    value: Any


# An equation, or None for the end of a program, and what it reads: results of others,
# by their places in the list of operations, and numbers.
_Operation = tuple[JaxprEqn | None, list[Any]]


def _is_one(wide: Traced, given: Traced) -> bool:
    """Whether two traces are one program, in float32 and in the dtypes as given.

    Proven is that the same operations read the same operands, sizes and numbers, also
    in rules for derivatives. That fails for a function that computes with bits of an
    array, with its size in bytes, or with anything else that it chooses by a dtype.
    """
    held: dict[int, Any] = {}  # JAX copies a known number, so that its value names it
    for i, x in enumerate(wide.arrays[: wide.held]):
        is_number = x.ndim == 0 and not isinstance(x, Tracer)
        held[id(x)] = _Number(x) if is_number else i
    arguments = range(wide.held, len(wide.arrays))
    one = _operations(wide.program, [*held.values(), *arguments], held)
    other = _operations(given.program, arguments, held)
    is_one = wide.paths == given.paths and len(one) == len(other)
    return is_one and all(map(_are_one, one, other))


def _operations(
    program: Program, inputs: Iterable[Any], held: Mapping[int, Any]
) -> list[_Operation]:
    """Lists what is neither a call nor a cast, followed by what is nested in it.

    So is the rule for derivatives of a function that has its own, but not those of
    functions in a rule, which may call its function again. Inputs have these names, and
    so have, by `id`, constants that the function holds.
    """
    found: list[_Operation] = []

    def add(jaxpr: Program, inputs: Iterable[Any], in_rule: bool = False) -> list[Any]:
        inner, constants = _jaxpr.open_jaxpr(jaxpr)
        known = dict(zip(inner.invars, inputs, strict=False))
        names = [held.get(id(x), _Number(x)) for x in constants]
        known.update(zip(inner.constvars, names, strict=True))

        def named(atoms: Iterable[_jaxpr.Atom]) -> list[Any]:
            return [known[v] if isinstance(v, Var) else _Number(v.val) for v in atoms]

        for eqn in inner.eqns:
            read = results = named(eqn.invars)
            if _jaxpr.name_of(eqn) in _jaxpr.CALLS:
                results = add(_jaxpr.subjaxprs(eqn)[0], read, in_rule)
            elif not _is_cast(eqn):
                results = [(len(found), i) for i, _ in enumerate(eqn.outvars)]
                found.append((eqn, read))
                for nested in _jaxpr.subjaxprs(eqn):
                    found.append((None, add(nested, itertools.count(), in_rule)))
                for rule in [] if in_rule else _rules(eqn):
                    found.append((None, add(rule, itertools.count(), True)))
            known.update(zip(eqn.outvars, results, strict=True))
        return named(inner.outvars)

    found.append((None, add(program, inputs)))
    return found


def _rules(eqn: JaxprEqn) -> list[Program]:
    """Returns the derivative of a function with a rule of its own, if it has one."""
    if _has_rule(eqn):
        if rule := _jaxpr.jvp_rule(eqn):
            return [rule.jaxpr]
        with contextlib.suppress(Exception):  # as if it had none
            call = functools.partial(_jaxpr.evaluate, eqn)
            return [_gradient(lambda *xs: call(xs), [v.aval for v in eqn.invars])]
    return []


def _has_rule(eqn: JaxprEqn) -> bool:
    return _jaxpr.name_of(eqn).startswith("custom_")


def _gradient(fun: Function, types: Sequence[Any]) -> Program:
    """Traces the gradient of the sum of all floating-point results."""

    def total(*arrays: jax.Array) -> Any:
        return sum(jnp.sum(jnp.real(x)) for x in filter(is_inexact, fun(*arrays)))

    differentiated = jax.grad(total, range(len(types)), allow_int=True)
    return jax.make_jaxpr(differentiated)(*types)


def _is_cast(eqn: JaxprEqn) -> bool:
    """Whether an equation returns its operand, in float32 or half precision."""
    names = [*map(_jaxpr.dtype_name, (*eqn.invars, *eqn.outvars))]
    is_named = _jaxpr.name_of(eqn) in ("convert_element_type", "copy")
    return is_named and all(name == "float32" or is_half(name) for name in names)


def _are_one(wide: _Operation, given: _Operation) -> bool:
    """Whether operations differ in nothing except the dtypes of what they compute."""
    (one, read), (other, others) = wide, given
    if len(read) != len(others) or not all(map(_is_same, read, others)):
        return False
    if one is None or other is None:
        return one is other
    params, others = _jaxpr.params_of(one), _jaxpr.params_of(other)
    return (
        _jaxpr.name_of(one) == _jaxpr.name_of(other)
        and _types(one) == _types(other)
        and params.keys() == others.keys()
        and all(_is_same_parameter(one, k, x, others[k]) for k, x in params.items())
    )


def _types(eqn: JaxprEqn) -> list[Any]:
    """Returns shapes and dtypes of results, except that half precision is float32."""
    names = [*map(_jaxpr.dtype_name, eqn.outvars)]
    if _jaxpr.name_of(eqn) != "nextafter":  # which reads bits
        names = ["float32" if is_half(name) else name for name in names]
    return [*names, *map(_jaxpr.shape, eqn.outvars)]


def _is_same_parameter(eqn: JaxprEqn, name: str, x: Any, y: Any) -> bool:
    """Whether a parameter is one, or such that an equation is the same with another.

    These are dtypes, programs and rules, which are compared as types and operations;
    the algorithm for half precision that a product names; a checkpoint's policy; and
    any parameter of what has no result.
    """
    if x is y or not eqn.outvars or name == "policy":
        return True
    with contextlib.suppress(ValueError):  # of arrays
        if x == y:
            return True
    leaves = jax.tree.leaves((x, y))
    if all(isinstance(v, (np.dtype, *_jaxpr.NESTING)) for v in leaves):
        return True
    is_rule = _has_rule(eqn) and not any(isinstance(v, (int, str)) for v in leaves)
    return is_rule or (name == "precision" and is_algorithm(y))


def _is_same(wide: Any, given: Any) -> bool:
    """Whether operands are one, or one number, rounded or a limit of two dtypes."""
    if not (isinstance(wide, _Number) and isinstance(given, _Number)):
        return wide == given
    (one,), (other,) = wide, given
    if one is other:
        return True
    x, y = (_jaxpr.constant(each, math.inf) for each in (one, other))
    if x is None or y is None:
        return False
    dtype = jnp.result_type(other)
    if x.shape != y.shape or not jnp.issubdtype(dtype, jnp.floating):
        return np.array_equal(x, y)
    with np.errstate(over="ignore", invalid="ignore"):
        is_rounded = x.astype(dtype).astype(y.dtype) == y
    are_limits = is_half(dtype.name) & _are_limits(x, y, dtype)
    # A literal has digits that its dtype has not.
    return bool((is_rounded | are_limits | (x == y) | (x != x) & (y != y)).all())


def _are_limits(x: np.ndarray, y: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Whether numbers are limits of float32 and of a half dtype: eps, a share of max.

    Nothing but a limit is as large as a sixteenth of float32's.
    """
    wide, half = jnp.finfo("float32"), jnp.finfo(dtype)
    of_wide, of_half = x / float(wide.max), y / float(half.max)
    is_max = (abs(of_wide) > 1 / 16) & np.isclose(of_wide, of_half, 2.0**-7, 0)
    return is_max | ((x == float(wide.eps)) & (y == float(half.eps)))


def _loses_arrays(program: Any) -> bool:
    """Whether a rule for derivatives reads arrays of the trace, which is over.

    JAX runs such rules later, and then takes those arrays for constants. The proof is
    the gradient: it has arrays of the trace among its constants, or it raises.
    """
    if not any(map(_has_rule, _jaxpr.equations(program))):
        return False
    try:
        gradient = _gradient(jaxpr_as_fun(program), program.in_avals)
    except Exception as error:
        return "closed-over" in str(error) or "racer" in type(error).__name__
    known = {*map(id, _jaxpr.open_jaxpr(program)[1])}
    nested = (p for e in _jaxpr.equations(gradient) for p in _jaxpr.subjaxprs(e))
    found = (c for p in (gradient, *nested) for c in _jaxpr.open_jaxpr(p)[1])
    return any(isinstance(c, Tracer) and id(c) not in known for c in found)
