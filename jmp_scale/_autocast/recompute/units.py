"""Evaluates units, with derivatives that recompute the islands.

```
forward:   island -> cast(operands) -> products in half precision -> float32
backward:  residuals -> recompute the island -> its derivative, and cast(operands)
           cast(cotangent) -> products of the gradients of both operands
```

Kinds of machines differ in the barriers between the two passes, but not in values.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax import lax

from ... import _jaxpr
from ..._jaxpr import JaxprEqn, NameStack, Var
from ..._types import Arrays
from ..derivatives import (
    ByPosition,
    linear,
    live_of,
    no_tangent,
    with_derivative,
    with_value,
)
from ..higher_order import Part
from ..interpreter import Interpreter
from ..marks import CAST
from ..products import Product
from ..values import Values
from .islands import on_gpu, reached_by, softmax_from, softmaxes_of
from .plan import Unit, make_plan

T = TypeVar("T")
# What residuals are copies of, where the backward pass has a dtype of its own: the
# inputs of the island, and by position the operands of products.
_Originals = tuple[Arrays, ByPosition] | None
_behind_barrier = jax.jit(functools.partial(on_gpu, lax.optimization_barrier))


@dataclasses.dataclass(frozen=True)
class RecomputingInterpreter(Interpreter):
    """Evaluates programs by their plans, unit by unit."""

    # Not in a rule for derivatives, which is transposed: what would be recomputed has
    # no derivative there. Not in a checkpoint with a policy, which says itself what is
    # saved.
    recompute: bool = True

    def within(self, eqn: JaxprEqn, part_of: Part) -> "Interpreter":
        recompute = self.recompute and part_of not in ("rule", "policy")
        nested = dataclasses.replace(self, recompute=recompute)
        return Interpreter.within(nested, eqn, part_of)

    def evaluate_steps(self, values: Values) -> None:
        if not self.recompute:
            return super().evaluate_steps(values)
        for part in make_plan(values.reading):
            if isinstance(part, Unit):
                with part.jaxpr.eqns[-1].ctx.manager:
                    self.evaluate_unit(part, values)
            else:
                self.evaluate_step(part, values)

    def evaluate_unit(self, unit: Unit, values: Values) -> None:
        """Adds the values that an island and its products compute."""
        inputs = unit.jaxpr.invars
        args = (
            [values[v] for v in inputs],
            [self.operand(v, values) for v in unit.passed],
            [self.saved(v, values, as_is=True) for v in inputs],
            [self.saved(v, values, as_is=v in inputs) for v in unit.passed],
        )
        # Equal units share a function, if what they do not compare is equal too.
        scopes = unit.scope, tuple(product.scope for product, _ in unit.products)
        facts = unit, self, scopes, unit.passed_inputs
        results = self.traces.made(_function_of, *facts)(*args)
        outputs = unit.results
        for i, x in results.saved.items():
            values.casts[outputs[i], self.forward] = x
        self.add({outputs[i]: x for i, x in results.island.items()}, values)
        self.notes.any_half |= bool(unit.products)
        made = {unit.products[k][0].result: x for k, x in results.products.items()}
        self.add(made, values)

    def tangent_of(self, product: Product) -> Callable[..., jax.Array]:
        # The cotangent is then half precision, and an array of its own.
        tangent = super().tangent_of(product)
        return lambda *args: self.apart(tangent(*args))

    def apart(self, x: T) -> T:
        """Arrays behind an optimization barrier on GPUs.

        Without it XLA merges the recomputed island with that of the forward pass, and
        keeps its float32 values.
        """
        has_barrier = self.recompute and not self.in_loop
        return jax.tree.map(_behind_barrier, x) if has_barrier else x


class UnitResults(NamedTuple):
    """What a unit returns, or its tangents."""

    island: ByPosition  # float32
    products: ByPosition  # float32, by position in the unit
    saved: ByPosition  # half-precision copies of results of the island


def _function_of(
    unit: Unit,
    cast: RecomputingInterpreter,
    scopes: tuple[NameStack, tuple[NameStack, ...]],
    passed_inputs: tuple[tuple[int, int], ...],
) -> Callable[..., UnitResults]:
    """Returns a function with a derivative that recomputes the island.

    Its arguments are the inputs of the island, what products read besides, and the
    residuals of both. `scopes` are those of the island and of the products,
    `passed_inputs` are the unit's.
    """
    island_scope, product_scopes = scopes
    recompute = cast.traces.made(_recomputation, unit, cast)
    rounded = _rounding(unit, cast)
    tangents_of = [cast.tangent_of(product) for product, _ in unit.products]
    saved_in_half = unit.places("is_saved_in_half")
    count = len(unit.outputs)

    def copies_of(outputs: ByPosition) -> ByPosition:
        return {i: outputs[i].astype(cast.forward) for i in unit.copied}

    def with_passed(outputs: ByPosition, passed: Arrays) -> ByPosition:
        return outputs | {count + j: x for j, x in enumerate(passed)}

    def evaluate(
        inputs: Arrays, _: Arrays, residuals: Arrays, passed: Arrays
    ) -> UnitResults:
        with _jaxpr.scope(island_scope):
            results = _jaxpr.evaluate_all(unit.jaxpr, inputs, change=rounded)
            outputs = dict(enumerate(results))
            halves = copies_of(outputs)
        read = with_passed(outputs | halves, passed)
        products = {}
        for k, (product, places) in enumerate(unit.products):
            with _jaxpr.scope(product_scopes[k]):
                operands = (read[i] for i in places)
                products[k] = product.forward(cast.forward, *operands)
        return UnitResults(outputs, products, {i: halves[i] for i in saved_in_half})

    def tangents(
        residuals: tuple[Arrays, Arrays, ByPosition, ByPosition, _Originals],
        live: tuple[ByPosition, ByPosition],
    ) -> tuple[ByPosition, ByPosition]:
        """Tangents of the island's results and of products, for those of arguments."""
        inputs, passed, outputs, saved, float32 = residuals
        inputs, outputs, saved = cast.apart((inputs, outputs, saved))
        passed = [*passed]
        for j, i in passed_inputs:
            passed[j] = inputs[i]
        copied, originals = float32 or (None, {})
        with _jaxpr.scope(island_scope):
            found, results = recompute(inputs, outputs, saved, live[0], copied)
            values = with_passed(results | copies_of(results) | saved, passed)
            originals = results | originals
            for i in unit.operands if float32 else ():
                values[i] = cast.in_backward(originals[i], values[i])
        # Cast once, so that cotangents of what several products read are added in half.
        in_half = {
            i: x.astype(cast.backward) if unit.outputs[i].is_data else x
            for i, x in found.items()
            if i in unit.operands
        } | {count + j: t for j, t in live[1].items()}
        moved = {}
        for k, (_, places) in enumerate(unit.products):
            sides = enumerate(places[:2])
            moving = {side: in_half[i] for side, i in sides if i in in_half}
            if moving:
                with _jaxpr.scope(product_scopes[k]):
                    moved[k] = tangents_of[k]([values[i] for i in places], moving)
        return found, moved

    def derivative(
        results: UnitResults, args: Sequence[Arrays], moves: Sequence[Any]
    ) -> UnitResults:
        cast.note_derivative()
        inputs, operands, residuals, passed = args
        float32 = None
        if cast.is_mixed:
            originals = {i: results.island[i] for i in results.saved}
            float32 = inputs, with_passed(originals, operands)
        outputs = {i: results.island[i] for i in unit.places("is_saved")}
        read = residuals, passed, outputs, results.saved, float32
        live = live_of(moves[0]), live_of(moves[1])
        found, moved = linear(tangents, read, live)
        return UnitResults(
            island=_or_zeros(results.island, found),
            products=_or_zeros(results.products, moved),
            saved=_or_zeros(results.saved, found),
        )

    return with_derivative(evaluate, derivative)


def _rounding(
    unit: Unit, cast: RecomputingInterpreter
) -> Callable[[Var, jax.Array], jax.Array]:
    """Returns a function that rounds the results of which all readers read one cast."""
    shared = {unit.results[i] for i in unit.places("is_shared")}
    return lambda v, x: cast.rounded(x) if v in shared else x


def _recomputation(unit: Unit, cast: RecomputingInterpreter) -> Callable[..., Any]:
    """Returns a function that recomputes the island of equal units, and moves it."""
    island, places = unit.jaxpr, {v: i for i, v in enumerate(unit.results)}
    softmaxes, rounded = softmaxes_of(island), _rounding(unit, cast)
    read_by_products = {i for _, places in unit.products for i in places}
    is_read = unit.copied | read_by_products.intersection(places.values())

    def recompute(
        copies: Arrays,
        outputs: ByPosition,
        saved: ByPosition,
        live: ByPosition,
        copied: Arrays | None,
    ) -> tuple[ByPosition, ByPosition]:
        """Tangents of results, for those of inputs, and the results that are read.

        `copied`: the inputs, if these copies lack the range of their derivatives.
        """
        inputs = []
        for i, (v, x) in enumerate(zip(island.invars, copies, strict=True)):
            if copied is not None and x.dtype != copied[i].dtype:
                x = with_value(copied[i], x.astype(copied[i].dtype))
            inputs.append(x.astype(_jaxpr.dtype_of(v)))
        reached = reached_by(island, (island.invars[i] for i in live))

        def evaluate(some: ByPosition) -> tuple[ByPosition, list[jax.Array]]:
            values: dict[Var, jax.Array] = {}

            def replace(v: Var, x: jax.Array) -> jax.Array:
                x = values[v] = rounded(v, x)
                i = places.get(v)
                if i is None:
                    return x
                if unit.outputs[i].is_softmax:
                    exponents, axes = softmaxes[v]
                    result = saved[i].astype(x.dtype)
                    return softmax_from(values[exponents], result, axes)
                if not unit.outputs[i].is_saved:
                    return x
                return with_value(x, outputs[i]) if v in reached else outputs[i]

            changed = [some.get(i, x) for i, x in enumerate(inputs)]
            results = _jaxpr.evaluate_all(island, changed, change=replace)
            moving = {i: results[i] for v, i in places.items() if v in reached}
            return moving, results

        primals = {i: inputs[i] for i in live}
        _, tangents, results = jax.jvp(evaluate, (primals,), (live,), has_aux=True)
        return tangents, {i: results[i] for i in is_read}

    recompute.__name__ = CAST
    return jax.jit(recompute)


def _or_zeros(primals: ByPosition, found: ByPosition) -> dict[int, Any]:
    """Returns the tangents that were found, and zeros for the others."""
    return {
        i: found[i].astype(x.dtype) if i in found else no_tangent(x)
        for i, x in primals.items()
    }
