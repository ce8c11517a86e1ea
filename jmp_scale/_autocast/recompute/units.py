"""Evaluates units, with derivatives that recompute their islands.

```
forward:   island -> cast(operands) -> products in half precision -> float32
backward:  residuals -> recompute the island -> its derivative, and cast(operands)
           cast(cotangent) -> products of the gradients of both operands
```

Kinds of machines differ in the barriers between the two passes, but not in values.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import jax

from ... import _jaxpr
from ..._jaxpr import Jaxpr, Var
from ..._types import Arrays
from ..casting import Casting
from ..derivatives import (
    CAST,
    ByPosition,
    linear,
    live_of,
    no_tangent,
    on_gpu,
    with_derivative,
    with_value,
)
from ..products import Product
from .islands import reached_by, softmax_from, softmaxes_of
from .plan import Unit

T = TypeVar("T")
_behind_barrier = jax.jit(functools.partial(on_gpu, jax.lax.optimization_barrier))


class UnitInputs(NamedTuple):
    """What a unit reads: arrays to which gradients flow, and the residuals of these."""

    island: Arrays  # inputs of the island
    passed: Arrays  # operands of products that the island does not compute
    island_copies: Arrays
    passed_copies: Arrays


class UnitResults(NamedTuple):
    """What a unit returns, or its tangents."""

    island: ByPosition  # float32
    products: ByPosition  # float32, by position in the unit
    saved: ByPosition  # half-precision copies of results of the island


class IslandResiduals(NamedTuple):
    """What an island is recomputed from."""

    inputs: Arrays  # copies of its inputs
    outputs: ByPosition  # results that are saved as they are
    saved: ByPosition  # half-precision copies of results


class Originals(NamedTuple):
    """The float32 arrays of which residuals are copies."""

    inputs: Arrays  # of the island
    operands: ByPosition  # of products, except those that the island recomputes


class Residuals(NamedTuple):
    """What the backward pass of a unit reads."""

    island: IslandResiduals
    passed: Arrays  # copies of operands that the island does not compute
    originals: Originals | None  # if the backward pass has a dtype of its own


def function_of(
    unit: Unit, cast: Casting, _: Hashable
) -> Callable[[UnitInputs], UnitResults]:
    """Returns a unit's function, whose derivative recomputes the island."""
    passes = _Passes(unit, cast)
    tangents = passes.tangents  # one object, which JAX traces once

    def forward(read: UnitInputs) -> UnitResults:
        return passes.evaluate(read)

    def derivative(
        results: UnitResults, args: tuple[UnitInputs], directions: tuple[UnitInputs]
    ) -> UnitResults:
        cast.notes.note_derivative()
        (read,), (tangents_of,) = args, directions
        of_inputs = live_of(tangents_of.island)
        of_passed = live_of(tangents_of.passed, len(unit.outputs))
        of_island, of_products = linear(
            tangents, passes.residuals(results, read), (of_inputs, of_passed)
        )
        return UnitResults(
            island=_or_zeros(results.island, of_island),
            products=_or_zeros(results.products, of_products),
            saved=_or_zeros(results.saved, of_island),
        )

    return with_derivative(forward, derivative)


@dataclasses.dataclass(eq=False)
class _Passes:
    """The forward pass of a unit, and the tangents that its backward pass transposes.

    Operands are by position: results of the island, then those that it only passes on.
    """

    unit: Unit
    cast: Casting

    def evaluate(self, read: UnitInputs) -> UnitResults:
        """Computes the results of the island and of the products."""
        with _jaxpr.scope(self.unit.scope):
            results = _jaxpr.evaluate_all(self.unit.jaxpr, read.island)
            outputs = dict(enumerate(results))
            halves = self._copies_of(outputs)
        operands = outputs | halves | self._passed(read.passed_copies)
        products = {}
        for k, (product, places) in enumerate(self.unit.products):
            with _jaxpr.scope(product.scope):
                values = (operands[i] for i in places)
                products[k] = product.forward(self.cast.forward, *values)
        saved = {i: halves[i] for i in self.unit.places("is_saved_in_half")}
        return UnitResults(outputs, products, saved)

    def residuals(self, results: UnitResults, read: UnitInputs) -> Residuals:
        """Returns what the forward pass saves."""
        outputs = {i: results.island[i] for i in self.unit.places("is_saved")}
        operands = {i: results.island[i] for i in results.saved}
        originals = Originals(read.island, operands | self._passed(read.passed))
        return Residuals(
            IslandResiduals(read.island_copies, outputs, results.saved),
            read.passed_copies,
            originals if self.cast.forward != self.cast.backward else None,
        )

    def tangents(
        self, residuals: Residuals, live: tuple[ByPosition, ByPosition]
    ) -> tuple[ByPosition, ByPosition]:
        """Recomputes the island: tangents of its results, and those of the products."""
        unit, cast, originals = self.unit, self.cast, residuals.originals
        read, passed = self._apart(residuals.island), [*residuals.passed]
        for j, i in unit.passed_inputs:
            passed[j] = read.inputs[i]
        of_island, results = {}, {}
        with _jaxpr.scope(unit.scope):
            if unit.jaxpr.eqns:
                recompute = cast.traces.made(_recomputation, unit)
                inputs = originals.inputs if originals else None
                of_island, results = recompute(read, inputs, live[0])
            copies = self._copies_of(results) | read.saved
            operands = results | copies | self._passed(passed)
            if originals:
                wide = results | originals.operands
                # Second derivatives need the range of `backward`, which float16 lacks.
                for i in unit.operands:
                    copy = operands[i].astype(cast.forward)
                    original = wide[i].astype(cast.backward)
                    operands[i] = with_value(original, copy.astype(cast.backward))
        # Cast once, so that cotangents of what several products read are added in half.
        is_data = unit.places("is_data")
        of_operands = {
            i: of_island[i].astype(cast.backward) if i in is_data else of_island[i]
            for i in unit.operands.intersection(of_island)
        }
        return of_island, self._of_products(operands, of_operands | live[1])

    def _apart(self, x: T) -> T:
        """Returns arrays behind an optimization barrier on GPUs.

        Without it XLA merges the recomputed island with that of the forward pass, and
        keeps its float32 values.
        """
        has_barrier = self.cast.recompute and not self.cast.in_loop
        return jax.tree.map(_behind_barrier, x) if has_barrier else x

    def _of_products(self, operands: ByPosition, live: ByPosition) -> ByPosition:
        """Returns the tangents of products of which an operand has a tangent."""
        found, traces = {}, self.cast.traces
        for k, (product, places) in enumerate(self.unit.products):
            sides = {side: live[i] for side, i in enumerate(places[:2]) if i in live}
            if sides:
                tangent = traces.made(Product.tangent, product, self.cast.backward)
                with _jaxpr.scope(product.scope):
                    of_product = tangent([operands[i] for i in places], sides)
                    # The cotangent is then half precision, and an array of its own.
                    found[k] = self._apart(of_product)
        return found

    def _copies_of(self, outputs: ByPosition) -> ByPosition:
        return {i: outputs[i].astype(self.cast.forward) for i in self.unit.copied}

    def _passed(self, operands: Arrays) -> ByPosition:
        """Returns operands that the island does not compute, by position."""
        return dict(enumerate(operands, len(self.unit.outputs)))


def _recomputation(unit: Unit) -> Callable[..., tuple[ByPosition, ByPosition]]:
    """Returns a function that recomputes and differentiates equal units' island."""
    island, places = unit.jaxpr, {v: i for i, v in enumerate(unit.results)}
    softmaxes = softmaxes_of(island)
    read_by_products = {i for each in unit.products for i in each.places}
    is_read = unit.copied | read_by_products.intersection(places.values())

    def recompute(
        read: IslandResiduals, originals: Arrays | None, live: ByPosition
    ) -> tuple[ByPosition, ByPosition]:
        """Tangents of results, for those of inputs, and the results that are read."""
        inputs = _inputs_of(island, read.inputs, originals or read.inputs)
        reached = reached_by(island, (island.invars[i] for i in live))

        def evaluate(some: ByPosition) -> tuple[ByPosition, list[jax.Array]]:
            changed = [some.get(i, x) for i, x in enumerate(inputs)]
            known = dict(zip(island.invars, changed, strict=True))

            def with_saved(v: Var, x: jax.Array) -> jax.Array:
                """Returns a value, or a saved one with the derivative of the value."""
                known[v], i = x, places.get(v)
                if i is None:
                    return x
                if unit.outputs[i].is_softmax:
                    exponents, axes = softmaxes[v]
                    p = read.saved[i].astype(x.dtype)
                    return softmax_from(known[exponents], p, axes)
                if not unit.outputs[i].is_saved:
                    return x
                saved = read.outputs[i]
                return with_value(x, saved) if v in reached else saved

            results = _jaxpr.evaluate_all(island, changed, change=with_saved)
            return {i: results[i] for v, i in places.items() if v in reached}, results

        primals = {i: inputs[i] for i in live}
        _, tangents, results = jax.jvp(evaluate, (primals,), (live,), has_aux=True)
        return tangents, {i: results[i] for i in is_read}

    recompute.__name__ = CAST
    return jax.jit(recompute)


def _inputs_of(island: Jaxpr, copies: Arrays, originals: Arrays) -> Arrays:
    """Returns the inputs of an island from copies of them, differentiated as these.

    But as the originals, if the copies lack the range of their derivatives.
    """
    inputs = []
    for v, x, original in zip(island.invars, copies, originals, strict=True):
        if x.dtype != original.dtype:
            x = with_value(original, x.astype(original.dtype))
        inputs.append(x.astype(_jaxpr.dtype_of(v)))
    return inputs


def _or_zeros(primals: ByPosition, found: ByPosition) -> dict[int, Any]:
    """Returns the tangents that were found, and zeros for the others."""
    return {
        i: found[i].astype(x.dtype) if i in found else no_tangent(x)
        for i, x in primals.items()
    }
