"""A float32 program with a flag for each line with products: half precision or not.

It is traced once. Each product names the number of its group in its name scopes, by
which the interpreter of `autocast` finds it in loops, branches and derivative rules.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ... import _jaxpr
from ..._autocast.dot_general import bilinear
from ..._autocast.higher_order import Part
from ..._autocast.interpreter import Interpreter, Notes, Values
from ..._autocast.linear import Traces
from ..._autocast.marks import meet, tracing
from ..._autocast.products import Product, becomes_half
from ..._autocast.provenance import Origin, Reading
from ..._jaxpr import JaxprEqn, NameStack, Program, Var
from ..._tree import promote_to_float32, split_arrays
from ..._types import Arrays, PyTree
from .._backward import ALL_ROUNDINGS, Backward, Loss, Start, concrete_arrays
from .._source import Place, begin_user_code, place_of
from .comparison import GradientComparison, Reference, judged_error
from .facts import flops

_NUMBER = re.compile(r"float32_or_half_(\d+)")
_MOST_FLAGS = 4096  # flags of the compiled program, one for each group


@dataclasses.dataclass(eq=False)
class ProductGroup:
    """The matrix products and convolutions of one line of the program, in one scope."""

    number: int
    # A product or a call with a rule, after those around it.
    equations: tuple[JaxprEqn, ...]
    place: Place
    work: int = 0  # floating-point operations forward

    @property
    def scopes(self) -> tuple[str, ...]:
        """Names of the scopes and modules that it is in, without transformations."""
        stacks = [eqn.source_info.name_stack.stack for eqn in self.equations]
        scopes = [s for stack in stacks for s in stack if type(s).__name__ == "Scope"]
        return tuple(scope.name for scope in scopes)

    def is_kept(self, name: str) -> bool:
        return any(meet({name}, eqn).is_exempt for eqn in self.equations)

    def names(self) -> list[str]:
        """Names that keep it: of its function, of itself, of its scopes."""
        parts = self.place.function.split(".")
        functions = [p for p in parts if p.isidentifier() and not p.startswith("__")]
        scopes = self.scopes
        paths = [".".join(scopes[-n:]) for n in range(1, len(scopes) + 1)]
        return [*functions[-1:], where(self.place), *paths]


def where(place: Any) -> str:
    """Returns the name of a line for `keep_float32=`."""
    return place.library or f"{os.path.basename(place.file or '?')}:{place.line}"


class Probe:
    """A loss and its backward pass, compiled once for all choices of its products."""

    def __init__(
        self, loss: Loss, forward: np.dtype, backward: np.dtype, start: Start
    ) -> None:
        self._loss, self._forward, self._backward = loss, forward, backward
        self._start = start
        arrays, self._rejoin = concrete_arrays(loss.function, loss.args)
        # As the gradients of `compare_gradients`, these are of float32 parameters.
        self._arrays = promote_to_float32(arrays)
        self._by_place: dict[Hashable, ProductGroup] = {}
        self._cast: set[int] = set()  # numbers of those that `autocast` casts
        self.work = 0  # of all
        # At level 3 small products need six times as long to compile, and run as fast.
        options = {**ALL_ROUNDINGS, "xla_backend_optimization_level": 1}
        self._program = jax.jit(self._backward_pass, compiler_options=options)
        in_float32 = np.zeros(_MOST_FLAGS, bool), jnp.float32(1)
        run = functools.partial(self._program, *in_float32)
        self.reference = Reference(run, self._arrays)
        self.groups = [g for g in self._by_place.values() if g.number in self._cast]

    def error(self, half: Sequence[ProductGroup]) -> float:
        """Returns the error of the gradient with these products in half precision."""
        return judged_error(self.compared(half, self._start))

    def compared(
        self, half: Sequence[ProductGroup], start: Start
    ) -> GradientComparison:
        """Compares the gradient that has these products in half precision."""
        flags = np.zeros(_MOST_FLAGS, bool)
        flags[[group.number for group in half]] = True
        found = start.found(lambda s: self._program(flags, s, self._arrays))
        return self.reference.compared(*found)

    def _backward_pass(
        self, flags: jax.Array, s: jax.Array, arrays: Arrays
    ) -> Backward:
        fun = functools.partial(self._flagged, flags)
        flagged = dataclasses.replace(self._loss, fun=fun, has_aux=False)
        return flagged.run(s, self._rejoin(arrays))

    def _flagged(self, flags: jax.Array, *args: PyTree) -> jax.Array:
        arrays, rejoin = split_arrays(args)

        def loss(*arrays: jax.Array) -> jax.Array:
            return self._loss.of(begin_user_code(self._loss.fun, *rejoin(arrays)))

        with tracing(self._forward):
            program = jax.make_jaxpr(loss)(*arrays)
        flagged = _Flagged(
            forward=self._forward,
            backward=self._backward,
            names=frozenset(),
            traces=Traces(),
            notes=Notes(warned=set()),
            flags=flags,
            met=self._cast,
        )
        program = self._numbered(program, (), Place(), 1)
        origins = [Origin.PARAMETER] * len(arrays)
        return flagged.evaluate(program, origins, *arrays)[0]

    def _numbered(
        self, jaxpr: Program, outer: tuple[JaxprEqn, ...], place: Place, times: int
    ) -> Program:
        """Returns a jaxpr whose products, and calls with rules, name their numbers."""

        def change(eqn: JaxprEqn) -> JaxprEqn:
            work = sum(map(flops, (eqn, *_jaxpr.equations_within(eqn))))
            if not work:
                return eqn
            self.work += times * flops(eqn)
            chain, here = (*outer, eqn), place_of(eqn, place)

            def numbered(nested: Program) -> Program:
                return self._numbered(nested, chain, here, times * _jaxpr.repeats(eqn))

            params = _jaxpr.map_jaxprs(numbered, eqn)
            # A call with a rule has a number for the products of the rule.
            if not becomes_half(eqn) and eqn.primitive.name != "custom_jvp_call":
                return eqn.replace(params=params)
            new = ProductGroup(len(self._by_place), chain, here)
            key = *here[:2], here.library, new.scopes
            group = self._by_place.setdefault(key, new)
            group.work += times * work
            stack = eqn.source_info.name_stack.extend(f"float32_or_half_{group.number}")
            return _jaxpr.with_scopes(eqn.replace(params=params), stack)

        return _jaxpr.map_equations(change, jaxpr)


@dataclasses.dataclass(frozen=True)
class _Flagged(Interpreter):
    """Evaluates each product in half precision where its flag is set."""

    flags: Any = dataclasses.field(default=None, compare=False)  # bool[N], by group
    # The numbers of the groups that it met.
    met: set[int] = dataclasses.field(default_factory=set, compare=False)
    rule: int = -1  # number of the call whose rule for derivatives this is

    def named(
        self, v: Var, x: jax.Array, reading: Reading, values: Values
    ) -> jax.Array:
        """Leaves results without names: not all of them are in half precision."""
        return x

    def within(self, eqn: JaxprEqn, part_of: Part) -> Interpreter:
        nested = dataclasses.replace(self, rule=self._number(NameStack(), eqn))
        return Interpreter.within(nested, eqn, part_of)

    def evaluate_product(
        self, product: Product, reading: Reading, values: Values
    ) -> jax.Array:
        inputs = [values[v] for v in product.jaxpr.invars]
        number = self._number(product.scope, product.equation)
        self.met.add(number)
        half = self.flags[number]
        copies = [_rounded(x, half, self.forward) for x in inputs[:2]]

        def term(side: int, *copies: jax.Array) -> jax.Array:
            float32 = side if product.float32_grads[side] else None
            return _multiply(product, self.backward, float32, *copies)

        run = functools.partial(_multiply, product, self.forward, None)
        with _jaxpr.scope(product.scope):
            return bilinear(run, term, inputs[:2], [*copies, *inputs[2:], half])

    def _number(self, scope: NameStack, eqn: JaxprEqn) -> int:
        """Returns the number of the innermost product or call, or of the rule."""
        scopes = f"{scope}/{eqn.source_info.name_stack}"
        return int([self.rule, *_NUMBER.findall(scopes)][-1])


def _multiply(
    product: Product, dtype: DTypeLike, float32: int | None, *values: jax.Array
) -> jax.Array:
    """Multiplies, and rounds where the last value is True; operand `float32` stays."""
    *operands, half = values
    for side in {0, 1} - {float32}:
        operands[side] = _rounded(operands[side], half, dtype)
    precision = (jax.lax.Precision.HIGHEST,) * 2  # the flag decides, not the machine
    moved = product.moved(operands)
    (result,) = _jaxpr.evaluate(product.equation, moved, precision=precision)
    return _rounded(result, half, dtype)


def _rounded(x: jax.Array, half: jax.Array, dtype: DTypeLike) -> jax.Array:
    return jnp.where(half, x.astype(dtype).astype(x.dtype), x)
