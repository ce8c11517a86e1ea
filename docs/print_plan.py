"""Prints the plan of a program: what `autocast` runs, saves and recomputes.

`python docs/print_plan.py` prints that of an attention block. It reads private modules.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp_scale import _jaxpr
from jmp_scale._autocast.products import Product
from jmp_scale._autocast.provenance import Origin, Reading, Step, read
from jmp_scale._autocast.recompute.islands import needed_for, read_by_derivative
from jmp_scale._autocast.recompute.plan import Unit, make_plan
from jmp_scale._jaxpr import Var
from jmp_scale._tree import FlatCall


def attention(weights, x):
    h = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True))
    q, k, v = h @ weights["q"], h @ weights["k"], h @ weights["v"]
    scores = q @ jnp.swapaxes(k, 1, 2) / 8
    return x + jax.nn.softmax(scores) @ v @ weights["out"]


def main() -> None:
    weights = {name: jnp.ones((64, 64)) for name in ("q", "k", "v", "out")}
    print(plan_text(attention, weights, jnp.ones((4, 128, 64))))


def plan_text(
    fun: Callable[..., Any], *args: Any, dtype: DTypeLike = "bfloat16"
) -> str:
    """The plan by which `autocast(fun, dtype)` runs, unit by unit."""
    flat = FlatCall(fun, args, {})
    jaxpr = jax.make_jaxpr(flat)(*flat.arrays)
    origins = [Origin.PARAMETER] * len(flat.arrays)
    return "\n".join(_lines(read(jaxpr, origins, jnp.dtype(dtype))))


def _lines(reading: Reading) -> Iterator[str]:
    names = _Names()
    yield f"0 arguments: {names.with_shapes(reading.jaxpr.invars)}"
    for number, part in enumerate(make_plan(reading), 1):
        if isinstance(part, Unit):
            yield from _lines_of_unit(number, part, reading, names)
        else:
            yield from _lines_of_step(number, part, reading, names)
    yield f"results: {names.plain(_jaxpr.variables(reading.jaxpr.outvars))}"


def _lines_of_step(
    number: int, step: Step, reading: Reading, names: "_Names"
) -> Iterator[str]:
    if step.kind == "product" and step.product:
        yield f"{number} half:"
        yield _line_of_product(step.product, names)
        operands = step.product.operands
        yield from _titled("saves in half precision", operands, reading.given, names)
    else:
        yield f"{number} {step.kind}: {step.eqn.primitive.name}"
        made = names.with_shapes(step.outputs)
        yield f"    {made} from {names.plain(step.inputs)}"


def _line_of_product(product: Product, names: "_Names") -> str:
    read, name = names.plain(product.jaxpr.invars), product.equation.primitive.name
    return f"    {names.with_shapes([product.result])} = {name} of {read}"


def _lines_of_unit(
    number: int, unit: Unit, reading: Reading, names: "_Names"
) -> Iterator[str]:
    inputs, outputs = unit.jaxpr.invars, _jaxpr.variables(unit.jaxpr.outvars)
    primitives = [eqn.primitive.name for eqn in unit.jaxpr.eqns]
    yield f"{number} half: {' '.join(primitives)}"
    for product, _ in unit.products:
        yield _line_of_product(product, names)
    in_half, softmaxes, as_they_are = (
        {outputs[i] for i in unit.places(fact)}
        for fact in ("is_saved_in_half", "is_softmax", "is_saved")
    )
    operands = {v for product, _ in unit.products for v in product.operands}
    recomputed = operands.intersection(outputs) - in_half
    read = [*recomputed, *read_by_derivative(unit.jaxpr, softmaxes)]
    saved = needed_for(unit.jaxpr, read, as_they_are).intersection(inputs)
    in_half |= (saved & reading.halves) | operands.intersection(unit.passed)
    full = (as_they_are | saved) - in_half
    everything = [*inputs, *outputs, *unit.passed]
    for title, chosen, known in (
        ("saves in half precision", in_half, reading.given),
        ("saves", full, reading.given),
        ("recomputes", recomputed, ()),
    ):
        yield from _titled(title, [v for v in everything if v in chosen], known, names)


def _titled(
    title: str, chosen: Iterable[Var], known: Iterable[Var], names: "_Names"
) -> Iterator[str]:
    """A line of variables, except those that are known; none if there are none."""
    others = [v for v in dict.fromkeys(chosen) if v not in {*known}]
    if others:
        yield f"    {title}: {names.with_shapes(others)}"


class _Names:
    """Names of variables, in the order in which they are met."""

    def __init__(self) -> None:
        self._names: dict[Var, str] = {}

    def plain(self, variables: Iterable[Var]) -> str:
        return ", ".join(map(self._name, variables))

    def with_shapes(self, variables: Iterable[Var]) -> str:
        return ", ".join(f"{self._name(v)}{[*_jaxpr.shape(v)]}" for v in variables)

    def _name(self, v: Var) -> str:
        return self._names.setdefault(v, _letters(len(self._names)))


def _letters(number: int) -> str:
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    words = (
        "".join(letters)
        for length in itertools.count(1)
        for letters in itertools.product(alphabet, repeat=length)
    )
    return next(itertools.islice(words, number, None))


if __name__ == "__main__":
    main()
