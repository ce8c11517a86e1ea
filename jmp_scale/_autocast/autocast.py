"""`autocast`: a float32 function in, a mixed-precision one out.

The function is traced, and its jaxpr evaluated by one of two floors: the *cast*
(`interpreter`), which evaluates equation by equation, or on top of it what is in the
folder `recompute`. Nothing but this module imports from both.

Words, here and below:

- product: a matrix product or convolution. Its operands are its first two inputs.
- fate: why a product becomes half precision or not (`products`).
- provenance: where a value comes from. Given are the arguments and constants, data is
  whatever is not computed from these alone (`provenance`).
- residual: a value that is saved by the forward pass for the backward pass.
- copy: the half-precision cast of an operand, made once.
- stored: an array in half precision that is float32 in the program, so that its
  gradient is summed in float32 (`stored`).
- live: inputs with tangents that are not zero.
"""

import functools
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import jax
from jax.typing import DTypeLike

from .. import _jaxpr
from .._jaxpr import PRODUCTS, Program
from .._policy import checked_half
from .._tree import FlatCall, is_module
from .._validation import require_bool, require_function, warn
from .higher_order import as_dtypes
from .interpreter import Interpreter, Notes
from .linear import Traces
from .marks import checked_names, is_unscaled, tracing
from .provenance import Origin
from .recompute.units import RecomputingInterpreter
from .stored import is_in_half

F = TypeVar("F", bound=Callable[..., Any])
_CLOSURE = (
    "autocast: expected a custom_vjp function to read its arguments alone, got one "
    "that closes over an array of the function that autocast traces, which JAX allows "
    "in no jit, checkpoint or autocast that is differentiated. Pass the array to it as "
    "an argument (a solver of jaxopt: to run), or close over it outside of autocast"
)


def autocast(
    fun: F,
    dtype: DTypeLike | None = None,
    *,
    backward: DTypeLike | None = None,
    recompute: bool = True,
    keep_float32: Collection[str] = (),
    share_casts: bool = False,
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
    divided by their sum. Values do not depend on the machine. What the user cast stays
    as cast; what is computed from weights that are stored in half precision, and from
    nothing else, is float32.

    Weights' gradients are float32 from the product on; those of convolutions and
    `ragged_dot` are half precision at first. The gradient of a weight that is stored in
    half precision is a float32 sum over all that read it, rounded once. Call the result
    inside `jax.jit`: outside of it, each call retraces.
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
      share_casts: whether what a product reads is cast once, and all later operations
        read the cast array, as in a cast by hand. For a ResNet's stream.
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
        once for each loop that is differentiated, with its line, if it still sums a
        stored weight's gradient in half precision, as in a `custom_vjp`.

    Examples:
      >>> import jax.numpy as jnp, jmp_scale
      >>> half = jmp_scale.autocast(lambda x, w: x @ w, "float16")
      >>> half(jnp.full((2, 2), 1 / 3), jnp.eye(2)).dtype
      dtype('float32')
    """
    require_function("autocast", fun)
    for name, value in (("recompute", recompute), ("share_casts", share_casts)):
        require_bool("autocast", name, value)
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
        flat = FlatCall(fun, args, kwargs)
        # The setting is for what stays float32.
        setting = getattr(jax.config, "jax_default_matmul_precision")  # noqa: B009
        with tracing(forward), jax.default_matmul_precision(None):
            jaxpr = jax.make_jaxpr(flat)(*flat.arrays)
        notes = Notes(warned, is_unscaled=is_unscaled(jaxpr))
        evaluator = RecomputingInterpreter if recompute else Interpreter
        cast = evaluator(
            forward=forward,
            backward=back,
            names=names,
            float32_results=wide,
            traces=Traces(),
            notes=notes,
            share_casts=bool(share_casts),
            setting=setting,
        )
        origins = [Origin.PARAMETER] * len(flat.arrays)
        try:
            results = cast.evaluate(jaxpr, origins, *flat.arrays)
        except jax.errors.UnexpectedTracerError as error:
            raise jax.errors.UnexpectedTracerError(_CLOSURE) from error
        _warn_of_names("keep_float32", names, notes)
        _warn_of_names("float32_results", wide, notes)
        _warn_of_nothing(jaxpr, notes)
        dtypes = (_jaxpr.dtype_name(v) for v in _jaxpr.bare(jaxpr).outvars)
        return flat.result(as_dtypes(dtypes, results))

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
    products = (e for e in _jaxpr.equations(jaxpr) if e.primitive.name in PRODUCTS)
    atoms = (v for e in products for v in (*e.invars, *e.outvars))
    if not notes.any_half and not any(map(is_in_half, atoms)):
        notes.warn_once(
            "no product",
            "autocast: no product became half precision: there is none, or all are of "
            "constants (pass parameters as arguments), sums or outer products (put "
            "autocast around jax.vmap, not within it), of their own dtype or "
            "precision, or in keep_float32 or a call that cannot be read",
        )
