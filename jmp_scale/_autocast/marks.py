"""Marks that a program and `autocast` leave: what stays float32, and what is half."""

import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.typing import DTypeLike

from .. import _jaxpr, _jaxpr_rewrite
from .._jaxpr import Program
from .._state import UNSCALED
from .._tree import is_module
from .._validation import callers, require_callable
from .derivatives import with_value
from .higher_order import CALLS

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
_EXEMPT = "keep_float32"  # name of a scope
# What may stand between a `value_and_grad` and the function that it differentiates.
_TRANSFORMS = re.compile(r"(jax|equinox|flax\.nnx|contextlib|jmp_scale\.nnx)\b")


# The half-precision dtype for which `autocast` traces ("" while it does not), and
# whether a function marked by `in_half` is being traced.
_TRACING = jax.make_user_context(("", False))


def keep_float32(fun: F) -> F:
    """Marks `fun` as a part of a program that `autocast` leaves as it is.

    Its products stay float32. It is a mark, not a call: layers that hold state work in
    it, and without `autocast` around it, it is `fun`. Within `in_half`, the
    half-precision arrays among its arguments become float32, and its float32 results
    half precision again: the inner one of the two decides.

    Args:
      fun: a function of arrays and anything else, or a layer; TypeError if neither, as
        of a class of layers.

    Returns:
      A function with the arguments and results of `fun`. Of a layer, it is a pytree
      that holds it: an attribute of the model, trained and saved with it.

    Examples:
      >>> import jax.numpy as jnp, jmp_scale
      >>> exact = jmp_scale.keep_float32(jnp.dot)
      >>> f = jmp_scale.autocast(lambda x: exact(x @ x, x), "float16")
      >>> f"{float(f(jnp.full((2, 2), 2.0**-9))[0, 0]):.1e}"  # 0 in float16
      '3.0e-08'
    """
    return _marked("keep_float32", fun, _run_exempt)


def in_half(fun: F) -> F:
    """Marks `fun` to get half-precision arrays in a program cast by `autocast`.

    For what `autocast` does not enter: fused attention, Pallas kernels, `custom_vjp`
    functions. The float32 arrays among its arguments are cast to `autocast`'s `dtype`,
    its results of that dtype are cast to float32. Its own rule for derivatives runs in
    that dtype too, also with another `backward`. Without `autocast` it is `fun`.

    Args:
      fun: a function of pytrees of arrays and anything else, or a layer, as in
        `keep_float32`.

    Returns:
      A function with the arguments and results of `fun`.

    Examples:
      >>> import jax, jax.numpy as jnp, jmp_scale
      >>> attention = jmp_scale.in_half(jax.nn.dot_product_attention)
      >>> half = jmp_scale.autocast(lambda x: attention(x, x, x), "bfloat16")
      >>> half(jnp.ones((1, 8, 2, 4))).dtype
      dtype('float32')
    """
    return _marked("in_half", fun, _run_halved)


def _run_exempt(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    half, in_half = _TRACING.value
    if not in_half:
        with jax.named_scope(_EXEMPT):
            return fun(*args, **kwargs)
    args, kwargs = _cast((args, kwargs), half, "float32")
    with jax.named_scope(_EXEMPT), _TRACING((half, False)):
        return _cast(fun(*args, **kwargs), "float32", half)


def _run_halved(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    half, _ = _TRACING.value
    if not half:
        return fun(*args, **kwargs)
    args, kwargs = jax.tree.map(functools.partial(_in_range, half), (args, kwargs))
    args, kwargs = _cast((args, kwargs), "float32", half)
    with _TRACING((half, True)):
        return _cast(fun(*args, **kwargs), half, "float32")


def _marked(name: str, fun: F, run: Callable[..., Any]) -> F:
    """Returns a function that runs `fun` by `run`, or a layer that shows its arrays."""
    if inspect.isclass(fun):
        kind = fun.__name__
        raise TypeError(
            f"{name}: expected a function or a layer, got the class {kind}; mark the "
            f"layer that it makes: {name}({kind}(...))(x)"
        )
    require_callable(name, fun, f"write {name}(fun)(x)")
    leaves = jax.tree.leaves(fun)
    has_arrays = any(isinstance(x, float) or hasattr(x, "dtype") for x in leaves)
    if has_arrays or is_module(fun):
        return MarkedLayer(fun, run)  # pyright: ignore[reportReturnType]

    @functools.wraps(fun)
    def marked(*args: Any, **kwargs: Any) -> Any:
        return run(fun, *args, **kwargs)

    return marked  # pyright: ignore[reportReturnType]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False)
class MarkedLayer:
    """A layer with a mark: a pytree in its model, which has the layer's attributes."""

    fun: Callable[..., Any]
    _run: Callable[..., Any] = dataclasses.field(repr=False, metadata={"static": True})

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.fun, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "fun":  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.fun, name)


def tracing(half: DTypeLike) -> AbstractContextManager[Any]:
    """Returns a context in which functions marked by `in_half` get this dtype."""
    return _TRACING((jnp.dtype(half).name, False))


def is_unscaled(jaxpr: Program) -> bool:
    """Whether no loss scale reaches the gradients of what `autocast` runs now.

    Not in our `value_and_grad`, which knows it better. Elsewhere it is proven only if
    JAX's `value_and_grad`, perhaps Equinox's or NNX's around it, differentiates the
    function itself, and no factor reaches its result: the caller's own code in between
    may scale, as may the function.
    """
    if UNSCALED.value is not None:
        return UNSCALED.value
    for frame, module in itertools.islice(callers(), 2, None):
        if not _TRANSFORMS.match(module):
            return False
        if frame.f_code.co_name == "value_and_grad_f":
            return not _may_scale(jaxpr)
    return False


def _may_scale(jaxpr: Program) -> bool:
    """Whether a result may be linear in a number, as a scaled loss is in its scale.

    A mean divides by a number of the program, which is at least 1.
    """
    inner, _ = _jaxpr_rewrite.inlined(
        jaxpr, lambda e: _jaxpr.name_of(e) in _jaxpr.CALLS
    )
    reached = {v for v in _jaxpr.variables(inner.outvars) if _jaxpr.shape(v) == ()}
    for eqn in reversed(inner.eqns):
        name = _jaxpr.name_of(eqn)
        if reached.isdisjoint(eqn.outvars):
            continue
        is_mean = name == "div" and getattr(eqn.invars[1], "val", 0) >= 1
        if is_mean or name in _jaxpr.LINEAR:
            reached.update(_jaxpr.variables(eqn.invars))
        elif name in ("mul", "div") or name in CALLS:
            return True
    return False


def _in_range(half: str, x: Any) -> Any:
    """Returns `x`, with the finite values of a mask that a dtype can hold.

    A row that is masked by infinities has gradients of NaN. Less far below the range
    are values that overflow: they do.
    """
    if getattr(x, "dtype", None) != jnp.float32:
        return x
    least = jnp.finfo(half).min.astype(jnp.float32)
    numpy: Any = np if isinstance(x, np.ndarray) else jnp
    is_mask = numpy.isfinite(x) & (x < min(least, -1e8))
    value = numpy.where(is_mask, least, x)
    return value if numpy is np else with_value(x, value)


def _cast(tree: T, old: str, new: str) -> T:
    def cast(x: Any) -> Any:
        return x.astype(new) if getattr(x, "dtype", None) == jnp.dtype(old) else x

    return jax.tree.map(cast, tree)


class Match(NamedTuple):
    """The names of `keep_float32=` that match a product or a call."""

    is_exempt: bool  # it stays float32
    found: set[str]  # the names that match it
    there: set[str]  # the names by which it could be named


def matched(names: Collection[str], eqn: JaxprEqn) -> Match:
    """Matches names of functions, scopes, modules and "file.py:123" to an equation."""
    scopes = re.findall(r"[\w.:-]+", str(eqn.source_info.name_stack))
    if not names:
        return Match(_EXEMPT in scopes, set(), set())
    dotted, places = f".{'.'.join(scopes)}.", list[str]()
    own, others = {*scopes}, set[str]()  # others: functions of JAX and of jmp_scale
    for frame in _jaxpr.frames_of(eqn):
        parts = [p for p in frame.function.split(".") if p.isidentifier()]
        is_own = not re.search(r"/(jax|jmp_scale)/", frame.file)
        (own if is_own else others).update(parts, [".".join(parts)])
        places.append(f"/{frame.file}:{frame.line}")
    if len(_jaxpr.subjaxprs(eqn)) == 1:  # one function is called
        own.add(_jaxpr.name_of_call(eqn))

    def is_matched(name: str) -> bool:
        is_place = any(place.endswith(f"/{name}") for place in places)
        return name in own or name in others or is_place or f".{name}." in dotted

    found = {*filter(is_matched, names)}
    # A lambda has the name "".
    return Match(bool(found) or _EXEMPT in scopes, found, own - {""})


def checked_names(option: str, names: str | Collection[str]) -> frozenset[str]:
    """Returns the names in an option, each of which must be a string."""
    each = (names,) if isinstance(names, str) else names
    each = (*each,) if isinstance(each, Collection) else (each,)
    for name in each:
        if not isinstance(name, str):
            # Not a layer's own text, which has many lines.
            got = getattr(name, "__name__", "" if callable(name) else name)
            raise TypeError(
                f"autocast: expected {option} to be a name or a tuple of names, "
                f"got a {type(name).__name__} {got!r}; mark a function or layer of "
                "your own by jmp_scale.keep_float32(fun)"
            )
    return frozenset(each)
