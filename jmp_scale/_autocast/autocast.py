"""`autocast`: a float32 function in, a mixed-precision one out.

The function is traced as a float32 program (`types_first`). The jaxpr is read
(`provenance`), planned (`recompute.plan`) and evaluated part by part (`interpreter`).
README.md, beside this file, has the ideas, the words and what was tried and refused.
"""

import functools
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import jax
import numpy as np
from jax.typing import DTypeLike

from .. import _jaxpr
from .._jaxpr import PRODUCTS, Program
from .._policy import checked_half
from .._state import is_checked
from .._tree import is_module
from .._validation import callers, require_bool, require_function, warn
from .casting import Notes
from .interpreter import Interpreter
from .marks import checked_names, is_unscaled, tracing
from .provenance import Origin
from .types_first import in_float32, trace

F = TypeVar("F", bound=Callable[..., Any])
_CLOSURE = (
    "autocast: expected a custom_vjp function to read its arguments alone, got one "
    "that closes over an array of the function that autocast traces, which JAX allows "
    "in no jit, checkpoint or autocast that is differentiated. Pass the array to it as "
    "an argument (a solver of jaxopt: to run), or close over it outside of autocast"
)
_SPARSE = (
    "autocast: expected to be around sparsify, whose rules do not read the derivatives "
    "of products; write autocast(sparsify(f)), or sparsify(autocast(f), "
    "use_tracer=True)"
)


def autocast(
    fun: F,
    dtype: DTypeLike | None = None,
    *,
    backward: DTypeLike | None = None,
    recompute: bool = True,
    keep_float32: Collection[str] = (),
    float32_results: Collection[str] = (),
) -> F:
    """Returns `fun` with its matrix products and convolutions in half precision.

    | | runs in |
    |---|---|
    | matrix products and convolutions, forward and backward | half precision |
    | all other operations: norms, softmax, activations, losses | float32 |
    | parameters, their gradients, results | float32 |
    | products of `precision` HIGH or HIGHEST, of integers, outer products | float32 |
    | products with a weight stored in half precision | its dtype |
    | `custom_vjp` functions, kernels, a `while` under `vmap` | as traced |

    The backward pass reads what the forward pass read, bit for bit, with one exception:
    the derivative of a softmax reads the probabilities that the next product read,
    divided by their sum. Values do not depend on the machine. What `fun` casts itself
    stays as cast.

    Half-precision arrays among the arguments are float32 arrays in `fun`, and so are
    those that `fun` holds as a pytree, a partial, a bound method or a closure. What it
    writes there is kept, once. Results have the dtypes that `fun` returns without
    `autocast`. A function is traced as it stands if float32 arrays raise in it, or make
    it another program: it names half-precision dtypes, or reads bits, sizes, identities
    or, of what it holds, values of arrays. To find that out, it is traced twice: it
    prints twice, reads an iterator twice, and writes twice into what is none of these.

    A matrix product returns the gradient of a weight in float32; a convolution and
    `ragged_dot` return it in half precision, and it is then cast. The gradient of a
    weight that is stored in half precision is a float32 sum over all that read it,
    rounded once. Call the result inside `jax.jit`: outside of it, each call retraces.
    `diagnostics.precision_report` lists its dtypes.

    Args:
      fun: what `jax.jit` could trace; an argument that is not an array is static.
      dtype: float16 or bfloat16, a dtype or one of `get_policy`'s names.
      backward: dtype of the products of the backward pass; default `dtype`. With
        "bfloat16", of float32's range, a float16 forward pass needs no loss scale.
      recompute: whether the backward pass recomputes cheap operations. It changes
        memory, never values or gradients; of second derivatives the roundings, but not
        the quality. False leaves that to the caller's `jax.checkpoint`. A policy of
        `jax.checkpoint`, around or within, saves half-precision arrays with either.
      keep_float32: names of what stays float32: functions in which a product is traced,
        scopes, modules, and places such as "costs.py:560".
      float32_results: names, as in `keep_float32`, of products that have half-precision
        operands and a float32 result: the logits of a language model, say. Their
        gradients are those of any product.

    Returns:
      A function with the arguments, results and result dtypes of `fun`.

    Raises:
      ValueError: `dtype` or `backward` is not float16 or bfloat16.
      TypeError: `fun` is not a function, or a name not a string; at the call, an
        argument is an NNX module.

    Warns:
      UserWarning: once, at the call, if no product became half precision, or a name in
        `keep_float32` or `float32_results` matches nothing; once, if float16 gradients
        have no loss scale: in `jmp_scale.value_and_grad` of a `NoOpLossScale`, and
        where the `value_and_grad` of JAX, Equinox or NNX is given the result itself;
        once for each differentiated loop that adds up the gradient of an array in half
        precision, with its line: of an array that is no argument, or if `fun` names
        half-precision dtypes itself.

    Examples:
      >>> import jax.numpy as jnp, jmp_scale
      >>> half = jmp_scale.autocast(lambda x, w: x @ w, "float16")
      >>> half(jnp.full((2, 2), 1 / 3), jnp.eye(2)).dtype
      dtype('float32')
    """
    require_function("autocast", fun)
    require_bool("autocast", "recompute", recompute)
    forward = checked_half("dtype", dtype)
    back = forward if backward is None else checked_half("backward", backward)
    names = checked_names("keep_float32", keep_float32)
    wide = checked_names("float32_results", float32_results)
    warned: set[str] = set()

    @functools.wraps(fun)
    def in_half_precision(*args: Any, **kwargs: Any) -> Any:
        leaves = jax.tree.leaves((args, kwargs), is_leaf=is_module)
        for module in filter(is_module, leaves):
            raise TypeError(
                f"autocast: expected no NNX modules, got a {type(module).__name__}, "
                "whose writes would be lost: use jmp_scale.nnx.autocast, or close over "
                "a module that is only read"
            )
        for frame, module in callers():
            is_sparse = module == "jax.experimental.sparse.transform"
            if is_sparse and frame.f_code.co_name == "wrapped":
                raise TypeError(_SPARSE)
        # The setting is for what stays float32.
        setting = getattr(jax.config, "jax_default_matmul_precision")  # noqa: B009
        with tracing(forward), jax.default_matmul_precision(None):
            jaxpr, arrays, returned, *_ = trace(fun, args, kwargs)
        if is_checked():
            return returned(in_float32(jaxpr, arrays))
        is_narrow = back == np.float16
        notes = Notes(warned, lacks_scale=is_narrow and is_unscaled(jaxpr))
        cast = Interpreter(
            forward=forward,
            backward=back,
            names=names,
            float32_results=wide,
            notes=notes,
            setting=setting,
            recompute=bool(recompute),
        )
        origins = [Origin.PARAMETER] * len(arrays)
        try:
            results = cast.evaluate(jaxpr, origins, *arrays)
        except jax.errors.UnexpectedTracerError as error:
            called = map(_jaxpr.name_of, _jaxpr.equations(jaxpr))
            has_rule = any(name.startswith("custom_vjp") for name in called)
            if has_rule and "DynamicJaxprTracer" in str(error):
                raise jax.errors.UnexpectedTracerError(_CLOSURE) from error
            raise
        _warn_of_names("keep_float32", names, notes)
        _warn_of_names("float32_results", wide, notes)
        _warn_of_nothing(jaxpr, notes)
        return returned(results)

    return in_half_precision  # pyright: ignore[reportReturnType]


def _warn_of_names(option: str, names: frozenset[str], notes: Notes) -> None:
    """Warns once of names in an option that match nothing."""
    if missing := sorted(names - notes.found - notes.warned):
        notes.warned.update(missing)
        there = ", ".join(sorted(notes.there)) or "none"
        warn(
            f"autocast: {option} names nothing in which a product is: "
            f"{missing}; there are {there} (functions, scopes, Linen modules, and "
            "the classes of NNX modules, not their attributes)"
        )


def _warn_of_nothing(jaxpr: Program, notes: Notes) -> None:
    """Warns once where no product became half precision."""
    products = (e for e in _jaxpr.equations(jaxpr) if _jaxpr.name_of(e) in PRODUCTS)
    atoms = (v for e in products for v in (*e.invars, *e.outvars))
    if not notes.any_half and not _jaxpr.any_half(atoms):
        notes.warn_once(
            "no product",
            "autocast: no product became half precision: there is none, or each is\n"
            "- of constants: pass parameters as arguments\n"
            "- a sum or an outer product: put autocast around jax.vmap, not within it\n"
            "- of a dtype or precision of its own\n"
            "- in keep_float32, or in a call that cannot be read",
        )
