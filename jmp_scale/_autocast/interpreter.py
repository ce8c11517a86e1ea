"""Evaluates a float32 program part by part, its products in half precision."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from .. import _jaxpr
from .._jaxpr import JaxprEqn, Program, Var
from .._policy import holds_half, is_half
from .._types import Arrays
from . import higher_order
from .casting import Casting
from .derivatives import noting, with_value
from .dot_general import with_precision
from .held import is_half_array
from .higher_order import Part
from .products import becomes_half, has_products
from .provenance import Origin, Step, read
from .recompute.plan import Unit, make_plan
from .recompute.units import UnitInputs, function_of
from .values import Stored, Values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interpreter(Casting):
    """Evaluates programs. Equal ones share traces of equal programs."""

    # Precision of products that stay float32 and have none of their own.
    setting: str | None = None
    in_rule: bool = False  # of a `custom_jvp`: what it computes is transposed

    def within(self, eqn: JaxprEqn, part_of: Part) -> "Interpreter":
        """Returns the interpreter of the jaxprs nested in an equation."""
        # What a rule computes of tangents is transposed, and runs in the backward pass.
        forward = self.backward if part_of == "tangents" else self.forward
        return dataclasses.replace(
            self,
            forward=forward,
            recompute=self.recompute and part_of in ("", "loop"),
            in_loop=self.in_loop or part_of == "loop",
            in_rule=self.in_rule or part_of in ("rule", "tangents"),
            in_exempt=self.in_exempt or (has_products(eqn) and self.is_exempt(eqn)),
        )

    def evaluate(
        self,
        jaxpr: Program,
        origins: Sequence[Origin],
        *values: jax.Array | Stored,
    ) -> list[jax.Array]:
        """Evaluates a program whose inputs have these origins.

        The gradient of a half-precision array is added in float32 if the array is
        given, or if the program was traced with float32 in its place.
        """
        invars = _jaxpr.bare(jaxpr).invars
        pairs = zip(invars, map(_input, invars, origins, values), strict=True)
        inputs: dict[Var, Any] = dict(pairs)
        stored = {v: x.half.dtype for v, x in inputs.items() if isinstance(x, Stored)}
        reading = read(jaxpr, origins, self, stored)
        for v, x in reading.constants.items():
            inputs[v] = Stored.of(x) if v in reading.stored else x
        found = Values(reading, inputs)
        for part in make_plan(reading, joins=self.recompute):
            with part.settings:
                if isinstance(part, Unit):
                    self.evaluate_unit(part, found)
                else:
                    self.evaluate_step(part, found)
        return _jaxpr.results_of(reading.jaxpr, found)

    def evaluate_unit(self, unit: Unit, values: Values) -> None:
        """Adds the values that an island and its products compute."""
        inputs, passed = unit.jaxpr.invars, unit.passed
        read = UnitInputs(
            island=[values[v] for v in inputs],
            passed=[self.operand(v, values) for v in passed],
            island_copies=[self.saved(v, values, wide=True) for v in inputs],
            passed_copies=[self.saved(v, values, wide=v in inputs) for v in passed],
        )
        # Units share a function if the facts that `==` ignores are equal too.
        results = self.traces.made(function_of, unit, self, unit.not_compared)(read)
        for i, x in results.saved.items():
            values.casts[unit.results[i], self.forward] = x
        self.add(dict(zip(unit.results, results.island.values(), strict=True)), values)
        self.notes.any_half |= bool(unit.products)
        made = [each.product.result for each in unit.products]
        self.add(dict(zip(made, results.products.values(), strict=True)), values)

    def evaluate_step(self, step: Step, values: Values) -> None:
        """Adds the values of an equation's results."""
        if product := step.product:
            self.notes.any_half = True
            inputs = [values[v] for v in product.jaxpr.invars]
            with _jaxpr.scope(product.scope):
                results = [product.forward(product.dtype or self.forward, *inputs)]
        elif step.kind == "move":
            results = [self._moved(step.eqn, values)]
        else:
            results = self._as_traced(step, values)
        self.add(dict(zip(step.outvars, results, strict=True)), values)

    def add(self, results: Mapping[Var, Any], values: Values) -> None:
        """Adds values; those that have names are named."""
        for v, x in results.items():
            values.put(v, self.named(v, x, values) if v in values.reading.names else x)

    def named(self, v: Var, x: jax.Array, values: Values) -> jax.Array:
        """Names the result of a product; a policy saves results by their names."""
        dtype = self.forward if v in values.reading.halves else x.dtype
        saved = checkpoint_name(x.astype(dtype), values.reading.names[v])
        values.casts[v, dtype] = saved
        return saved.astype(x.dtype)

    def operand(self, v: Var, values: Values) -> jax.Array:
        """Returns the array to which products pass the gradient of an operand.

        Of data it is the one half-precision copy: over devices the gradients of all
        products that read it are added once, and communicated in half precision.
        """
        in_half = values.reading.is_data(v) and _jaxpr.is_float32(v)
        return values.cast(v, self.backward) if in_half else values[v]

    def saved(self, v: Var, values: Values, *, wide: bool) -> jax.Array:
        """Returns the residual of a value: its half-precision copy, or itself.

        Weights are cast once for both passes: where they are split over devices, the
        compiler then gathers them as in a cast by hand. But in a loop their copies
        would be saved in each iteration. `wide`: float32 is needed, if the value is
        not stored in half precision.
        """
        if v in values.stored:
            return values.stored[v].copy
        wide = wide or (self.in_loop and v in values.reading.given)
        if v not in values.reading.halves and (wide or not _jaxpr.is_float32(v)):
            return values[v]
        return values.cast(v, self.forward)

    def _as_traced(self, step: Step, values: Values) -> Sequence[jax.Array]:
        """Evaluates an equation as it is, or one whose nested jaxprs hold products."""
        eqn = step.eqn
        if step.kind == "call" and (results := self._call(eqn, values)) is not None:
            return results
        inputs = self._inputs(eqn, values)
        if _jaxpr.subjaxprs(eqn):
            inputs = [*map(_with_cotangent_of_its_dtype, inputs)]
        return _jaxpr.evaluate(with_precision(eqn, self.setting), inputs)

    def _moved(self, eqn: JaxprEqn, values: Values) -> Stored:
        """Moves both arrays of a stored one."""
        moved, *others = eqn.invars
        (v,) = _jaxpr.variables([moved])
        wide, half, is_constant = values.stored.get(v) or Stored.of(values[v])
        others = [_jaxpr.value_of(v, values) for v in others]
        # Devices then add up its gradient in half precision.
        wide = wide.astype(half.dtype) if values.reading.is_sent(eqn) else wide
        wide, half = (_jaxpr.evaluate(eqn, [x, *others])[0] for x in (wide, half))
        wide = wide.astype(jnp.float32)
        if _jaxpr.name_of(eqn) == "gather":  # devices send rows once, in half precision
            wide = with_value(wide, half.astype(jnp.float32))
        return Stored(wide, half, is_constant)

    def _inputs(self, eqn: JaxprEqn, values: Values) -> list[Any]:
        """Returns the operands of an equation.

        It warns of a call that adds up the gradient of an operand in half precision.
        """
        inputs = [_jaxpr.value_of(v, values) for v in eqn.invars]
        if values.stored and (loops := higher_order.loops_that_add_up(eqn)):
            for i, v in enumerate(eqn.invars):
                if isinstance(v, Var) and v in values.stored and holds_half(inputs[i]):
                    inputs[i] = self._noting(inputs[i], loops)
        return inputs

    def _noting(self, x: jax.Array, loops: Sequence[JaxprEqn]) -> jax.Array:
        """Returns an array whose derivative warns of a sum in half precision."""
        near = [each for loop in loops for each in _jaxpr.equations_within(loop)]
        place, shape = _jaxpr.place_of([*loops, *near]), "x".join(map(str, x.shape))

        def note() -> None:
            self.notes.warn_once(
                place,
                f"autocast: a loop{place} adds up the gradient of a {x.dtype} array "
                f"({shape}) in its dtype, because it is {x.dtype} in the traced "
                "program; pass it to the function as an argument, or cast it before "
                "the loop: w.astype(jnp.float32)",
            )

        return noting(note, x)

    def _operands(self, eqn: JaxprEqn, values: Values) -> list[Any]:
        """Returns the operands of a call, with gradients that are float32 sums.

        So are those of half-precision arrays that a loop reads in each iteration.
        """
        operands = self._inputs(eqn, values)
        for i in higher_order.places_as_stored(eqn):
            v = eqn.invars[i]
            if isinstance(v, Var) and (x := values.stored.get(v)):
                operands[i] = x.read(x.half.dtype)
        for i in () if self.in_rule else higher_order.places_in_every_run(eqn):
            v = eqn.invars[i]
            if isinstance(v, Var) and holds_half(operands[i]):
                stored = values.stored.get(v) or Stored.of(operands[i])
                operands[i] = stored.as_constant()
        return operands

    def _call(self, eqn: JaxprEqn, values: Values) -> Arrays | None:
        """Evaluates an equation with products in nested jaxprs, if it can be read."""
        operands = self._operands(eqn, values)

        def origin_of(place: int | None) -> Origin:
            known = place is not None
            return values.reading.origin(eqn.invars[place]) if known else Origin.DATA

        def body(jaxpr: Program, places: Sequence[int | None], part_of: Part) -> Any:
            # The evaluation of equal programs is one object, which JAX traces once.
            facts = self.within(eqn, part_of), jaxpr, tuple(map(origin_of, places))
            return self.traces.made(functools.partial, Interpreter.evaluate, *facts)

        primitive = _jaxpr.name_of(eqn)
        if primitive in higher_order.CALLS:
            with _jaxpr.scope(eqn.source_info.name_stack):
                results = higher_order.CALLS[primitive](eqn, operands, body)
            if results is not None:
                return results
        # A call that reads half precision, as one marked by `in_half`, casts itself.
        products = [*filter(becomes_half, _jaxpr.equations_within(eqn))]
        if products and not _jaxpr.any_half(eqn.invars):
            name, place = _jaxpr.name_of_call(eqn), _jaxpr.place_of([*products, eqn])
            self.notes.warn_once(
                name,
                f"autocast: {name} ({primitive}) holds matrix products{place} and "
                "cannot be read: they stay float32; mark it by jmp_scale.in_half to "
                "give it half precision, or by jmp_scale.keep_float32; of a solver, "
                "cast the function that it calls",
            )
        return None


def _input(v: Var, origin: Origin, x: Any) -> Any:
    is_stored = is_half_array(x) and (origin or _jaxpr.is_float32(v))
    return Stored.of(x) if is_stored else x


def _with_cotangent_of_its_dtype(x: Any) -> Any:
    """Returns `x`, and casts its cotangent: a `custom_vjp` may return a float32 one."""
    if not isinstance(x, jax.Array):  # but a constant, which a rule may index
        return jnp.asarray(x) if np.ndim(x) else x
    return x.astype(jnp.float32).astype(x.dtype) if is_half(x.dtype) else x
