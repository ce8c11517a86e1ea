"""A float32 function in, a mixed-precision one out."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.typing import DTypeLike

from . import _jaxpr
from ._autocast_plan import KEPT, Step, is_float32, make_plan, variables
from ._dot_general import bilinear, derivative, wide_dot_general
from ._policy import checked_half
from ._validation import warn

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
    on a TPU so is what a product and later operations read. Casts of the user stay, and
    float32 stay sums (one operand is a vector), products with `precision` HIGH or
    HIGHEST, and those in a `custom_vjp` function, a kernel or a `while` under `vmap`.
    `diagnostics.precision_report` of the result lists what runs in which dtype.

    Args:
      fun: what `jax.jit` could trace; an argument that is not an array is static.
      dtype: float16 or bfloat16, a name or a dtype.
      backward: dtype of the products of the backward pass; default `dtype`. With
        "bfloat16", of float32's range, a float16 forward pass needs no loss scale.
      recompute: whether the backward pass computes cheap operations again, so that
        hardly any float32 is kept. False leaves that to the caller's `jax.checkpoint`.
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
    forward = checked_half("dtype", dtype)
    back = forward if backward is None else checked_half("backward", backward)
    names = (keep_float32,) if isinstance(keep_float32, str) else tuple(keep_float32)
    unread: set[str] = set()

    @functools.wraps(fun)
    def in_half_precision(*args: Any, **kwargs: Any) -> Any:
        flat = _Flat(fun, args, kwargs)
        for module in filter(_is_module, flat.leaves):
            raise TypeError(
                f"autocast: expected no NNX modules, got a {type(module).__name__}, "
                "whose writes would be lost: use jmp_scale.nnx.autocast"
            )
        jaxpr = jax.make_jaxpr(flat)(*flat.arrays)
        shared = functools.cache(lambda make, *facts: make(*facts))
        cast = _Cast(forward, back, bool(recompute), names, unread, shared)
        return flat.result(cast.run(jaxpr, [True] * len(flat.arrays), *flat.arrays))

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
        self.arrays = [x for x in self.leaves if isinstance(x, jax.Array)]
        self.__name__ = self.__qualname__ = getattr(fun, "__name__", "fun")

    def __call__(self, *arrays: Any) -> list[Any]:
        left = iter(arrays)
        leaves = [next(left) if isinstance(x, jax.Array) else x for x in self.leaves]
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
    """How plans are run. `shared` makes one function of equal steps: traced once."""

    forward: Any  # dtype of the products of the forward pass
    backward: Any
    recompute: bool
    keep: Collection[str]
    unread: set[str] = dataclasses.field(compare=False)
    shared: Any = dataclasses.field(compare=False)
    in_loop: bool = False

    def run(self, jaxpr: Any, held: Sequence[bool], *values: Any) -> Any:
        """The results of a program, for these values of its inputs."""
        plan = make_plan(jaxpr, held, self.keep)
        env = dict(zip(plan.jaxpr.invars, values, strict=True)) | plan.constants
        products = [s.jaxpr for s in plan.steps if s.kind == "product"]
        operands = {v for p in products for v in p.invars[:2]}
        # Half precision already, or to be as a cast by hand makes it: not clipped.
        by_hand = operands.union(*(p.outvars for p in products))
        read = {v for s in plan.steps if s.kind == "island" for v in s.jaxpr.invars}
        rounded = operands & (read - plan.kept - {*variables(plan.jaxpr.outvars)})

        @functools.cache
        def copy(v: Any) -> Any:
            """What the backward pass keeps of a variable."""
            if not is_float32(v) or (v in plan.kept and self.recompute):
                return env[v]
            largest = jnp.finfo(self.forward).max.astype("float32")
            x = env[v] if v in by_hand else lax.clamp(-largest, env[v], largest)
            return x.astype(self.forward)

        for step in plan.steps:
            names = step.jaxpr.invars
            inputs = [env[v] for v in names]
            with _jaxpr.scope(step.scope), step.jaxpr.eqns[-1].ctx.manager:
                if step.kind == "product":
                    rules = self.shared(_product, step, self.forward, self.backward)
                    kept = [*map(copy, names[:2]), *inputs[2:]]
                    results = [bilinear(rules[0], rules[1], inputs[:2], kept)]
                elif step.kind == "island" and self.recompute:
                    island = self.shared(_island, step, self.in_loop)
                    results = island(inputs, [*map(copy, names)])
                elif step.kind == "call":
                    results = self._call(step.jaxpr.eqns[0], env, plan.kept)
                else:
                    results = _jaxpr.evaluate_all(step.jaxpr, inputs)
                for v, x in zip(step.jaxpr.outvars, results, strict=True):
                    env[v] = _on_tpu(self._rounded, x) if v in rounded else x
        atoms = plan.jaxpr.outvars
        return [jnp.asarray(v.val) if _jaxpr.is_literal(v) else env[v] for v in atoms]

    def _rounded(self, x: jax.Array) -> jax.Array:
        """`x` and its cotangent in half precision: one array serves all readers."""
        dtypes = self.backward, self.forward
        return _with_value(*(x.astype(d).astype(x.dtype) for d in dtypes))

    def _body(self, jaxpr: Any, held: Sequence[bool], **changes: bool) -> Any:
        """A nested jaxpr as a function of its inputs."""
        cast = dataclasses.replace(self, **changes)
        return self.shared(functools.partial, _Cast.run, cast, jaxpr, tuple(held))

    def _call(self, eqn: Any, env: Any, kept: Collection[Any]) -> list[Any]:
        """Runs an equation whose nested jaxprs hold products."""
        values = [v.val if _jaxpr.is_literal(v) else env[v] for v in eqn.invars]
        held = [_jaxpr.is_literal(v) or v in kept for v in eqn.invars]
        run = getattr(self, "_" + eqn.primitive.name, None)
        if run and (results := run(eqn, values, held)) is not None:
            return results
        body, _ = _jaxpr.open_jaxpr(_jaxpr.subjaxprs(eqn)[0])
        name = eqn.params.get("name") or getattr(body.debug_info, "func_name", "")
        if name not in self.unread:
            self.unread.add(name)
            warn(
                f"autocast: {name} ({eqn.primitive.name}) holds matrix products and "
                "cannot be read: they stay float32; cast inside it, or keep_float32"
            )
        return _jaxpr.evaluate(eqn, values)

    def _scan(self, eqn: Any, values: list[Any], held: list[bool]) -> Any:
        loop = _jaxpr.loop_of(eqn)
        if loop is None:
            return None
        first, last = loop.consts, loop.consts + loop.carry
        held[first:last] = [False] * loop.carry
        body = self._body(loop.body, held, in_loop=True)

        def step(carry: Any, xs: Any) -> Any:
            results = body(*values[:first], *carry, *xs)
            return results[: loop.carry], results[loop.carry :]

        options = {k: eqn.params[k] for k in ("reverse", "unroll") if k in eqn.params}
        inputs = values[first:last], values[last:], loop.trips
        carry, ys = lax.scan(step, *inputs, **options)
        return [*carry, *ys]

    def _while(self, eqn: Any, values: list[Any], held: list[bool]) -> Any:
        loop: Any = _jaxpr.loop_of(eqn)
        if _jaxpr.shape(_jaxpr.open_jaxpr(eqn.params["cond_jaxpr"])[0].outvars[0]):
            return None  # under `vmap`, where it ends for one index after the other
        count, first = loop.offset, loop.offset + loop.consts
        body = self._body(loop.body, [False] * (len(held) - count), in_loop=True)
        test = self._body(eqn.params["cond_jaxpr"], [False] * (count + loop.carry))
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

    def _remat2(self, eqn: Any, values: list[Any], held: list[bool]) -> Any:
        body = self._body(_jaxpr.subjaxprs(eqn)[0], [True] * len(held))
        policy, prevent = eqn.params["policy"], eqn.params["prevent_cse"]
        policy = policy and self.shared(_for_products, policy)
        return jax.checkpoint(body, policy=policy, prevent_cse=prevent)(*values)

    def _custom_jvp_call(self, eqn: Any, values: list[Any], held: list[bool]) -> Any:
        traced = _jaxpr.jvp_rule(eqn)
        if traced is None:
            return None
        fun = jax.custom_jvp(self._body(_jaxpr.subjaxprs(eqn)[0], held))
        first, count = eqn.params["num_consts"], len(eqn.outvars)

        def rule(primals: Any, tangents: Any) -> Any:
            inputs = [*primals[first:], *tangents[first:]]
            # It is transposed, and what is computed again has no derivative in that.
            held = [False] * len(inputs)
            results = self._body(traced, held, recompute=False)(*inputs)
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


def _for_products(policy: Any) -> Any:
    """A policy of `jax.checkpoint` for products that are functions with a rule."""

    def saves(primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive.name == "custom_jvp_call":
            for inner in _jaxpr.equations(params["call_jaxpr"]):
                if inner.primitive.name in _jaxpr.PRODUCTS:
                    primitive, params = inner.primitive, inner.params
        return policy(primitive, *avals, **params)

    return saves


def _product(step: Step, forward: Any, backward: Any) -> Any:
    """A product in half precision, and its derivative."""
    *moves, eqn = step.jaxpr.eqns

    def multiply(dtype: Any, wide: int | None, *values: jax.Array) -> jax.Array:
        """In half precision; only the operand `wide` stays float32."""
        pair = [x if i == wide else x.astype(dtype) for i, x in enumerate(values[:2])]
        for i, move in enumerate(moves):
            side = int(i >= step.moves)
            (pair[side],) = _jaxpr.evaluate(move, [pair[side]])
        if wide is None:
            params = {"precision": None, "preferred_element_type": dtype}
            (result,) = _jaxpr.evaluate(eqn, [*pair, *values[2:]], **params)
        else:
            numbers = eqn.params["dimension_numbers"]
            sharding = eqn.params.get("out_sharding")
            result = wide_dot_general(*pair, numbers, dtype, None, sharding)
        return result.astype(jnp.float32)

    return functools.partial(multiply, forward, None), derivative(
        lambda side, *xs: multiply(backward, side if step.weights[side] else None, *xs)
    )


def _island(step: Step, in_loop: bool) -> Any:
    """Runs cheap equations; the backward pass runs them again on copies."""
    # Sums, as of BatchNorm, are kept from the forward pass; those of rows, as of
    # softmax, in a loop on a TPU only: a GPU's kernels for softmax break at them.
    sums = {e.outvars[0]: i for i, e in enumerate(step.jaxpr.eqns) if _is_small_sum(e)}

    def run(inputs: list[Any], known: dict[int, Any]) -> list[Any]:
        def as_known(v: Any, x: Any) -> Any:
            i = sums.get(v)
            is_row = i is not None and step.jaxpr.eqns[i].params["axes"] == (x.ndim,)
            if i is None or (is_row and not in_loop):
                return x
            value = known.setdefault(i, x)
            value = _on_tpu(lambda _, value: value, x, value) if is_row else value
            return _with_value(x, value)

        return _jaxpr.evaluate_all(step.jaxpr, inputs, change=as_known)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def again(inputs: list[Any], copies: list[Any], known: dict[int, Any]) -> list[Any]:
        pairs = zip(inputs, copies if in_loop else _kept_apart(copies), strict=True)
        return run([_with_value(x, c.astype(x.dtype)) for x, c in pairs], known)

    def island(inputs: list[Any], copies: list[Any]) -> list[Any]:
        known: dict[int, Any] = {}
        results = run(list(map(_without_derivative, inputs)), known)
        repeated = again(inputs, copies, known)
        return [_with_value(x, v) for x, v in zip(repeated, results, strict=True)]

    return island


@jax.jit
def _kept_apart(arrays: list[jax.Array]) -> list[jax.Array]:
    """Arrays from which XLA:GPU computes again what it would have kept in float32."""
    # One for each: a common one would vary over all axes over which one does.
    apart = functools.partial(jax.tree.map, lax.optimization_barrier)
    return lax.platform_dependent(arrays, cuda=apart, rocm=apart, default=list)


# The second array, which is what the first should be, with the first one's derivative.
_with_value = jax.custom_jvp(lambda _, value: value)
_with_value.defjvp(lambda primals, t: (primals[1], t[0]), symbolic_zeros=True)

# Not `stop_gradient`, which cannot be transposed in a rule for derivatives.
_without_derivative = jax.custom_jvp(lambda x: x)
_no_tangent = jax.custom_derivatives.SymbolicZero.from_primal_value
_without_derivative.defjvp(lambda p, _: (p[0], _no_tangent(p[0])), symbolic_zeros=True)


def _on_tpu(fun: Callable[..., Any], x: jax.Array, *rest: jax.Array) -> jax.Array:
    """`fun(x, *rest)` on a TPU, `x` elsewhere."""
    return lax.platform_dependent(x, *rest, tpu=fun, default=lambda x, *_: x)


def _is_small_sum(eqn: Any) -> bool:
    """Whether it reduces eight or more entries to one."""
    is_sum = "axes" in eqn.params and is_float32(eqn.outvars[0])
    return is_sum and _jaxpr.size(eqn.invars[0]) >= 8 * _jaxpr.size(eqn.outvars[0])


def _is_module(x: Any) -> bool:
    bases = [c.__name__ for c in type(x).__mro__ if c.__module__.startswith("flax.nnx")]
    return not {"Module", "Object", "Pytree"}.isdisjoint(bases)
