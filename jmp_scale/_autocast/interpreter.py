"""Evaluates a float32 program equation by equation, its products in half precision.

A product reads half-precision copies of its operands. Its gradients flow to

- a float32 argument, or what is computed from arguments alone: in float32, so that the
  gradients of all products that read a weight are added in float32;
- anything else, such as an activation: to its one half-precision copy, so that the
  gradients of all products that read it are added in half precision. Over devices they
  are added once, and communicated in half precision.
"""

import dataclasses
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from .. import _jaxpr
from .._jaxpr import Atom, JaxprEqn, NameStack, Program, Var
from .._validation import warn
from .dot_general import is_zero
from .higher_order import CALLS, Part
from .identities import no_tangent, with_cotangent_of_its_dtype, with_value
from .linear import LinearFunction
from .marks import Names, warn_of_no_loss_scale
from .policies import Saved, in_sight
from .products import Product, becomes_half, has_products
from .provenance import Origin, Reading, Step, read
from .stored import (
    Stored,
    Value,
    array_of,
    looked_up,
    loops_that_add_up,
    places_of,
    stored,
)

T = TypeVar("T")
Arrays = Sequence[jax.Array]
Results = Mapping[Var, Value]
# Files that the user did not write.
_INSTALLED = re.compile(r"/lib/python3|-packages\b")


class Values(dict[Var, Any]):
    """The values so far. Each reading of a stored one has a cotangent of its own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.casts: dict[tuple[Var, np.dtype], jax.Array] = {}

    def __getitem__(self, v: Var) -> jax.Array:
        return array_of(super().__getitem__(v))

    def as_stored(self, atom: Atom) -> Value:
        """The value itself."""
        return super().__getitem__(atom) if isinstance(atom, Var) else atom.val

    def cast(self, v: Var, dtype: np.dtype) -> jax.Array:
        """The only cast of a value to a dtype."""
        if (v, dtype) not in self.casts:
            self.casts[v, dtype] = self[v].astype(dtype)
        return self.casts[v, dtype]


class TraceCache:
    """Makes one function of equal parts of a program, so that JAX traces it once."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def made(self, make: Callable[..., T], *facts: Hashable) -> T:
        """`make(*facts)`, or what it made of equal facts before."""
        key = make, facts
        try:
            hash(key)
        except TypeError:  # objects of hijax have parameters of any kind
            return make(*facts)
        if key not in self._made:
            self._made[key] = make(*facts)
        return self._made[key]


@dataclasses.dataclass(eq=False)
class Notes:
    """Notes on one call of a program, with all that is nested in it."""

    warned: set[str]  # of these there is no further warning
    is_unscaled: bool = False  # whether no loss scale reaches its gradients
    any_half: bool = False  # whether a product became half precision
    found: set[str] = dataclasses.field(default_factory=set)  # names that match
    there: set[str] = dataclasses.field(default_factory=set)  # what could be named


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """Evaluates programs. Equal ones share traces of equal programs."""

    forward: np.dtype  # that of the products of the forward pass
    backward: np.dtype
    names: Names
    traces: TraceCache = dataclasses.field(compare=False)
    notes: Notes = dataclasses.field(compare=False)
    share_casts: bool = False
    # Precision of products that stay float32 and have none of their own.
    setting: str | None = None
    in_loop: bool = False
    in_rule: bool = False  # of a `custom_jvp`

    @property
    def is_mixed(self) -> bool:
        """Whether the backward pass has another range than the forward pass."""
        return self.forward != self.backward

    def within(self, eqn: JaxprEqn, part_of: Part) -> "Interpreter":
        """The interpreter of what is nested in an equation."""
        return dataclasses.replace(
            self,
            in_loop=self.in_loop or part_of == "loop",
            in_rule=self.in_rule or part_of == "rule",
        )

    def evaluate(
        self, jaxpr: Program, origins: Sequence[Origin], *values: Value
    ) -> list[jax.Array]:
        """The results of a program whose inputs have these origins."""
        reading = read(
            jaxpr,
            origins,
            self.forward,
            is_exempt=self._is_exempt,
            share_casts=self.share_casts,
            stored=places_of(values),
        )
        inputs = [*values, *(values[i] for i in reading.copied)]
        found = Values(zip(reading.jaxpr.invars, inputs, strict=True))
        found.update(reading.constants)
        for v in reading.shared.intersection(reading.jaxpr.invars):
            found[v] = self.rounded(found[v])
        self.evaluate_steps(reading, found)
        return _jaxpr.results_of(reading.jaxpr, found)

    def evaluate_steps(self, reading: Reading, values: Values) -> None:
        """Adds the values of all variables whose values are wanted."""
        for step in reading.wanted:
            self.evaluate_step(step, reading, values)

    def evaluate_step(self, step: Step, reading: Reading, values: Values) -> None:
        """Adds the values of an equation's results."""
        eqn = step.eqn
        with eqn.ctx.manager:  # settings and mesh, as they were traced
            if step.kind == "product" and step.product:
                result = self.evaluate_product(step.product, reading, values)
                results: Sequence[Value] = [result]
            else:
                results = self._as_traced(step, reading, values)
            self.add(dict(zip(eqn.outvars, results, strict=True)), reading, values)

    def add(self, results: Results, reading: Reading, values: Values) -> None:
        """Adds values: those of weights as stored ones, those that have names named."""
        for v, x in results.items():
            if reading.copied and not reading.is_data(v):  # such as `w.T`
                x = stored(array_of(x))
            if v in reading.names:
                x = self.named(v, array_of(x), reading.names[v], values)
            values[v] = x

    def named(self, v: Var, x: jax.Array, name: str, values: Values) -> jax.Array:
        """The result of a product with its name; a policy saves what has one."""
        half = checkpoint_name(x.astype(self.forward), name)
        values.casts[v, self.forward] = half
        return half.astype(x.dtype)

    def rounded(self, x: jax.Array) -> jax.Array:
        """`x` and its cotangent in half precision: one array serves all readers."""
        dtypes = self.backward, self.forward
        return with_value(*(x.astype(d).astype(x.dtype) for d in dtypes))

    def evaluate_product(
        self, product: Product, reading: Reading, values: Values
    ) -> jax.Array:
        """A product in half precision, which has half-precision gradients."""
        self.notes.any_half = True
        operands = [self.operand(v, reading, values) for v in product.operands]
        copies = [self.saved(v, reading, values) for v in product.operands]
        others = [values[v] for v in product.jaxpr.invars[2:]]
        # Equal products share a function, if they name the same scopes.
        facts = self, product, product.scope
        return self.traces.made(Interpreter._product, *facts)(operands, copies, others)

    def operand(self, v: Var, reading: Reading, values: Values) -> jax.Array:
        """The array to which products pass the gradient of an operand."""
        in_half = reading.is_data(v) and _jaxpr.is_float32(v)
        return values.cast(v, self.backward) if in_half else values[v]

    def saved(
        self, v: Var, reading: Reading, values: Values, *, as_is: bool = False
    ) -> jax.Array:
        """The residual of a value: its half-precision copy, or the value itself.

        Weights are cast once for both passes: where they are split over devices, the
        compiler then gathers them as in a cast by hand. But in a loop their copies
        would be saved in each iteration. `as_is`: float32 is needed.
        """
        value = values.as_stored(v)
        if isinstance(value, Stored):
            return value.half
        as_is = as_is or (self.in_loop and v in reading.given)
        if v not in reading.halves and (as_is or not _jaxpr.is_float32(v)):
            return values[v]
        return values.cast(v, self.forward)

    def tangent_of(self, product: Product) -> Callable[..., jax.Array]:
        """A function to the tangent of a product; equal ones have the same."""
        return self.traces.made(Product.tangent, product, self.backward)

    def in_backward(self, x: jax.Array, copy: jax.Array) -> jax.Array:
        """The value of a copy in the backward pass's dtype, differentiated as `x`.

        Second derivatives need the range of `backward`, which float16 copies lack.
        """
        read = copy.astype(self.forward)
        return with_value(x.astype(self.backward), read.astype(self.backward))

    def note_derivative(self) -> None:
        """Warns of float16 gradients that no loss scale reaches."""
        if self.notes.is_unscaled and self.backward == jnp.float16:
            warn_of_no_loss_scale(self.notes.warned)

    def _product(self, product: Product, scope: NameStack) -> Callable[..., jax.Array]:
        """A function of operands, of their copies, and of what else it reads."""
        tangent_of = self.tangent_of(product)

        def evaluate(
            saved: Saved, _: Arrays, copies: Arrays, others: Arrays
        ) -> jax.Array:
            if saved:
                return saved[0].astype(jnp.float32)
            with _jaxpr.scope(scope):
                return product.apply(self.forward, *copies, *others)

        def tangent(
            residuals: tuple[Arrays, Arrays, Arrays], live: dict[int, jax.Array]
        ) -> jax.Array:
            originals, copies, others = residuals
            if self.is_mixed:
                copies = [*map(self.in_backward, originals, copies)]
            with _jaxpr.scope(scope):
                return tangent_of([*copies, *others], live)

        linear_tangent = LinearFunction(tangent)

        def derivative(
            result: jax.Array, args: Sequence[Arrays], tangents: Sequence[Any]
        ) -> Any:
            self.note_derivative()
            operands, copies, others = args
            # A copy has the tangent of its operand, so only that of the latter is used.
            live = {i: t for i, t in enumerate(tangents[0]) if not is_zero(t)}
            if not live:
                return no_tangent(result)
            originals = operands if self.is_mixed else []
            residuals = originals, copies, others
            return linear_tangent(residuals, live).astype(result.dtype)

        return in_sight(
            evaluate,
            derivative,
            products=[product.equation],
            saved_of=lambda result: {0: result.astype(self.forward)},
            is_transposed=self.in_rule,
        )

    def _is_exempt(self, eqn: JaxprEqn) -> bool:
        met = self.names.meet(eqn)
        self.notes.found.update(met.found)
        self.notes.there.update(met.there)
        return met.is_exempt

    def _as_traced(
        self, step: Step, reading: Reading, values: Values
    ) -> Sequence[Value]:
        """Evaluates an equation as it is, or one whose nested jaxprs hold products."""
        eqn, results = step.eqn, None
        if step.kind == "other" and eqn.primitive.name == "gather":
            operands = [*map(values.as_stored, eqn.invars)]
            if isinstance(operands[0], Stored):
                return [looked_up(eqn, operands)]
        if step.kind == "call":
            results = self._call(eqn, reading, values)
        elif step.product:
            self.notes.any_half = True
            inputs = [values[v] for v in step.inputs]
            with _jaxpr.scope(step.product.scope):
                dtype = step.product.dtype or self.forward
                results = [step.product.apply(dtype, *inputs)]
        if results is None or _jaxpr.name_of(eqn) == "custom_jvp_call":
            self._warn_of_half_sums(eqn, values)
        if results is None:
            inputs = [_jaxpr.value_of(atom, values) for atom in eqn.invars]
            if _jaxpr.subjaxprs(eqn):
                inputs = [*map(with_cotangent_of_its_dtype, inputs)]
            results = _jaxpr.evaluate(_jaxpr.with_precision(eqn, self.setting), inputs)
        pairs = zip(eqn.outvars, results, strict=True)
        return [self.rounded(x) if v in reading.shared else x for v, x in pairs]

    def _warn_of_half_sums(self, eqn: JaxprEqn, values: Values) -> None:
        if not places_of([*map(values.as_stored, eqn.invars)]):
            return
        for loop in loops_that_add_up(eqn):
            place = _place_of([loop], eqn)
            if place not in self.notes.warned:
                self.notes.warned.add(place)
                warn(
                    f"autocast: a loop{place} adds up the gradient of a weight in half "
                    "precision, as the weight is stored, because autocast does not "
                    "change the function around it; cast the weight to float32 before "
                    "the loop: w.astype(jnp.float32)"
                )

    def _call(
        self, eqn: JaxprEqn, reading: Reading, values: Values
    ) -> list[jax.Array] | None:
        """Evaluates an equation with products in nested jaxprs, if it can be read."""

        def origin_of(place: int | None) -> Origin:
            if place is None:
                return Origin.DATA
            atom = eqn.invars[place]
            return reading.origin(atom) if isinstance(atom, Var) else Origin.ARGUMENTS

        def body(
            jaxpr: Program,
            *,
            places: Sequence[int | None],
            part_of: Part,
            stored: Sequence[int] = (),
        ) -> Callable[..., list[jax.Array]]:
            facts = jaxpr, tuple(map(origin_of, places)), tuple(stored)
            nested = self.within(eqn, part_of)
            return self.traces.made(_nested_function, nested, *facts)

        operands = [*map(values.as_stored, eqn.invars)]
        call, name = CALLS.get(_jaxpr.name_of(eqn)), _jaxpr.name_of_call(eqn)
        with _jaxpr.scope(eqn.source_info.name_stack):
            results = call(eqn, operands, body) if call else None
        warned = self.notes.warned
        if results is None and name not in warned and has_products(eqn):
            warned.add(name)
            products = filter(becomes_half, _jaxpr.equations_within(eqn))
            warn(
                f"autocast: {name} ({_jaxpr.name_of(eqn)}) holds matrix products"
                f"{_place_of(products, eqn)} and cannot be read: they stay float32; "
                "mark it by jmp_scale.in_half to give it half precision, or by "
                "jmp_scale.keep_float32; of a solver, cast the function that it calls"
            )
        return results


def _place_of(made: Iterable[JaxprEqn], call: JaxprEqn) -> str:
    """The user's line in which a call makes one of these, or else that of the call."""
    for eqn in (*made, call):
        for frame in getattr(eqn.source_info.traceback, "frames", ()):
            if not _INSTALLED.search(frame.file_name):
                return f" ({frame.file_name}:{frame.line_num}, {frame.function_name})"
    return ""


def _nested_function(
    interpreter: Interpreter,
    jaxpr: Program,
    origins: tuple[Origin, ...],
    places: tuple[int, ...],
) -> Callable[..., list[jax.Array]]:
    """A function of a jaxpr's inputs, of which those at `places` are stored ones."""

    def function(*values: Value) -> list[jax.Array]:
        arrays = [*values]
        for i in places:
            arrays[i] = stored(array_of(arrays[i]))
        return interpreter.evaluate(jaxpr, origins, *arrays)

    return function
