"""A float32 program in which each matrix product is half precision where a flag is set.

It is traced once. Each of its products gets a number, which stands in its scopes, so
that `autocast`'s own way through loops, branches and rules for derivatives finds it.
"""

import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _jaxpr
from .._autocast_run import Cast, Plan, Step
from .._dot_general import bilinear, derivative
from .._marks import Names, tracing
from ._backward import Backward, Loss, at_loss_scale, split_arrays
from ._comparison import (
    changed_in_the_last_digit,
    differences,
    judged_error,
    scaled_error,
    whole_error,
)
from ._precision.matrix_work import flops
from ._precision.source import Place, begin_user_code, place_of

_NUMBER = re.compile(r"float32_or_half_(\d+)")
# Of the flags that the compiled program takes. Products beyond share the last one.
_MOST = 4096


class Product(NamedTuple):
    """A matrix product or convolution of the program text.

    Attributes:
      equations: that of the product, after those of the calls and loops that it is in.
      place: its line.
      work: floating-point operations of the forward pass, in all iterations.
    """

    equations: tuple[Any, ...]
    place: Place
    work: int

    @property
    def scopes(self) -> tuple[str, ...]:
        """Names of the scopes and modules that it is in, without transformations."""
        stacks = [eqn.source_info.name_stack.stack for eqn in self.equations]
        scopes = [s for stack in stacks for s in stack if type(s).__name__ == "Scope"]
        return tuple(scope.name for scope in scopes)


class Probe:
    """A loss and its backward pass, compiled once for all choices of its products.

    Attributes:
      products: those of the program, by number.
      candidates: numbers of those that `autocast` would make half precision.
      others: numbers of those that run too.
      reference: the backward pass in float32.
    """

    def __init__(self, loss: Loss, forward: Any, backward: Any) -> None:
        self._loss, self.forward, self._backward = loss, forward, backward
        self._arrays, rejoin = split_arrays(loss.args)
        self.products: list[Product] = []
        self.candidates: set[int] = set()
        self.others: set[int] = set()

        def program(flags: jax.Array, s: jax.Array, arrays: list[Any]) -> Backward:
            fun = functools.partial(self._flagged, flags)
            flagged = dataclasses.replace(loss, fun=fun, has_aux=False)
            return flagged.run(s, rejoin(arrays))

        # XLA may not leave roundings out. Level 1, since small products on a CPU would
        # take six times as long to compile at level 3, and run as fast.
        options: Any = {"xla_allow_excess_precision": False}
        options["xla_backend_optimization_level"] = 1
        self._program = jax.jit(program, compiler_options=options)
        self.reference = self.run((), 1.0)
        changed = changed_in_the_last_digit(self._arrays)
        moved = self._program(np.zeros(_MOST, bool), jnp.float32(1), changed)
        self._own = differences(moved, self.reference)

    def error(self, half: Sequence[int], s: float | None) -> float:
        """That of the gradient with these products in half precision, at S = `s`."""
        found, _ = at_loss_scale(lambda s: self.run(half, s), s)
        rows = differences(found, self.reference)
        return judged_error(whole_error(rows), scaled_error(rows, self._own))

    def run(self, half: Sequence[int], s: Any) -> Backward:
        """The backward pass at S = `s` with these products in half precision."""
        flags = np.zeros(_MOST, bool)
        flags[[*half]] = True
        return self._program(flags, jnp.float32(s), self._arrays)

    def _flagged(self, flags: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        """The loss."""
        arrays, rejoin = split_arrays((args, kwargs))

        def loss(*arrays: Any) -> Any:
            args, kwargs = rejoin(arrays)
            out = begin_user_code(self._loss.fun, *args, **kwargs)
            self._loss.dtype_of(out)
            return out[0] if self._loss.has_aux else out

        with tracing(self.forward):
            program = jax.make_jaxpr(loss)(*arrays)
        program = self._numbered(program, (), Place(None, None), 1)
        shared = functools.cache(lambda make, *facts: make(*facts))
        given = self.forward, self._backward, False, False, Names(), set(), shared
        cast = _Flagged(*given, flags=flags, met=(self.candidates, self.others))
        alive = [True] * len(arrays)
        return cast.run(program, alive, alive, *arrays)[0]

    def _numbered(self, jaxpr: Any, outer: Any, place: Place, times: int) -> Any:
        """A jaxpr whose products, and calls with rules, name their numbers."""
        inner, _ = _jaxpr.open_jaxpr(jaxpr)
        equations = []
        for eqn in inner.eqns:
            name, chain = eqn.primitive.name, (*outer, eqn)
            if name in _jaxpr.PRODUCTS:
                eqn = self._with_number(eqn, chain, place_of(eqn, place), times)
            elif any(map(flops, _equations_within(eqn))):
                here, loop = place_of(eqn, place), _jaxpr.loop_of(eqn)
                trips = ((loop and loop.trips) or 1) * _jaxpr.mesh_size(eqn)
                within = {"outer": chain, "place": here, "times": times * trips}
                numbered = functools.partial(self._numbered, **within)
                params = {k: _map(numbered, v) for k, v in eqn.params.items()}
                eqn = eqn.replace(params=params)
                if name == "custom_jvp_call":  # for the products of its rule
                    eqn = self._with_number(eqn, chain, here, times)
            equations.append(eqn)
        inner = inner.replace(eqns=equations)
        is_open = getattr(jaxpr, "jaxpr", jaxpr) is jaxpr  # as all are in jax 0.12
        return inner if is_open else jaxpr.replace(jaxpr=inner)

    def _with_number(self, eqn: Any, chain: Any, place: Place, times: int) -> Any:
        number = min(len(self.products), _MOST - 1)
        work = sum(map(flops, (eqn, *_equations_within(eqn))))
        self.products.append(Product(chain, place, times * work))
        info = eqn.source_info
        stack = info.name_stack.extend(f"float32_or_half_{number}")
        return eqn.replace(source_info=info.replace(name_stack=stack))


def _equations_within(eqn: Any) -> list[Any]:
    return [e for body in _jaxpr.subjaxprs(eqn) for e in _jaxpr.equations(body)]


def _numbers(scopes: Any) -> list[int]:
    return list(map(int, _NUMBER.findall(str(scopes))))


def _map(fun: Callable[[Any], Any], value: Any) -> Any:
    """`fun` of a jaxpr, or of all in a tuple or list; anything else as it is."""
    if hasattr(getattr(value, "jaxpr", value), "eqns"):
        return fun(value)
    if isinstance(value, (tuple, list)):
        items = [_map(fun, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


@dataclasses.dataclass(frozen=True)
class _Flagged(Cast):
    """Runs each product in half precision where its flag is set."""

    flags: Any = dataclasses.field(default=None, compare=False)  # bool[N], by number
    # Numbers of the products that have flags, and of those that run in float32.
    met: Any = dataclasses.field(default=None, compare=False)
    rule: int = -1  # number of the call whose rule for derivatives this is

    def _run_step(self, step: Step, plan: Plan, env: Any) -> list[Any]:
        scopes = f"{step.scope}/{step.jaxpr.eqns[-1].source_info.name_stack}"
        number = [self.rule, *_numbers(scopes)][-1]
        if step.kind != "product":
            eqns = step.jaxpr.eqns
            if not hasattr(self, f"_{eqns[0].primitive.name}"):
                within = [e for eqn in eqns for e in (eqn, *_equations_within(eqn))]
                numbers = (
                    _numbers(e.source_info.name_stack) for e in within if flops(e)
                )
                self.met[1].update(functools.reduce(operator.iadd, numbers, []))
            inside = dataclasses.replace(self, rule=number)
            return Cast._run_step(inside, step, plan, env)
        self.met[0].add(number)
        inputs, half = env.of(step.jaxpr.invars), self.flags[number]
        copies = [_rounded(x, half, self.forward) for x in inputs[:2]]

        def term(side: int, *copies: jax.Array) -> jax.Array:
            wide = side if step.weights[side] else None
            return _multiply(step, self.backward, wide, *copies)

        product = functools.partial(_multiply, step, self.forward, None)
        copies = [*copies, *inputs[2:], half]
        return [bilinear(product, derivative(term), inputs[:2], copies)]


def _multiply(
    step: Step, dtype: Any, wide: int | None, *values: jax.Array
) -> jax.Array:
    """A product, rounded where the last value is True; operand `wide` is not."""
    *moves, eqn = step.jaxpr.eqns
    *operands, half = values
    for side in {0, 1} - {wide}:
        operands[side] = _rounded(operands[side], half, dtype)
    for i, move in enumerate(moves):
        side = int(i >= step.moves)
        (operands[side],) = _jaxpr.evaluate(move, [operands[side]])
    precision = (jax.lax.Precision.HIGHEST,) * 2  # the flag decides, not the machine
    (result,) = _jaxpr.evaluate(eqn, operands, precision=precision)
    return _rounded(result, half, dtype)


def _rounded(x: jax.Array, half: Any, dtype: Any) -> jax.Array:
    return jnp.where(half, x.astype(dtype).astype(x.dtype), x)
