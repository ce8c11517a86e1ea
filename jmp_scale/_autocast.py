"""A float32 function in, a mixed-precision one out."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import DTypeLike

from . import _jaxpr
from ._autocast_plan import KEPT, Plan, Step, is_float32, make_plan, variables
from ._dot_general import bilinear, wide_dot_general

F = TypeVar("F", bound=Callable[..., Any])

_ARRAY = object()  # in the place of an array


def autocast(
    fun: F,
    dtype: DTypeLike,
    *,
    backward: DTypeLike | None = None,
    recompute: bool = True,
    keep_float32: Collection[str] = (),
) -> F:
    """`fun` with its matrix products and convolutions in half precision.

    ```
    forward:   product(x, w) = half(x) half(w), in float32 again
    backward:  of x in half precision; of w half(x) half(c), with a float32 result
    the rest:  as traced; what is cheap, between two products, is computed once more in
               the backward pass, from half-precision copies of what it reads
    ```

    So norms, softmax, activations, losses, parameters and their gradients are float32.
    Weights' gradients of convolutions and `ragged_dot` are half precision at first, and
    on a TPU so is what a product and later operations read. Casts of the user stay.
    Products with `precision` HIGH or HIGHEST stay float32, and so do sums (one operand
    is a vector), and products in a `custom_vjp` function or a kernel.
    `diagnostics.precision_report` of the result lists what runs in which dtype.

    Args:
      fun: a function of arrays and anything else; what is not an array is static.
      dtype: float16 or bfloat16, a name or a dtype.
      backward: dtype of the products of the backward pass; default `dtype`. With
        "bfloat16" a float16 forward pass needs no loss scale, because bfloat16 has the
        range of float32.
      recompute: whether the backward pass computes cheap operations again, so that
        only half-precision and small arrays are kept. False leaves the memory to the
        caller's `jax.checkpoint`.
      keep_float32: names of jitted functions, of others' code, that stay as they are.

    Returns:
      A function with the arguments, results and result dtypes of `fun`.

    Raises:
      ValueError: `dtype` or `backward` is not float16 or bfloat16.
      TypeError: an argument is an NNX module, at the call.

    Examples:
      >>> import jax.numpy as jnp, jmp_scale
      >>> half = jmp_scale.autocast(lambda x, w: x @ w, "float16")
      >>> half(jnp.full((2, 2), 1 / 3), jnp.eye(2)).dtype
      dtype('float32')
    """
    forward = _checked_dtype("dtype", dtype)
    back = forward if backward is None else _checked_dtype("backward", backward)
    names = (keep_float32,) if isinstance(keep_float32, str) else tuple(keep_float32)
    cast = _Cast(forward, back, bool(recompute), frozenset(names))

    @functools.wraps(fun)
    def in_half_precision(*args: Any, **kwargs: Any) -> Any:
        flat = _Flat(fun, args, kwargs)
        for module in filter(_is_module, flat.leaves):
            raise TypeError(
                f"autocast: expected no NNX modules, got a {type(module).__name__}, "
                "whose writes would be lost: use jmp_scale.nnx.autocast"
            )
        jaxpr = jax.make_jaxpr(flat)(*flat.arrays)
        return flat.result(cast.run(jaxpr, [True] * len(flat.arrays), flat.arrays))

    return in_half_precision  # pyright: ignore[reportReturnType]


def keep_float32(fun: F) -> F:
    """`fun`, as a part of a program that `autocast` leaves as it is.

    Its products stay float32, and nothing of it is computed again in the backward pass.
    Without `autocast` around it, it is `fun`.

    Args:
      fun: a function of arrays and anything else.

    Returns:
      A function with the arguments and results of `fun`.

    Examples:
      >>> import jax.numpy as jnp, jmp_scale
      >>> exact = jmp_scale.keep_float32(jnp.dot)
      >>> f = jmp_scale.autocast(lambda x: exact(x, x), "float16")
      >>> f"{float(f(jnp.full((2, 2), 1e-4))[0, 0]):.1e}"
      '2.0e-08'
    """

    @functools.wraps(fun)
    def kept(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(lax.full((), 0.0), Tracer):
            return fun(*args, **kwargs)  # no trace that autocast could read
        flat = _Flat(fun, args, kwargs)
        flat.__name__ = KEPT + flat.__name__
        return flat.result(jax.jit(flat)(*flat.arrays))

    return kept  # pyright: ignore[reportReturnType]


class _Flat:
    """A call as a function of its arrays alone, which returns arrays alone."""

    def __init__(self, fun: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._fun = fun
        self.leaves, self._tree = jax.tree.flatten((args, kwargs), is_leaf=_is_module)
        where = [i for i, x in enumerate(self.leaves) if isinstance(x, jax.Array)]
        self._where, self.arrays = where, [self.leaves[i] for i in where]
        self.__name__ = self.__qualname__ = getattr(fun, "__name__", "fun")

    def __call__(self, *arrays: Any) -> list[Any]:
        leaves = list(self.leaves)
        for i, array in zip(self._where, arrays, strict=True):
            leaves[i] = array
        args, kwargs = jax.tree.unflatten(self._tree, leaves)
        results, self._out_tree = jax.tree.flatten(self._fun(*args, **kwargs))
        self._out = [_ARRAY if isinstance(x, jax.Array) else x for x in results]
        return [x for x in results if isinstance(x, jax.Array)]

    def result(self, arrays: Sequence[Any]) -> Any:
        """What the function returned, with these arrays in it."""
        left = iter(arrays)
        out = [next(left) if x is _ARRAY else x for x in self._out]
        return jax.tree.unflatten(self._out_tree, out)


@dataclasses.dataclass(frozen=True)
class _Cast:
    """How plans are run."""

    forward: Any  # dtype of the products of the forward pass
    backward: Any
    recompute: bool
    keep: Collection[str]
    unread: set[str] = dataclasses.field(default_factory=set)
    in_loop: bool = False

    def run(self, jaxpr: Any, held: Sequence[bool], values: Sequence[Any]) -> Any:
        """The results of a program, for these values of its inputs."""
        plan = make_plan(jaxpr, held, self.keep)
        env = dict(zip(plan.jaxpr.invars, values, strict=True)) | plan.constants
        copies: dict[Any, Any] = {}
        products = [s.jaxpr for s in plan.steps if s.kind == "product"]
        operands = {v for p in products for v in p.invars[:2]}
        # Half precision already, or to be as a cast by hand makes it: not clipped.
        exact = operands.union(*(p.outvars for p in products))
        read = {v for s in plan.steps if s.kind == "island" for v in s.jaxpr.invars}
        shared = operands & read - {*plan.kept} - {*variables(plan.jaxpr.outvars)}

        def copy(v: Any) -> Any:
            """What the backward pass keeps of a variable."""
            if not is_float32(v) or (v in plan.kept and self.recompute):
                return env[v]
            if v not in copies:
                largest = np.float32(jnp.finfo(self.forward).max)
                x = env[v] if v in exact else lax.clamp(-largest, env[v], largest)
                copies[v] = x.astype(self.forward)
            return copies[v]

        for step in plan.steps:
            names = step.jaxpr.invars
            inputs = [env[v] for v in names]
            if step.kind == "product":
                results = [self._product(step, inputs, [*map(copy, names[:2])])]
            elif step.kind == "island" and self.recompute:
                results = self._island(step.jaxpr, inputs, [*map(copy, names)])
            elif step.kind == "call":
                results = self._call(step.jaxpr, inputs, plan)
            else:
                results = _jaxpr.evaluate_all(step.jaxpr, inputs)
            for v, x in zip(step.jaxpr.outvars, results, strict=True):
                env[v] = self._half_on_tpu(x) if v in shared else x
        return [v.val if _jaxpr.is_literal(v) else env[v] for v in plan.jaxpr.outvars]

    def _half_on_tpu(self, x: jax.Array) -> jax.Array:
        """`x`, on a TPU rounded, and so its cotangent: one array serves all readers."""

        def rounded(x: jax.Array) -> jax.Array:
            both = [x.astype(d).astype(x.dtype) for d in (self.backward, self.forward)]
            return _with_value(*both)

        return lax.platform_dependent(x, tpu=rounded, default=lambda x: x)

    def _product(self, step: Step, inputs: list[Any], copies: list[Any]) -> jax.Array:
        eqn = step.jaxpr.eqns[-1]

        def multiply(dtype: Any, wide: int | None, *pair: jax.Array) -> jax.Array:
            """In half precision; only the operand `wide` stays float32."""
            halves = [x if i == wide else x.astype(dtype) for i, x in enumerate(pair)]
            lhs, rhs = (
                _jaxpr.evaluate_all(side, [x])[0]
                for side, x in zip(step.sides, halves, strict=True)
            )
            if wide is None:
                params = {"precision": None, "preferred_element_type": dtype}
                values = [lhs, rhs, *inputs[2:]]
                (result,) = _jaxpr.evaluate(eqn, values, **params)
            else:
                dimensions = eqn.params["dimension_numbers"]
                params = dimensions, dtype, None, eqn.params.get("out_sharding")
                result = wide_dot_general(lhs, rhs, *params)
            return result.astype(jnp.float32)

        def term(side: int, *pair: jax.Array) -> jax.Array:
            return multiply(self.backward, side if step.weights[side] else None, *pair)

        product = functools.partial(multiply, self.forward, None)
        return bilinear(product, term, inputs[:2], copies)

    def _island(self, jaxpr: Any, inputs: list[Any], copies: list[Any]) -> list[Any]:
        """Runs cheap equations; the backward pass runs them again on the copies."""
        # Sums, as of BatchNorm, are kept from the forward pass; those of rows, as of
        # softmax, in a loop on a TPU only: a GPU's kernels for softmax break at them.
        sums = {e.outvars[0]: e.params["axes"] for e in jaxpr.eqns if _is_small_sum(e)}
        known: dict[Any, Any] = {}

        def as_known(v: Any, x: Any) -> Any:
            is_row = sums.get(v) == (x.ndim,)
            if v not in sums or (is_row and not self.in_loop):
                return x
            value = known.setdefault(v, x)
            return _with_value(x, _on_tpu(value, x) if is_row else value)

        run = functools.partial(_jaxpr.evaluate_all, jaxpr, change=as_known)

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def again() -> list[Any]:
            kept = copies if self.in_loop else _kept_apart(copies)
            pairs = zip(inputs, kept, strict=True)
            return run([_with_value(x, c.astype(x.dtype)) for x, c in pairs])

        results = run(list(map(_without_derivative, inputs)))
        return [_with_value(x, v) for x, v in zip(again(), results, strict=True)]

    def _body(self, jaxpr: Any, held: Sequence[bool], *, loop: bool = False) -> Any:
        """A nested jaxpr as a function of its inputs."""
        cast = dataclasses.replace(self, in_loop=True) if loop else self
        return lambda *values: cast.run(jaxpr, held, values)

    def _call(self, jaxpr: Any, inputs: Sequence[Any], plan: Plan) -> Any:
        """Runs one equation whose nested jaxprs hold products."""
        (eqn,) = jaxpr.eqns
        env = dict(zip(jaxpr.invars, inputs, strict=True))
        values = [v.val if _jaxpr.is_literal(v) else env[v] for v in eqn.invars]
        held = [_jaxpr.is_literal(v) or v in plan.kept for v in eqn.invars]
        run = getattr(self, "_" + eqn.primitive.name, None)
        results = run and run(eqn, values, held)
        return results or self._as_traced(eqn, values)

    def _as_traced(self, eqn: Any, values: list[Any]) -> list[Any]:
        body, _ = _jaxpr.open_jaxpr(_jaxpr.subjaxprs(eqn)[0])
        name = eqn.params.get("name") or getattr(body.debug_info, "func_name", "")
        if name not in self.unread:
            self.unread.add(name)
            warnings.warn(
                f"autocast: {name} ({eqn.primitive.name}) holds matrix products and "
                "cannot be read, so they stay in float32; cast inside it, or mark it "
                "with keep_float32",
                stacklevel=2,
            )
        return _jaxpr.evaluate(eqn, values)

    def _scan(self, eqn: Any, values: list[Any], held: list[bool]) -> Any:
        loop = _jaxpr.loop_of(eqn)
        if loop is None:
            return None
        first, last = loop.consts, loop.consts + loop.carry
        held[first:last] = [False] * loop.carry
        body = self._body(loop.body, held, loop=True)

        def step(carry: Any, xs: Any) -> Any:
            results = body(*values[:first], *carry, *xs)
            return results[: loop.carry], results[loop.carry :]

        options = {k: eqn.params[k] for k in ("reverse", "unroll") if k in eqn.params}
        inputs = values[first:last], values[last:], loop.trips
        carry, ys = lax.scan(step, *inputs, **options)
        return [*carry, *ys]

    def _while(self, eqn: Any, values: list[Any], held: list[bool]) -> Any:
        loop, condition = _jaxpr.loop_of(eqn), eqn.params.get("cond_jaxpr")
        if loop is None or condition is None:
            return None
        count, first = loop.offset, loop.offset + loop.consts
        body = self._body(loop.body, [False] * (len(held) - count), loop=True)
        test = self._body(condition, [False] * (count + loop.carry), loop=True)
        return lax.while_loop(
            lambda carry: test(*values[:count], *carry)[0],
            lambda carry: body(*values[count:first], *carry),
            values[first:],
        )

    def _cond(self, eqn: Any, values: list[Any], held: list[bool]) -> Any:
        if eqn.params.get("branches_platforms"):
            return None  # public functions cannot put these branches back
        branches = [self._body(b, held[1:]) for b in eqn.params["branches"]]
        return lax.switch(values[0], branches, *values[1:])

    def _checkpoint(self, eqn: Any, values: list[Any], held: list[bool]) -> Any:
        body = self._body(_jaxpr.subjaxprs(eqn)[0], [True] * len(held))
        policy, prevent = eqn.params["policy"], eqn.params["prevent_cse"]
        return jax.checkpoint(body, policy=policy, prevent_cse=prevent)(*values)

    _remat = _remat2 = _checkpoint

    def _custom_jvp_call(self, eqn: Any, values: list[Any], held: list[bool]) -> Any:
        traced = _jaxpr.jvp_rule(eqn)
        if traced is None:
            return None
        fun = jax.custom_jvp(self._body(_jaxpr.subjaxprs(eqn)[0], held))
        first, count = eqn.params["num_consts"], len(eqn.outvars)

        def rule(primals: Any, tangents: Any) -> Any:
            inputs = [*primals[first:], *tangents[first:]]
            results = self._body(traced, [False] * len(inputs))(*inputs)
            return results[:count], results[count:]

        fun.defjvp(rule)
        return fun(*values)

    def _shard_map(self, eqn: Any, values: list[Any], held: list[bool]) -> Any:
        params = eqn.params
        axes = params.get("manual_axes", params.get("newly_manual_axes"))
        body = self._body(_jaxpr.subjaxprs(eqn)[0], held)
        return jax.shard_map(
            lambda *shards: tuple(body(*shards)),
            axis_names=set(axes),
            **{k: params[k] for k in ("mesh", "in_specs", "out_specs", "check_vma")},
        )(*values)


@jax.jit
def _kept_apart(arrays: list[jax.Array]) -> list[jax.Array]:
    """Arrays from which XLA:GPU computes again what it would have kept in float32."""
    # One for each: a common one would vary over all axes over which one does.
    apart = functools.partial(jax.tree.map, lax.optimization_barrier)
    return lax.platform_dependent(arrays, cuda=apart, rocm=apart, default=list)


@jax.custom_jvp
def _with_value(array: Any, value: Any) -> Any:
    """`value`, which is what `array` should be, with its derivative."""
    return value


_with_value.defjvp(lambda primals, t: (primals[1], t[0]), symbolic_zeros=True)


# Not `stop_gradient`, which cannot be transposed in a rule for derivatives.
_without_derivative = jax.custom_jvp(lambda x: x)
_no_tangent = jax.custom_derivatives.SymbolicZero.from_primal_value
_without_derivative.defjvp(
    lambda primals, _: (primals[0], _no_tangent(primals[0])), symbolic_zeros=True
)


@jax.jit
def _on_tpu(x: jax.Array, y: jax.Array) -> jax.Array:
    """`x` on a TPU, `y` elsewhere."""
    return lax.platform_dependent(x, y, tpu=lambda x, _: x, default=lambda _, y: y)


def _is_small_sum(eqn: Any) -> bool:
    """Whether it reduces eight or more entries to one."""
    if not (eqn.primitive.name.startswith("reduce_") and is_float32(eqn.outvars[0])):
        return False
    return _jaxpr.size(eqn.invars[0]) >= 8 * _jaxpr.size(eqn.outvars[0])


def _checked_dtype(name: str, dtype: Any) -> Any:
    with contextlib.suppress(TypeError):
        if jnp.dtype(dtype) in (jnp.float16, jnp.bfloat16):
            return jnp.dtype(dtype)
    raise ValueError(f"autocast: expected {name} float16 or bfloat16, got {dtype!r}")


def _is_module(x: Any) -> bool:
    bases = [c.__name__ for c in type(x).__mro__ if c.__module__.startswith("flax.nnx")]
    return not {"Module", "Object", "Pytree"}.isdisjoint(bases)
